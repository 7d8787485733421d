"""`/v1/chat/completions`: words and recordings in, words and speech out."""

# no `from __future__ import annotations`: FastAPI reads the types

import asyncio
import base64
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from audiollm.audio import Waveform
from audiollm.audio.sound_encoder import SoundEncoder, encode_sound
from audiollm.generation.engine.request import AnswerKind
from audiollm.models.audio_llms.inputs import Turn, TurnPart
from audiollm.serve.app_state import AppState
from audiollm.serve.bodies import ChatBody, ChatMessage, InputAudioContent, TextContent
from audiollm.serve.calls import (
    CallStream,
    Chunk,
    ServerCall,
    await_whole,
    open_stream,
    sse,
    with_error_event,
)
from audiollm.serve.errors import ApiError
from audiollm.serve.model import ChatPrompt, ServerModel
from audiollm.serve.plans import ChatAnswer, chat_plan

AUDIO_LIFE_S = 3600
"""Seconds after which a client forgets the id of a spoken answer; the server keeps none."""


@dataclass(frozen=True)
class Completion:
    """What all pieces of an answer have in common."""

    id: str
    model: str
    created: int

    def chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        """A piece of a streamed answer."""
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {
            "id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model,
            "choices": [choice],
        }  # fmt: skip


def add_chat_route(router: APIRouter, state: AppState) -> None:
    """Add the route."""

    @router.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        model = state.model(body.model)
        kind = check_chat(state, body, model)
        turns = [await _turn(state, message, place) for place, message in enumerate(body.messages)]
        if any(isinstance(part, Waveform) for _, parts in turns for part in parts):
            model.check_hears()
        prompt = ChatPrompt(
            turns,
            kind,
            body.seed,
            body.temperature,
            body.top_p,
            _max_tokens(state, body),
            _max_frames(state, model),
        )
        completion = Completion(f"chatcmpl-{uuid.uuid4().hex}", model.name, int(time.time()))
        if body.stream:
            return await _stream(state, body, prompt, completion, model=model, request=request)
        call = ServerCall(state.service, model, lambda emit: chat_plan(model, prompt, emit, streamed=False))
        answer = await await_whole(request, call, state.limits.request_s)
        return JSONResponse(await asyncio.to_thread(_whole, completion, body, model, answer))


def check_chat(state: AppState, body: ChatBody, model: ServerModel) -> AnswerKind:
    """Check what needs no model, and return the kind of the answer.

    Raises:
        ApiError: a field that cannot be followed.
    """
    speaks = "audio" in body.modalities
    if speaks:
        model.speaking()
    elif body.audio is not None:
        raise ApiError(400, "no speech is asked for: add audio to `modalities`", "audio")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "is the same as max_completion_tokens: give one of them", "max_tokens")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "only a stream has options: set `stream`", "stream_options")
    if body.stream and speaks and body.audio is not None and body.audio.format == "wav":
        message = "pieces of a WAV are no files: take pcm, mp3, opus, aac or flac"
        raise ApiError(400, message, "audio.format", "not_supported")
    if body.messages[-1].role not in ("user", "system", "developer"):
        raise ApiError(400, "the last message is the assistant's: end with one of the user", "messages")
    _max_tokens(state, body)
    texts = [text for message in body.messages for text in _message_texts(message)]
    if sum(map(len, texts)) > state.limits.text_characters:
        message = f"the conversation has more than {state.limits.text_characters} characters: cut it"
        raise ApiError(400, message, "messages", "text_too_long")
    if not speaks:
        return "text"
    return "any" if "text" in body.modalities else "audio"


def _message_texts(message: ChatMessage) -> Sequence[str]:
    if isinstance(message.content, str):
        return [message.content]
    return [part.text for part in message.content if isinstance(part, TextContent)]


