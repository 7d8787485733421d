"""The addresses of the studio. Each answers for the browser's own projects alone, and errors are sentences."""

import threading
from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from soundfile import SoundFileError

from audiollm.audio import AudioError
from audiollm.errors import ConfigError, StageError
from pipelines.studio.editor import SoundEditor, sentence_of
from pipelines.studio.limits import StudioRefusal
from pipelines.studio.routes import pictures, projects, requests, versions
from pipelines.studio.routes.dependencies import OpenWindows


def add_refusals(app: FastAPI) -> None:
    """Answer everything that a person can mend with a sentence."""

    def refusal(request: Request, error: StudioRefusal) -> Response:
        return JSONResponse({"sentence": error.sentence}, error.status)

    def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = _place_in_words(first["loc"][1:])
        message = str(first["msg"]).removeprefix("Value error, ")
        return JSONResponse({"sentence": f"{place}: {message}." if place else f"{message}."}, 422)

    def bad_input(request: Request, error: Exception) -> Response:
        return JSONResponse({"sentence": sentence_of(error)}, 400)

    def full_disk(request: Request, error: OSError) -> Response:
        if isinstance(error, FileNotFoundError):
            return JSONResponse({"sentence": "It was deleted meanwhile: choose the project anew."}, 404)
        return JSONResponse(
            {"sentence": f"The disk refused it ({error.strerror}): make room, then try again."}, 507
        )

    app.add_exception_handler(StudioRefusal, refusal)
    app.add_exception_handler(RequestValidationError, invalid)
    for kind in (ConfigError, StageError, AudioError, ValidationError, ValueError, SoundFileError):
        app.add_exception_handler(kind, bad_input)
    app.add_exception_handler(OSError, full_disk)


# Private


def _place_in_words(parts: Sequence[str | int]) -> str:
    """The place of a wrong value as a person sees it: rows of the table are counted from 1."""
    if tuple(parts[:2]) == ("record", "events") and len(parts) > 2:
        return " ".join([f"Row {int(parts[2]) + 1} of the chain of thought", *map(str, parts[3:4])])
    if parts[:1] == ("record",):
        return " ".join(["The chain of thought", *map(str, parts[1:2])])
    return ".".join(map(str, parts))


def add_routes(app: FastAPI, editor: SoundEditor) -> None:
    """Add the addresses below /studio to an app."""
    app.state.editor, app.state.windows = editor, OpenWindows(editor)
    # few are followed at a time: more would take the server's threads
    app.state.following = threading.Semaphore(editor.store.limits.waiting)
    for module in (projects, pictures, versions, requests):
        app.include_router(module.router)
    add_refusals(app)
