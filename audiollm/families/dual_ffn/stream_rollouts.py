"""Rollouts over streams: recordings heard chunk by chunk, an action of the policy after each.

A rollout's tokens have the heard frames between them (`SampledTokens.input_frames`); everything else is as for one
answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from audiollm.data.chat.template import Template
from audiollm.errors import BadSample
from audiollm.families.prompts import PromptedContents
from audiollm.families.rollout import Rollout, RolloutSettings
from audiollm.families.streams import ActedStream, StreamCourse, chunk_size, stream_course
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Acted, Limits
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.packed_decoder import GenerationDecoder


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
        [
            _build_stream_rollout(prompt.id, number, seed, next(acted))
            for number, seed in zip(*group, strict=True)
        ]
        for prompt, *group in zip(prompts, numbers, seeds, strict=True)
    ]


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
    streams = [ActedStream() for _ in courses]
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
            stream, chunks = streams[place], courses[place].chunks
            stream.actions.append(event)
            if len(stream.actions) < len(chunks):
                engine.feed(event.request, chunks[len(stream.actions)])
                continue
            stream.tokens = engine.close(event.request)
            del running[event.request]
        begin()
    return streams


def _build_stream_rollout(prompt: str, number: int, seed: int, acted: ActedStream) -> Rollout:
    assert acted.tokens is not None  # the request records them
    text = " ".join(action.text.strip() for action in acted.actions if action.text.strip())
    truncated = any(action.reason == "length" for action in acted.actions)
    return Rollout(prompt, number, acted.tokens, truncated, text, seed)


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
            input_frames = sum(map(chunk_size, chunks))
            longest = max(longest, prefix + input_frames + len(chunks) * action + 1)
        else:
            largest = max(map(chunk_size, chunks)) + template.num_codebooks + 4
            longest = max(longest, prefix + max(window or 0 for window in windows) + largest)
    return longest