def _max_tokens(state: AppState, body: ChatBody) -> int:
    asked = body.max_completion_tokens or body.max_tokens
    longest = state.limits.answer_tokens
    if asked is not None and asked > longest:
        name = "max_tokens" if body.max_tokens else "max_completion_tokens"
        raise ApiError(400, f"an answer has at most {longest} tokens here: give less", name)
    return asked or min(512, longest)


def _max_frames(state: AppState, model: ServerModel) -> int:
    if not model.speaks:
        return 1
    return max(1, round(min(30.0, state.limits.speech_s) * model.speaking().codec.frame_rate))


async def _turn(state: AppState, message: ChatMessage, place: int) -> Turn:
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return role, [message.content]
    parts: list[TurnPart] = []
    for number, part in enumerate(message.content):
        field = f"messages.{place}.content.{number}"
        if isinstance(part, TextContent):
            parts.append(part.text)
        else:
            data = part.input_audio.data if isinstance(part, InputAudioContent) else part.audio_url.url
            parts.append(await state.read_base64(data, field))
    return role, parts


def _usage(answer: ChatAnswer) -> dict[str, int] | None:
    if answer.prompt_tokens is None or answer.answer_tokens is None:
        return None
    return {
        "prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.answer_tokens,
        "total_tokens": answer.prompt_tokens + answer.answer_tokens,
    }  # fmt: skip


def _whole(completion: Completion, body: ChatBody, model: ServerModel, answer: ChatAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
    if answer.samples_1N is not None:
        rate = model.speaking().codec.sample_rate
        format = body.audio.format if body.audio is not None else "wav"
        content = encode_sound(answer.samples_1N, rate, format)
        message["audio"] = {
            "id": f"audio_{uuid.uuid4().hex}", "data": base64.b64encode(content).decode(),
            "transcript": answer.text, "expires_at": completion.created + AUDIO_LIFE_S,
        }  # fmt: skip
    finish = "stop" if answer.stopped else "length"
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    return {
        "id": completion.id, "object": "chat.completion", "created": completion.created, "model": completion.model,
        "choices": [choice], "usage": _usage(answer),
    }  # fmt: skip


async def _stream(
    state: AppState,
    body: ChatBody,
    prompt: ChatPrompt,
    completion: Completion,
    *,
    model: ServerModel,
    request: Request,
) -> Response:
    call = await open_stream(
        state, model, lambda emit: chat_plan(model, prompt, emit, streamed=True), request
    )
    chunks = with_error_event(_chat_events(call, model, body, completion))
    return CallStream(
        call, chunks, "text/event-stream", stall_s=state.limits.stall_s, on_end=state.end_stream
    )


async def _chat_events(
    call: ServerCall, model: ServerModel, body: ChatBody, completion: Completion
) -> AsyncIterator[Chunk]:
    yield sse(completion.chunk({"role": "assistant", "content": ""})), 0.0
    encoder: SoundEncoder | None = None
    audio_id = f"audio_{uuid.uuid4().hex}"
    format = body.audio.format if body.audio is not None else "pcm"

    def audio_event(content: bytes) -> bytes:
        if not content:
            return b""
        audio = {"id": audio_id, "data": base64.b64encode(content).decode()}
        return sse(completion.chunk({"audio": audio}))

    async for piece in call.pieces():
        if isinstance(piece.item, str):
            yield sse(completion.chunk({"content": piece.item})), 0.0
            continue
        encoder = encoder or SoundEncoder(format, model.speaking().codec.sample_rate)
        yield audio_event(encoder.push(piece.item)), piece.sound_s
    if encoder is not None:
        yield audio_event(encoder.finish()), 0.0
    answer = call.result
    assert isinstance(answer, ChatAnswer)
    yield sse(completion.chunk({}, "stop" if answer.stopped else "length")), 0.0
    if body.stream_options is not None and body.stream_options.include_usage:
        yield sse({**completion.chunk({}), "choices": [], "usage": _usage(answer)}), 0.0
    yield sse("[DONE]"), 0.0
