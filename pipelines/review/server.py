"""The server of `audiollm review`: the page of one annotation behind the gate of `audiollm serve`."""

from __future__ import annotations

import socket
from typing import Any

from pipelines.review.table import ReviewTable

ADDRESS = "127.0.0.1"
MAX_BODY_BYTES = 1_000_000


def review_app(table: ReviewTable) -> Any:
    """The app of one annotation. Callers by other names than this machine's and pages of other origins are refused."""
    from fastapi import FastAPI

    from audiollm.serve.gate import ServeGate, ServerState
    from pipelines.review.routes import add_review_routes

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_review_routes(app, "", table)
    app.add_middleware(ServeGate, state=ServerState(host=ADDRESS, max_body_bytes=MAX_BODY_BYTES))
    return app


def run_review_server(app: Any, listener: socket.socket) -> None:
    """Answer requests until Ctrl-C."""
    import uvicorn

    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2, server_header=False)
    uvicorn.Server(config).run(sockets=[listener])
