"""`/v1/realtime/translations`: a model of streams translates what a client says while it is said, in OpenAI's events.

Shapes: N samples.
"""

# no `from __future__ import annotations`: FastAPI reads the types

import asyncio
import base64
import json
import time
import uuid
from functools import partial
from typing import Any

from fastapi import APIRouter, WebSocket
from pydantic import Field
from torch import Tensor

from audiollm.audio.sound_encoder import StreamResampler, pcm16
from audiollm.data.text.languages import language_of
from audiollm.errors import StageError
from audiollm.evaluate.alignment.written_words import has_spaces
from audiollm.interpret.live.live_session import LiveAction, LiveSession
from audiollm.serve.app_state import AppState
from audiollm.serve.bodies import ServeBody
from audiollm.serve.errors import ApiError, as_api_error
from audiollm.serve.gate import log
from audiollm.serve.interpreters import ServedInterpreter
from audiollm.serve.realtime_items import decode_pcm, validated
from audiollm.serve.socket_sessions import answer_in_order
from audiollm.serve.speech_session_route import read_json_message

TRANSLATIONS_PATH = "/v1/realtime/translations"
RATE = 24_000
"""Samples per second of what comes and goes."""
SESSION_S = 24 * 3600
"""Told as the end of a session; what ends it is its client."""


class InputSettings(ServeBody):
    transcription: None = None
    noise_reduction: None = None


class OutputSettings(ServeBody):
    language: None = None
    """The model writes the language that it was trained to write."""


class AudioSettings(ServeBody):
    input: InputSettings = Field(default_factory=InputSettings)
    output: OutputSettings = Field(default_factory=OutputSettings)


class TranslationSettings(ServeBody):
    """`session` of `session.update`: a client may send its fields, and can set none of them."""

    audio: AudioSettings = Field(default_factory=AudioSettings)


class SessionEnd(Exception):
    """The client has closed the session, and got all that it said."""


