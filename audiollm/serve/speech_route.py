"""`/v1/audio/speech`: texts and dialogues to speech, whole or while it is made."""

# no `from __future__ import annotations`: FastAPI reads the types

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from audiollm.audio import resample
from audiollm.audio.sound_encoder import MEDIA_TYPES, encode_sound
from audiollm.errors import ConfigError
from audiollm.generation.service.jobs import Emit, MakePlan
from audiollm.generation.speaking.dialogue import converse_plan, dialogue_stream, parse_script, together_plan
from audiollm.generation.speaking.plans import Plan
from audiollm.generation.speaking.speak import Speech, speak_plan
from audiollm.generation.speaking.speech_stream import SpeechStream
from audiollm.serve.app_state import AppState
from audiollm.serve.bodies import SpeechBatchBody, SpeechBody
from audiollm.serve.calls import (
    CallStream,
    Chunk,
    ServerCall,
    await_whole,
    open_stream,
    sse,
    with_error_event,
)
from audiollm.serve.errors import ApiError, as_api_error
from audiollm.serve.gate import log
from audiollm.serve.model import ServerModel
from audiollm.serve.speech_settings import (
    check_speech_settings,
    emit_stream,
    encode_pieces,
    manner_of,
    read_voice,
    streamed_speech_plan,
)
from audiollm.serve.voices import Reference

FIELDS = {"text": "input", "dialogue": "input", "scene": "instructions", "speaker": "voice"}
"""Names of the request's fields by the places that errors of speaking name."""


def add_speech_route(router: APIRouter, state: AppState) -> None:
    """Add the route."""

    @router.post("/v1/audio/speech")
    async def speech(body: SpeechBody, request: Request) -> Response:
        return await _speak(state, body, request)

    @router.post("/v1/audio/speech/batch")
    async def speech_batch(body: SpeechBatchBody, request: Request) -> dict[str, Any]:
        items = [_batch_item(state, item, request) for item in body.items]
        return {"object": "list", "data": list(await asyncio.gather(*items))}


async def _batch_item(state: AppState, body: SpeechBody, request: Request) -> dict[str, Any]:
    """An item of a batch, which succeeds or fails alone."""
    try:
        if body.stream or body.stream_format is not None:
            message = "an item of a batch is not streamed: leave out stream_format and stream"
            raise ApiError(400, message, "stream_format", "not_supported")
        answer = await _speak(state, body, request)
    except Exception as error:
        api_error = as_api_error(error)
        if api_error.status >= 500:
            log.error("an item of a batch failed", exc_info=error)
        return {"status": api_error.status, **json.loads(api_error.body())}
    row = {"status": 200, "audio": base64.b64encode(answer.body).decode(), "format": body.response_format}
    return {
        **row,
        "sample_rate": int(answer.headers["X-Sample-Rate"]),
        "notes": answer.headers.get("X-Notes", ""),
    }


async def _speak(state: AppState, body: SpeechBody, request: Request) -> Response:
    try:
        return await _answer_speech(state, body, request)
    except ConfigError as error:
        fields = {**FIELDS, "reference": "ref_audio" if body.ref_audio else "voice"}
        raise as_api_error(error, fields) from error


async def _answer_speech(state: AppState, body: SpeechBody, request: Request) -> Response:
    model = check_speech_body(state, body)
    voice = await read_voice(state, model, body)
    voices = {speaker: state.voice(model, name, f"voices.{speaker}") for speaker, name in body.voices.items()}
    references = {speaker: item for speaker, item in voices.items() if isinstance(item, Reference)}
    if len(references) < len(voices):
        message = "a speaker of the model speaks where the script has that name: list added voices alone"
        raise ApiError(400, message, "voices")
    rate = body.sample_rate or model.speaking().codec.sample_rate
    if body.stream or body.stream_format is not None:
        make = _streamed_plan(model, body, voice, references)
        return await _stream(state, model, body, request, make, rate)
    make_plan = _whole_plan(model, body, voice, references)
    call = ServerCall(state.service, model, make_plan)
    made_speech = await await_whole(request, call, state.limits.request_s)
    assert isinstance(made_speech, Speech)

    def encode() -> bytes:
        samples_1N = resample(made_speech.samples_1N, made_speech.sample_rate, rate)
        return encode_sound(samples_1N, rate, body.response_format)

    content = await asyncio.to_thread(encode)  # a long MP3 takes seconds, and streams go on meanwhile
    return Response(
        content, media_type=MEDIA_TYPES[body.response_format], headers=_headers(rate, made_speech)
    )


