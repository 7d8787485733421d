"""The addresses of the page, for the server of `audiollm review` and for the studio."""

# no `from __future__ import annotations`: FastAPI reads the types of the functions inside

from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from audiollm.audio import AudioError
from audiollm.errors import first_problem
from audiollm.files.atomic import DamagedFile
from pipelines.review.sounds import span_picture, span_wav
from pipelines.review.table import ReviewRefusal, ReviewTable, RevisionConflict, SegmentEdit, TableQuery

PAGE_FILES = {"": ("review.html", "text/html"), "review.css": ("review.css", "text/css"),
              "review.js": ("review.js", "text/javascript"), "queue.js": ("queue.js", "text/javascript")}  # fmt: skip
"""Address below the page's -> file and media type."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; media-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page loads nothing but its own files, and stands in no frame."""

OWN_PAGES = {"cross-origin-resource-policy": "same-origin", "cache-control": "private, max-age=3600"}
"""Sound and pictures of recordings are played by no page of another origin."""


def add_review_routes(app: FastAPI, prefix: str, table: ReviewTable) -> None:
    """Add the addresses of one annotation to an app.

    Args:
        prefix: of the addresses: empty, or a path that begins with a slash.
    """
    router = APIRouter(prefix=prefix)

    def add_page_file(address: str, name: str, media_type: str) -> None:
        content = files("pipelines.review").joinpath("page", name).read_bytes()

        def page_file() -> Response:
            return Response(content, media_type=media_type, headers={"content-security-policy": POLICY})

        router.add_api_route(f"/{address}", page_file, methods=["GET"])

    for address, (name, media_type) in PAGE_FILES.items():
        add_page_file(address, name, media_type)

    @router.get("/facts")
    def facts() -> dict[str, Any]:
        return table.facts()

    @router.get("/rows")
    def rows(query: str = "{}") -> dict[str, Any]:
        try:
            return table.page(TableQuery.model_validate_json(query))
        except ValidationError as error:
            raise ReviewRefusal(f"{first_problem(error)}.", 422) from None

    @router.get("/rows/{key}")
    def row(key: str) -> dict[str, Any]:
        return table.row(key)

    @router.get("/sounds/{key}.wav")
    def sound(key: str, start_s: float, end_s: float) -> Response:
        content = span_wav(table.recording(key), start_s, end_s)
        return Response(content, media_type="audio/wav", headers=OWN_PAGES)

    @router.get("/pictures/{key}.png")
    def picture(key: str, start_s: float, end_s: float) -> Response:
        content = span_picture(table.recording(key), start_s, end_s)
        return Response(content, media_type="image/png", headers=OWN_PAGES)

    @router.post("/corrections")
    def correct(edit: dict[str, Any]) -> dict[str, Any]:
        try:
            return table.correct(SegmentEdit.model_validate(edit))
        except ValidationError as error:
            raise ReviewRefusal(f"{first_problem(error).removeprefix('fields.')}.", 422) from None

    app.include_router(router)
    _add_refusals(app)


def _add_refusals(app: FastAPI) -> None:
    """Answer what a person can mend with a sentence."""

    def conflict(request: Request, error: RevisionConflict) -> Response:
        return JSONResponse({"sentence": error.sentence, "row": error.row}, error.status)

    def refusal(request: Request, error: ReviewRefusal) -> Response:
        return JSONResponse({"sentence": error.sentence}, error.status)

    def damaged(request: Request, error: DamagedFile) -> Response:
        return JSONResponse({"sentence": " ".join(str(error).split())}, 500)

    def unreadable(request: Request, error: AudioError) -> Response:
        return JSONResponse({"sentence": f"The recording cannot be read: {error.reason}."}, 422)

    def full_disk(request: Request, error: OSError) -> Response:
        sentence = f"Not saved: the disk refused it ({error.strerror}). Make room; the page tries again."
        return JSONResponse({"sentence": sentence}, 507)

    for kind, handler in (
        (RevisionConflict, conflict), (ReviewRefusal, refusal), (DamagedFile, damaged), (AudioError, unreadable),
        (OSError, full_disk),
    ):  # fmt: skip
        if kind not in app.exception_handlers:  # the studio has sentences of its own for files and disks
            app.add_exception_handler(kind, handler)