class TranslationSession:
    """A client's stream to one model."""

    def __init__(self, state: AppState, socket: WebSocket) -> None:
        self._state, self._socket = state, socket
        self._model: ServedInterpreter | None = None
        self._session: LiveSession | None = None
        self._to_model: StreamResampler | None = None
        self._to_client: StreamResampler | None = None
        self._said = ""

    async def begin(self, name: str) -> None:
        """Begin with the model that the address names.

        Raises:
            ApiError: there is none of this name, or too many streams are open.
            ConfigError: the model does not hear in pieces.
        """
        interpreters = self._state.interpreters
        if not name and len(interpreters) == 1:
            name = next(iter(interpreters))
        self._model = model = self._state.interpreter(name)
        self._state.begin_stream()
        live = model.live
        self._session = await model.run(live.session)
        self._to_model = None if live.sample_rate == RATE else StreamResampler(RATE, live.sample_rate)
        codec_rate = live.model.codec.sample_rate if live.speaks else RATE
        self._to_client = None if codec_rate == RATE else StreamResampler(codec_rate, RATE)
        await self._send({"type": "session.created", "session": self._session_row()})

    def end(self) -> None:
        """Give the place of the stream back."""
        if self._model is not None and self._session is not None:
            self._state.end_stream()
            self._session = None

    async def read(self) -> dict[str, Any] | None:
        """Read a message; None: the client has left."""
        message = await self._socket.receive()
        return None if message["type"] == "websocket.disconnect" else dict(message)

    async def answer(self, message: dict[str, Any]) -> None:
        """Follow a client's event; a mistake is answered with `error`, and the next event is taken.

        Raises:
            SessionEnd: the session is closed.
        """
        event: dict[str, Any] = {}
        try:
            event = read_json_message(message)
            await self._follow_event(event)
        except (ConnectionError, TimeoutError, SessionEnd):
            raise
        except Exception as error:
            await self.refuse(error, event.get("event_id"))
            if isinstance(error, StageError):  # it can hear no more
                raise SessionEnd from error

    async def refuse(self, error: Exception, event_id: object = None) -> None:
        """Send an error."""
        if isinstance(error, StageError):
            error = ApiError(400, " ".join(str(error).split()), None, "stream_too_long")
        api_error = as_api_error(error)
        if api_error.status == 500:
            log.error("a translation failed", exc_info=error)
        self._state.server.requests[TRANSLATIONS_PATH, api_error.status] += 1
        row = json.loads(api_error.body())["error"]
        await self._send({"type": "error", "error": {**row, "event_id": event_id}})

    async def _follow_event(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "session.update":
            changes = event.get("session")
            validated(TranslationSettings, changes if isinstance(changes, dict) else {}, "session")
            await self._send({"type": "session.updated", "session": self._session_row()})
        elif kind == "session.input_audio_buffer.append":
            samples_1N = decode_pcm(event.get("audio"), "audio")
            await self._hear(samples_1N if self._to_model is None else self._to_model.push(samples_1N))
        elif kind == "session.close":
            await self._close()
        else:
            known = "session.update, session.input_audio_buffer.append, session.close"
            message = f"no such event: {kind!r}: this session follows {known}"
            raise ApiError(400, message, "type", "unknown_event")

    async def _hear(self, samples_1N: Tensor) -> None:
        """Hear sound at the model's rate; chunk by chunk, so that other sessions have their turns between."""
        assert self._model is not None and self._session is not None
        actions = self._session.hear(samples_1N)
        while (action := await self._model.run(partial(next, actions, None))) is not None:
            await self._tell(action)

    async def _close(self) -> None:
        """Hear what is left, and say the last words."""
        assert self._model is not None and self._session is not None
        if self._to_model is not None:
            await self._hear(self._to_model.finish())
        actions = self._session.finish()
        while (action := await self._model.run(partial(next, actions, None))) is not None:
            await self._tell(action)
        if self._to_client is not None and self._model.live.speaks:
            await self._send_sound(self._to_client.finish(), round(1000 * self._session.heard_s))
        self._state.server.requests[TRANSLATIONS_PATH, 200] += 1
        await self._send({"type": "session.closed"})
        raise SessionEnd

    async def _tell(self, action: LiveAction) -> None:
        elapsed_ms = round(1000 * action.heard_s)
        words = action.text.strip()
        if words:
            joint = " " if self._said and has_spaces(language_of(words)) else ""
            self._said = words
            delta = {"type": "session.output_transcript.delta", "delta": f"{joint}{words}"}
            await self._send({**delta, "elapsed_ms": elapsed_ms})
        if action.samples_1N.shape[1]:
            samples_1N = action.samples_1N
            await self._send_sound(
                samples_1N if self._to_client is None else self._to_client.push(samples_1N), elapsed_ms
            )

    async def _send_sound(self, samples_1N: Tensor, elapsed_ms: int) -> None:
        if samples_1N.shape[1]:
            content = base64.b64encode(pcm16(samples_1N)).decode()
            form = {"format": "pcm16", "sample_rate": RATE, "channels": 1, "elapsed_ms": elapsed_ms}
            await self._send({"type": "session.output_audio.delta", "delta": content, **form})

    def _session_row(self) -> dict[str, Any]:
        assert self._model is not None
        return {
            "id": f"sess_{uuid.uuid4().hex}", "type": "translation", "model": self._model.name,
            "expires_at": int(time.time()) + SESSION_S, "audio": TranslationSettings().model_dump()["audio"],
        }  # fmt: skip

    async def _send(self, event: dict[str, Any]) -> None:
        sending = self._socket.send_json({"event_id": f"event_{uuid.uuid4().hex}", **event})
        await asyncio.wait_for(sending, self._state.limits.stall_s)


def add_translation_session_route(router: APIRouter, state: AppState) -> None:
    """Add the route."""

    @router.websocket(TRANSLATIONS_PATH)
    async def translate_stream(socket: WebSocket, model: str = "") -> None:
        await socket.accept(subprotocol="realtime" if "realtime" in socket.scope["subprotocols"] else None)
        session = TranslationSession(state, socket)
        try:
            try:
                await session.begin(model)
                await answer_in_order(session.read, session.answer)
            except SessionEnd:
                await socket.close()
            except (ConnectionError, TimeoutError, RuntimeError):
                return  # the client has left, or reads nothing
            except Exception as error:
                await session.refuse(error)
                await socket.close()
        finally:
            session.end()
