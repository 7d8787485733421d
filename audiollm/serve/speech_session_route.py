"""`/v1/audio/speech/stream`: text in as it is written, speech out sentence by sentence, over a websocket."""

# no `from __future__ import annotations`: FastAPI reads the types

import asyncio
import json
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, WebSocket
from pydantic import ValidationError

from audiollm.errors import ConfigError
from audiollm.serve.app_state import AppState
from audiollm.serve.bodies import SpeechSessionBody
from audiollm.serve.errors import ApiError, as_api_error, as_validation_error
from audiollm.serve.gate import check_open, log
from audiollm.serve.model import ServerModel
from audiollm.serve.socket_sessions import SentenceBuffer, answer_in_order, speech_pieces
from audiollm.serve.speech_settings import (
    check_speech_settings,
    encode_pieces,
    read_voice,
    streamed_speech_plan,
)
from audiollm.serve.voices import Reference

SESSION_PATH = "/v1/audio/speech/stream"
FIELDS = {"text": "text", "scene": "instructions", "speaker": "voice"}
"""Names of the session's fields by the places that errors of speaking name."""


def add_speech_session_route(router: APIRouter, state: AppState) -> None:
    """Add the route."""

    @router.websocket(SESSION_PATH)
    async def speech_session(socket: WebSocket) -> None:
        await socket.accept()
        session = SpeechSession(state, socket)
        try:
            await answer_in_order(session.read, session.answer)
        except (ConnectionError, TimeoutError, RuntimeError):
            return  # the client has left, or reads nothing


class SpeechSession:
    """The messages of a client: `session.config`, then `input.text` as often as needed, then `input.done`.

    Sentences are said in their order. After `session.done` another text may follow.
    """

    def __init__(self, state: AppState, socket: WebSocket) -> None:
        self._state, self._socket = state, socket
        self._settings: SpeechSessionBody | None = None
        self._model: ServerModel | None = None
        self._voice: str | Reference | None = None
        self._buffer, self._num_sentences = SentenceBuffer(state.limits.text_characters), 0

    async def read(self) -> dict[str, Any] | None:
        """Read a message; None: the client has left."""
        message = await self._socket.receive()
        return None if message["type"] == "websocket.disconnect" else dict(message)

    async def answer(self, message: dict[str, Any]) -> None:
        """Answer a message; a mistake is answered with `error`, and the next message is taken."""
        try:
            check_open(self._state.server)
            await self._answer(read_json_message(message))
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            api_error = self._as_api_error(error)
            if api_error.status == 500:
                log.error("a session of speech failed", exc_info=error)
            self._buffer.rest()
            self._state.server.requests[SESSION_PATH, api_error.status] += 1
            await self._send({"type": "error", **json.loads(api_error.body())})

    async def _answer(self, row: dict[str, Any]) -> None:
        kind = row.get("type")
        if kind == "session.config":
            await self._configure(row)
        elif kind == "input.text":
            if not isinstance(row.get("text"), str):
                raise ApiError(400, "there is no text: give a string", "text")
            self._settled()
            for sentence in self._buffer.add(row["text"]):
                await self._say(sentence)
        elif kind == "input.done":
            self._settled()
            for sentence in self._buffer.rest():
                await self._say(sentence)
            count, self._num_sentences = self._num_sentences, 0
            self._state.server.requests[SESSION_PATH, 200] += 1
            await self._send({"type": "session.done", "total_sentences": count})
        else:
            raise ApiError(
                400, f"no such message: {kind!r}: send session.config, input.text or input.done", "type"
            )

    async def _configure(self, row: dict[str, Any]) -> None:
        self._settings = None
        try:
            settings = SpeechSessionBody.model_validate(row)
        except ValidationError as error:
            raise as_validation_error(error.errors(include_url=False)) from error
        self._model = check_speech_settings(self._state, settings)
        self._voice = await read_voice(self._state, self._model, settings)
        self._settings = settings

    def _settled(self) -> tuple[ServerModel, SpeechSessionBody]:
        if self._settings is None or self._model is None:
            raise ApiError(400, "how to speak is not known yet: send session.config first", "type")
        return self._model, self._settings

    async def _say(self, sentence: str) -> None:
        model, settings = self._settled()
        self._state.check_text(sentence, "text")
        codec_rate = model.speaking().codec.sample_rate
        rate = settings.sample_rate or codec_rate
        index, num_bytes, whole = self._num_sentences, 0, bytearray()
        self._num_sentences += 1
        about = {"sentence_index": index, "sentence_text": sentence}
        await self._send(
            {"type": "audio.start", **about, "format": settings.response_format, "sample_rate": rate}
        )
        emitted = speech_pieces(
            self._state, model, streamed_speech_plan(model, settings, self._voice, sentence)
        )
        async with aclosing(emitted), aclosing(
            encode_pieces(emitted, settings.response_format, codec_rate, rate)
        ) as chunks:  # fmt: skip
            async for content, _ in chunks:
                num_bytes += len(content)
                if not settings.stream_audio:
                    whole += content
                elif content:
                    await self._send(content)
        if whole:
            await self._send(bytes(whole))
        await self._send({"type": "audio.done", "sentence_index": index, "total_bytes": num_bytes})

    async def _send(self, content: dict[str, Any] | bytes) -> None:
        sending = (
            self._socket.send_bytes(content)
            if isinstance(content, bytes)
            else self._socket.send_json(content)
        )
        await asyncio.wait_for(sending, self._state.limits.stall_s)

    def _as_api_error(self, error: Exception) -> ApiError:
        if isinstance(error, ConfigError):
            has_recording = self._settings is not None and self._settings.ref_audio is not None
            return as_api_error(error, {**FIELDS, "reference": "ref_audio" if has_recording else "voice"})
        return as_api_error(error)


def read_json_message(message: dict[str, Any]) -> dict[str, Any]:
    text = message.get("text")
    if text is None:
        raise ApiError(400, "messages are JSON in text frames: send such ones", "body")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        raise ApiError(400, "the message is no JSON: send an object", "body") from None
    if not isinstance(row, dict):
        raise ApiError(400, "the message is no object: send one", "body")
    return row
