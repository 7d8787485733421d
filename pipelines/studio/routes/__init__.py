"""The addresses of the studio. Each answers for the browser's own projects alone."""

import threading

from fastapi import FastAPI

from pipelines.studio.editor import SoundEditor
from pipelines.studio.routes import pictures, projects, requests, versions
from pipelines.studio.routes.refusals import add_refusals
from pipelines.studio.routes.windows import OpenWindows


def add_routes(app: FastAPI, editor: SoundEditor) -> None:
    """Add the addresses below /studio to an app."""
    app.state.editor, app.state.windows = editor, OpenWindows(editor)
    # few are followed at a time: more would take the server's threads
    app.state.following = threading.Semaphore(editor.store.limits.waiting)
    for module in (projects, pictures, versions, requests):
        app.include_router(module.router)
    add_refusals(app)
