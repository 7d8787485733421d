"""`/v1/audio/transcriptions`: recordings to words."""

# no `from __future__ import annotations`: FastAPI reads the types

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import Field

from audiollm.audio import Waveform
from audiollm.serve.app_state import AppState
from audiollm.serve.bodies import Name, Seed, ServeBody, Weight
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
from audiollm.serve.forms import form_description, read_form
from audiollm.serve.model import ChatPrompt, ServerModel
from audiollm.serve.plans import TranscriptSegment, join_segments, transcription_plan, transcription_prompt

TranscriptFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]


class TranscriptionFields(ServeBody):
    """The fields of the form beside `file`."""

    model: Name
    language: Annotated[str, Field(max_length=64)] | None = None
    """Language of the speech, which the question then names."""
    prompt: str | None = None
    response_format: TranscriptFormat = "json"
    temperature: Weight = 0.0
    seed: Seed = 0
    stream: bool = False
    timestamp_granularities: list[Literal["word", "segment"]] = Field(default_factory=list)


def add_transcription_route(router: APIRouter, state: AppState) -> None:
    """Add the route."""

    @router.post("/v1/audio/transcriptions", openapi_extra=form_description(TranscriptionFields, ("file",)))
    async def transcribe(request: Request) -> Response:
        fields, files = await read_form(request, TranscriptionFields, ("file",))
        model = state.model(fields.model)
        check_transcription(fields, model)
        recording = await state.read_recording(files["file"], "file")
        prompt = transcription_prompt(
            fields.language, state.limits.answer_tokens, seed=fields.seed, temperature=fields.temperature
        )
        if fields.stream:
            return await _stream(state, model, recording, prompt, request)
        call = ServerCall(
            state.service, model,
            lambda emit: transcription_plan(model, recording, prompt, emit, in_order=False),
        )  # fmt: skip
        segments = await await_whole(request, call, state.limits.request_s)
        return formatted(segments, fields, recording.duration_s)


def check_transcription(fields: TranscriptionFields, model: ServerModel) -> None:
    """Raises: ApiError: a field that cannot be followed."""
    model.check_hears()
    if fields.prompt:
        message = "what was said before cannot be told: leave it out"
        raise ApiError(400, message, "prompt", "not_supported")
    if "word" in fields.timestamp_granularities:
        message = "the times of words are not known, those of segments are: leave word out"
        raise ApiError(400, message, "timestamp_granularities", "not_supported")
    if fields.timestamp_granularities and fields.response_format != "verbose_json":
        raise ApiError(400, "needs response_format verbose_json", "timestamp_granularities")
    if fields.stream and fields.response_format not in ("json", "text"):
        raise ApiError(400, "a stream has words alone: take json or text", "response_format", "not_supported")


def formatted(
    segments: Sequence[TranscriptSegment], fields: TranscriptionFields, duration_s: float
) -> Response:
    """The transcript in the form that was asked for."""
    text = join_segments(segments)
    if fields.response_format == "text":
        return PlainTextResponse(f"{text}\n")
    if fields.response_format == "json":
        return JSONResponse({"text": text, "usage": {"type": "duration", "seconds": round(duration_s)}})
    if fields.response_format == "srt":
        return PlainTextResponse("\n".join(_subtitle(segments, ",", numbered=True)))
    if fields.response_format == "vtt":
        return PlainTextResponse("\n".join(["WEBVTT", "", *_subtitle(segments, ".", numbered=False)]))
    rows = [
        {
            "id": number,
            "start": round(segment.start_s, 3),
            "end": round(segment.end_s, 3),
            "text": segment.text,
        }
        for number, segment in enumerate(segments)
    ]
    return JSONResponse(
        {
            "task": "transcribe",
            "language": fields.language or "",
            "duration": round(duration_s, 3),
            "text": text,
            "segments": rows,
        }
    )


def _subtitle(segments: Sequence[TranscriptSegment], point: str, numbered: bool) -> list[str]:
    lines: list[str] = []
    for number, segment in enumerate((segment for segment in segments if segment.text), start=1):
        lines += [str(number)] if numbered else []
        lines += [
            f"{_subtitle_clock(segment.start_s, point)} --> {_subtitle_clock(segment.end_s, point)}",
            segment.text,
            "",
        ]
    return lines


def _subtitle_clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    hours, minutes = milliseconds // 3_600_000, milliseconds // 60_000 % 60
    return f"{hours:02d}:{minutes:02d}:{milliseconds // 1000 % 60:02d}{point}{milliseconds % 1000:03d}"


async def _stream(
    state: AppState, model: ServerModel, recording: Waveform, prompt: ChatPrompt, request: Request
) -> Response:
    call = await open_stream(
        state, model, lambda emit: transcription_plan(model, recording, prompt, emit, in_order=True), request
    )
    return CallStream(
        call,
        with_error_event(_transcript_events(call)),
        "text/event-stream",
        stall_s=state.limits.stall_s,
        on_end=state.end_stream,
    )


async def _transcript_events(call: ServerCall) -> AsyncIterator[Chunk]:
    async for piece in call.pieces():
        yield sse({"type": "transcript.text.delta", "delta": piece.item}), 0.0
    yield sse({"type": "transcript.text.done", "text": join_segments(call.result)}), 0.0