def check_speech_body(state: AppState, body: SpeechBody) -> ServerModel:
    """Check what needs no voice, and return the model.

    Raises:
        ApiError: a field that cannot be followed.
    """
    model = check_speech_settings(state, body)
    state.check_text(body.input, "input")
    streamed = body.stream or body.stream_format is not None
    if body.together and streamed:
        message = (
            "turns that are made in one go are sent once they are complete: leave out together, or the stream"
        )
        raise ApiError(400, message, "together", "not_supported")
    if body.dialogue and (body.voice is not None or body.ref_audio is not None):
        raise ApiError(400, "the script names its speakers: give `voices`", "voice")
    if not body.dialogue and (body.voices or body.together):
        message = "only a dialogue has several speakers: set `dialogue`"
        raise ApiError(400, message, "voices" if body.voices else "together")
    if body.stream_format == "sse" and body.response_format == "wav":
        message = "pieces of a WAV are no files: take pcm, mp3, opus, aac or flac"
        raise ApiError(400, message, "response_format", "not_supported")
    return model


def _whole_plan(
    model: ServerModel,
    body: SpeechBody,
    voice: str | Reference | None,
    references: Mapping[str, Reference],
) -> MakePlan:
    def make(emit: Emit) -> Plan[Speech]:
        manner = manner_of(model, body, voice)
        if not body.dialogue:
            return speak_plan(model.speaking(), body.input, manner)
        voices = {name: model.encoded_voice(reference) for name, reference in references.items()}
        plan = together_plan if body.together else converse_plan
        return plan(model.speaking(), parse_script(body.input), voices, manner)

    return make


def _streamed_plan(
    model: ServerModel,
    body: SpeechBody,
    voice: str | Reference | None,
    references: Mapping[str, Reference],
) -> MakePlan:
    if not body.dialogue:
        return streamed_speech_plan(model, body, voice, body.input)

    def open_dialogue() -> SpeechStream:
        voices = {name: model.encoded_voice(reference) for name, reference in references.items()}
        return dialogue_stream(
            model.speaking(), parse_script(body.input), voices, manner_of(model, body, voice)
        )

    return emit_stream(open_dialogue)


async def _stream(
    state: AppState,
    model: ServerModel,
    body: SpeechBody,
    request: Request,
    make: MakePlan,
    rate: int,
) -> Response:
    call = await open_stream(state, model, make, request)
    pieces = encode_pieces(call.pieces(), body.response_format, model.speaking().codec.sample_rate, rate)
    is_sse = body.stream_format == "sse"
    chunks = with_error_event(_speech_events(call, pieces, model)) if is_sse else pieces
    media_type = "text/event-stream" if is_sse else MEDIA_TYPES[body.response_format]
    return CallStream(
        call,
        chunks,
        media_type,
        stall_s=state.limits.stall_s,
        headers=_headers(rate),
        on_end=state.end_stream,
    )


async def _speech_events(
    call: ServerCall, pieces: AsyncIterator[Chunk], model: ServerModel
) -> AsyncIterator[Chunk]:
    async for content, sound_s in pieces:
        event = {"type": "speech.audio.delta", "audio": base64.b64encode(content).decode()}
        yield sse(event) if content else b"", sound_s
    stream = call.result
    assert isinstance(stream, SpeechStream)
    generator = model.speaking()
    words, frames = generator.num_tokens(stream.text), round(stream.duration_s * generator.codec.frame_rate)
    usage = {"input_tokens": words, "output_tokens": frames, "total_tokens": words + frames}
    done: dict[str, Any] = {"type": "speech.audio.done", "usage": usage, "notes": list(stream.notes)}
    yield sse(done), 0.0


def _headers(rate: int, made_speech: Speech | None = None) -> dict[str, str]:
    headers = {"X-Sample-Rate": str(rate)}
    if made_speech is not None and made_speech.notes:
        headers["X-Notes"] = " | ".join(made_speech.notes).encode("ascii", "backslashreplace").decode()
    return headers
