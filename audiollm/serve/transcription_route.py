"""`/v1/audio/transcriptions` and `/v1/audio/translations`: recordings to words."""

# no `from __future__ import annotations`: FastAPI reads the types

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import Field

from audiollm.audio import Waveform
from audiollm.evaluate.alignment.word_times import WordSpan
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
from audiollm.serve.plans import (
    TranscriptSegment,
    join_segments,
    transcription_plan,
    transcription_prompt,
    translation_prompt,
)

TranscriptFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]


LanguageName = Annotated[str, Field(min_length=1, max_length=64)]


class HeardFields(ServeBody):
    """The fields of both forms beside `file`."""

    model: Name
    prompt: str | None = None
    response_format: TranscriptFormat = "json"
    temperature: Weight = 0.0
    seed: Seed = 0


class TranslationFields(HeardFields):
    """The fields of a translation beside `file`."""

    target_language: LanguageName = "English"
    """Language that is written."""

    def heading(self) -> dict[str, str]:
        """What `verbose_json` begins with."""
        return {"task": "translate", "language": self.target_language}


class TranscriptionFields(HeardFields):
    """The fields of a transcription beside `file`."""

    language: LanguageName | None = None
    """Language of the speech, which the question then names."""
    stream: bool = False
    timestamp_granularities: list[Literal["word", "segment"]] = Field(default_factory=list)

    def heading(self) -> dict[str, str]:
        """What `verbose_json` begins with."""
        return {"task": "transcribe", "language": self.language or ""}


def add_transcription_route(router: APIRouter, state: AppState) -> None:
    """Add both routes."""

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
        segments = await _write_down(state, model, recording, prompt, request)
        words = None
        if "word" in fields.timestamp_granularities:
            words = await state.word_placer.place(recording, segments, fields.language)
        with_segments = "segment" in fields.timestamp_granularities
        return formatted(segments, fields, recording.duration_s, words, with_segments)

    @router.post("/v1/audio/translations", openapi_extra=form_description(TranslationFields, ("file",)))
    async def translate(request: Request) -> Response:
        fields, files = await read_form(request, TranslationFields, ("file",))
        model = state.model(fields.model)
        model.check_translates()
        _check_no_prompt(fields)
        recording = await state.read_recording(files["file"], "file")
        prompt = translation_prompt(
            fields.target_language,
            state.limits.answer_tokens,
            seed=fields.seed,
            temperature=fields.temperature,
        )
        segments = await _write_down(state, model, recording, prompt, request)
        return formatted(segments, fields, recording.duration_s)


async def _write_down(
    state: AppState, model: ServerModel, recording: Waveform, prompt: ChatPrompt, request: Request
) -> list[TranscriptSegment]:
    call = ServerCall(
        state.service, model,
        lambda emit: transcription_plan(model, recording, prompt, emit, in_order=False),
    )  # fmt: skip
    return await await_whole(request, call, state.limits.request_s)


def check_transcription(fields: TranscriptionFields, model: ServerModel) -> None:
    """Raises: ApiError: a field that cannot be followed."""
    model.check_hears()
    _check_no_prompt(fields)
    if fields.timestamp_granularities and fields.response_format != "verbose_json":
        raise ApiError(400, "needs response_format verbose_json", "timestamp_granularities")
    if fields.stream and fields.response_format not in ("json", "text"):
        raise ApiError(400, "a stream has words alone: take json or text", "response_format", "not_supported")


def _check_no_prompt(fields: HeardFields) -> None:
    if fields.prompt:
        message = "what was said before cannot be told: leave it out"
        raise ApiError(400, message, "prompt", "not_supported")


def formatted(
    segments: Sequence[TranscriptSegment],
    fields: TranscriptionFields | TranslationFields,
    duration_s: float,
    words: Sequence[WordSpan] | None = None,
    with_segments: bool = True,
) -> Response:
    """The transcript or translation in the form that was asked for.

    Args:
        words: with their times, where they were asked for.
        with_segments: whether `verbose_json` has the times of segments beside those of words.
    """
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
    body = {**fields.heading(), "duration": round(duration_s, 3), "text": text}
    if words is not None:
        body["words"] = [
            {"word": span.word, "start": round(span.start_s, 3), "end": round(span.end_s, 3)}
            for span in words
        ]
    if words is None or with_segments:
        body["segments"] = rows
    return JSONResponse(body)


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
