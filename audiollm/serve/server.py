"""The server: the app of all routes behind the gate, and its end without the loss of an answer."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from audiollm.errors import ConfigError
from audiollm.serve.errors import ApiError, as_api_error, as_validation_error
from audiollm.serve.gate import ServeGate, log

if TYPE_CHECKING:
    from audiollm.serve.app_state import AppState
    from audiollm.serve.wyoming_server import WyomingServer

FIELDS = {"question": "messages", "codec": "model", "audio": "file"}
"""Names of the requests' fields by the places that errors of the models name."""
SEND_BUFFER_BYTES = 16_384
"""Bytes that the system holds for a reader: more would hide that it does not read."""
DRAIN_POLL_S = 0.05


@dataclass(frozen=True)
class Wyoming:
    """Where the protocol Wyoming is spoken."""

    listener: socket.socket
    languages: Sequence[str]
    """Codes of the languages that the models are offered for."""


def serve_app(state: AppState) -> Any:
    """The app of all routes behind the gate."""
    from fastapi import APIRouter, FastAPI
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import Response
    from starlette.exceptions import HTTPException

    from audiollm.families.answering import AnswerError
    from audiollm.generation.service.service import ServiceFull
    from audiollm.serve.chat_route import add_chat_route
    from audiollm.serve.page_routes import add_page_routes
    from audiollm.serve.realtime_route import add_realtime_route
    from audiollm.serve.speech_route import add_speech_route
    from audiollm.serve.speech_session_route import add_speech_session_route
    from audiollm.serve.status_routes import add_status_routes
    from audiollm.serve.transcription_route import add_transcription_route
    from audiollm.serve.translation_session import add_translation_session_route
    from audiollm.serve.voice_routes import add_voice_routes

    app, router = FastAPI(title="audiollm serve", docs_url=None, redoc_url=None), APIRouter()
    for add_route in (
        add_status_routes, add_speech_route, add_speech_session_route, add_voice_routes, add_transcription_route,
        add_chat_route, add_realtime_route, add_translation_session_route,
    ):  # fmt: skip
        add_route(router, state)
    add_page_routes(router)
    app.include_router(router)

    async def answer_error(request: Any, error: Exception) -> Response:
        api_error = as_api_error(error, FIELDS)
        return Response(api_error.body(), api_error.status, api_error.headers, media_type="application/json")

    async def answer_bad_body(request: Any, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await answer_error(request, as_validation_error(error.errors()))

    async def answer_http(request: Any, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {404: "there is no such address: GET /openapi.json lists all", 405: "not by this method"}
        text = message.get(error.status_code, str(error.detail))
        return await answer_error(request, ApiError(error.status_code, text))

    async def answer_unforeseen(request: Any, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return await answer_error(request, error)

    for kind in (ApiError, ConfigError, AnswerError, ServiceFull):
        app.add_exception_handler(kind, answer_error)
    app.add_exception_handler(RequestValidationError, answer_bad_body)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(Exception, answer_unforeseen)
    app.add_middleware(ServeGate, state=state.server)
    return app


def bound_listener(host: str, port: int) -> socket.socket:
    """Bind a socket.

    Raises:
        ConfigError: the address or the port cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        problem = f"{host}:{port} cannot be used ({error.strerror})"
        raise ConfigError(problem, "--port", "give another port, or 0 for any") from None
    return listener


def make_server(state: AppState, wyoming: Wyoming | None = None) -> Any:
    """A server of uvicorn that answers what is under way before it ends.

    Args:
        wyoming: the socket of the protocol Wyoming, whose clients it answers as well.
    """
    import uvicorn

    class DrainingServer(uvicorn.Server):
        """Refuses new requests from the first signal on, and ends when all answers are sent, or at the second one."""

        draining: asyncio.Task[None] | None = None
        wyoming_server: WyomingServer | None = None

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            if wyoming is not None:
                from audiollm.serve.wyoming_server import WyomingServer

                self.wyoming_server = WyomingServer(state, wyoming.languages)
                await self.wyoming_server.start(wyoming.listener)
            await super().startup(sockets)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if state.server.is_draining:
                super().handle_exit(sig, frame)
            state.server.is_draining = True

        async def on_tick(self, counter: int) -> bool:
            if state.server.is_draining and not self.should_exit and self.draining is None:
                self.draining = asyncio.create_task(self.drain())
            return bool(await super().on_tick(counter))

        async def drain(self) -> None:
            if self.wyoming_server is not None:
                self.wyoming_server.close()
            limit = asyncio.get_running_loop().time() + state.limits.drain_s
            while state.service.num_jobs or state.open_streams:
                if asyncio.get_running_loop().time() > limit:
                    break
                await asyncio.sleep(DRAIN_POLL_S)
            self.should_exit = True

    config = uvicorn.Config(
        serve_app(state),
        log_level=logging.CRITICAL,
        access_log=False,
        timeout_graceful_shutdown=2,
        ws_max_size=state.server.max_body_bytes,
        server_header=False,
        lifespan="off",
    )
    return DrainingServer(config)
