"""Rollouts over streams: recordings heard chunk by chunk, an action of the policy after each.

A rollout's tokens have the heard frames between them (`SampledTokens.heard`); everything else is as for one answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from audiollm.data.chat.template import Template
from audiollm.errors import BadSample
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Acted, AnswerKind, Limits, OpenRequest, SampledTokens
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.packed_decoder import GenerationDecoder
from audiollm.rl.policy.streams import PromptedContents
from audiollm.rl.rollouts.protocol import Rollout, RolloutSettings


@dataclass(frozen=True)
class StreamCourse:
    """A stream that a model is to hear, chunk by chunk."""

    request: OpenRequest
    chunks: Sequence[Tensor]
    """Codes `[K, T]` of each chunk."""
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


def sample_streams(
    model: DualFFN,
    template: Template,
    decoder: GenerationDecoder,
    max_slots: int,
    prompts: Sequence[PromptedContents],
    numbers: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
    settings: RolloutSettings,
) -> list[list[Rollout]]:
    """Sample the group of each prompt; limits of the settings are those of each action.

    Raises:
        BadSample: a prompt that is no stream among streams, features, or a stream that does not fit the model.
    """
    limits = Limits(settings.max_frames, settings.max_text_tokens)
    sampling = SamplingConfig(temperature=settings.temperature, top_p=1.0)
    courses = [
        stream_course(prompt, seed, sampling, limits, settings.answer, record_tokens=True)
        for prompt, group in zip(prompts, seeds, strict=True)
        for seed in group
    ]
    acted = iter(run_streams(model, template, decoder, max_slots, courses))
    return [
        [_rollout(prompt.id, number, seed, next(acted)) for number, seed in zip(*group, strict=True)]
        for prompt, *group in zip(prompts, numbers, seeds, strict=True)
    ]


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
        BadSample: the prompt is no stream, or its recording is given as features.
    """
    before = prompt.before_stream
    chunks = recording_chunks(prompt)
    request = OpenRequest(
        before.prompt, seed, before.audio, sampling, limits, answer, record_tokens, silence_bias
    )
    return StreamCourse(request, chunks, prompt.id, prompt.place)


def run_streams(
    model: DualFFN,
    template: Template,
    decoder: GenerationDecoder,
    max_slots: int,
    courses: Sequence[StreamCourse],
) -> list[ActedStream]:
    """Let a model act over streams, many side by side, each fed its next chunk as soon as it has acted.

    Raises:
        BadSample: a stream that does not fit the model.
    """
    if not courses:
        return []
    slots = min(len(courses), max_slots)
    engine = Engine(model, template, slots, _slot_length(model, template, courses), decoder)
    found = [ActedStream() for _ in courses]
    waiting = list(reversed(range(len(courses))))
    running: dict[int, int] = {}

    def begin() -> None:
        while waiting and len(running) < slots:
            place = waiting.pop()
            course = courses[place]
            try:
                number = engine.open(course.request)
                running[number] = place
                engine.feed(number, course.chunks[0])
            except ValueError as error:
                raise BadSample(course.place, course.id, str(error), "does not fit") from error

    begin()
    while running:
        for event in engine.step():
            if not isinstance(event, Acted):
                continue
            place = running[event.request]
            own, chunks = found[place], courses[place].chunks
            own.actions.append(event)
            if len(own.actions) < len(chunks):
                engine.feed(event.request, chunks[len(own.actions)])
                continue
            own.tokens = engine.close(event.request)
            del running[event.request]
        begin()
    return found


def _rollout(prompt: str, number: int, seed: int, acted: ActedStream) -> Rollout:
    assert acted.tokens is not None  # the request records them
    text = " ".join(action.text.strip() for action in acted.actions if action.text.strip())
    truncated = any(action.reason == "length" for action in acted.actions)
    return Rollout(prompt, number, acted.tokens, truncated, text, seed)


def recording_chunks(prompt: PromptedContents) -> list[Tensor]:
    """Cut the codes of a stream's recording into chunks; the last one may be shorter.

    Raises:
        BadSample: the prompt is no stream, its recording is given as features, or other parts stand beside it, which
            an open request does not hear.
    """
    codes_KT = prompt.audio[-1] if prompt.audio else None
    if prompt.chunk_frames is None or not isinstance(codes_KT, Tensor):
        raise BadSample(prompt.place, prompt.id, "is no stream of codes", "no stream")
    if len(prompt.prompt[-1].content) > 1:
        reason = "has other parts beside the recording of its stream: put them into a message before"
        raise BadSample(prompt.place, prompt.id, reason, "no stream")
    return list(codes_KT.split(prompt.chunk_frames, dim=1))


def check_stream(prompt: PromptedContents, actions: int) -> None:
    """Check that a stream has a chunk for each action of its reference.

    Raises:
        BadSample: as `recording_chunks`, or another number of chunks: the codes are of another recording or codec.
    """
    chunks = len(recording_chunks(prompt))
    if chunks != actions:
        reason = f"{actions} actions of the reference for {chunks} chunks of {prompt.chunk_frames} frames"
        raise BadSample(prompt.place, prompt.id, reason, "another number of chunks")


def _slot_length(model: DualFFN, template: Template, courses: Sequence[StreamCourse]) -> int:
    """Positions of a slot: a prefix, a window and what is heard at once, or a whole stream with its longest actions."""
    windows = [model.config.window_of(layer) for layer in range(model.config.num_layers)]
    longest = 0
    for course in courses:
        request, chunks = course.request, course.chunks
        prefix = len(template.stream_prompt(request.messages, request.audio))
        if None in windows:
            action = request.limits.max_text_tokens + 1
            if request.answer == "any":
                action += request.limits.max_frames + 2 * template.num_codebooks + 4
            heard = sum(chunk.shape[1] for chunk in chunks)
            longest = max(longest, prefix + heard + len(chunks) * action + 1)
        else:
            largest = max(chunk.shape[1] for chunk in chunks) + template.num_codebooks + 4
            longest = max(longest, prefix + max(window or 0 for window in windows) + largest)
    return longest
