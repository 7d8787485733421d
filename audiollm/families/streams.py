"""Streams: recordings that are heard chunk by chunk, with an action of the model after each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from audiollm.codec import FRAME_RATE
from audiollm.data.hearing.features import MISSING_ROWS, FeatureShape, PartAudio
from audiollm.errors import BadSample
from audiollm.families.prompts import PromptedContents
from audiollm.generation.engine.request import Acted, AnswerKind, Limits, OpenRequest, SampledTokens
from audiollm.generation.engine.sampling import SamplingConfig


@dataclass(frozen=True)
class StreamCourse:
    """A stream that a model is to hear, chunk by chunk."""

    request: OpenRequest
    chunks: Sequence[PartAudio]
    """Codes `[K, T]`, or features, of each chunk."""
    id: str
    """Of the sample, for errors."""
    place: str = ""
    """Where the sample was read, for errors."""


@dataclass
class ActedStream:
    """The actions of a model over a stream."""

    actions: list[Acted] = field(default_factory=list)
    """One after each chunk."""
    tokens: SampledTokens | None = None
    """Where the request records them."""


def stream_course(
    prompt: PromptedContents,
    seed: int,
    sampling: SamplingConfig,
    limits: Limits,
    answer: AnswerKind,
    silence_bias: float = 0.0,
    record_tokens: bool = False,
) -> StreamCourse:
    """Return the course of a prompt that is a stream.

    Raises:
        BadSample: as `recording_chunks`.
    """
    before = prompt.before_stream
    chunks = recording_chunks(prompt)
    request = OpenRequest(
        before.prompt, seed, before.audio, sampling, limits, answer, record_tokens, silence_bias
    )
    return StreamCourse(request, chunks, prompt.id, prompt.place)


def recording_chunks(prompt: PromptedContents) -> list[PartAudio]:
    """Cut the codes, or encoded rows, of a stream's recording into chunks; the last one may be shorter.

    Raises:
        BadSample: the prompt is no stream, its recording was not encoded in chunks, or other parts stand beside it,
            which an open request does not hear.
    """
    if prompt.chunk_frames is None or not prompt.audio:
        raise BadSample(prompt.place, prompt.id, "is no stream", "no stream")
    if len(prompt.prompt[-1].content) > 1:
        reason = "has other parts beside the recording of its stream: put them into a message before"
        raise BadSample(prompt.place, prompt.id, reason, "no stream")
    recording = prompt.audio[-1]
    if isinstance(recording, Tensor):
        return list(recording.split(prompt.chunk_frames, dim=1))
    try:
        return list(recording.chunks(prompt.chunk_frames))
    except ValueError as error:
        raise BadSample(prompt.place, prompt.id, str(error), MISSING_ROWS) from None


def stream_rate(encoder: FeatureShape | None) -> float:
    """Code frames per second of what a model hears, or rows of features where it has an audio encoder."""
    return float(FRAME_RATE) if encoder is None else encoder.rows_per_second


def chunk_size(chunk: PartAudio) -> int:
    """Code frames, or rows of features, of a chunk."""
    return chunk.shape[1] if isinstance(chunk, Tensor) else chunk.rows


def check_stream(prompt: PromptedContents, actions: int) -> None:
    """Check that a stream has a chunk for each action of its reference.

    Raises:
        BadSample: as `recording_chunks`, or another number of chunks: the codes are of another recording or codec.
    """
    chunks = len(recording_chunks(prompt))
    if chunks != actions:
        reason = f"{actions} actions of the reference for {chunks} chunks of {prompt.chunk_frames} frames"
        raise BadSample(prompt.place, prompt.id, reason, "another number of chunks")
