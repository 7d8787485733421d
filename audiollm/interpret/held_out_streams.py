"""Held-out streams, interpreted by a model and logged as SimulEval logs them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from audiollm.codec import Codec
from audiollm.data.records.mixture import evenly
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import Sample, TextPart
from audiollm.data.records.source import LoadedSample
from audiollm.data.tables.splits import is_of_split
from audiollm.errors import BadSample
from audiollm.evaluate.interpret.logged_outputs import LoggedOutput, Unit, split_units
from audiollm.evaluate.interpret.resegment import ReferenceSegment, resegment
from audiollm.families.policy import StreamPolicy
from audiollm.families.prompts import PromptedContents
from audiollm.families.streams import check_stream, chunk_size, stream_course, stream_rate
from audiollm.generation.engine.request import Acted, AnswerKind, Limits
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.interpret.said import HeardSource, SaidPiece, SpeechFile, logged_output
from audiollm.rl.online.prompts import without_right_answer


@dataclass(frozen=True)
class StreamPrompt:
    """A stream to be interpreted, with its reference."""

    sample: Sample
    prompted: PromptedContents
    rate: float
    """Code frames, or rows of features, per second."""

    @property
    def chunk_ends_s(self) -> list[float]:
        """The time at which each chunk is over, in seconds."""
        frames = chunk_size(self.prompted.audio[-1])
        size = self.prompted.chunk_frames or 1
        return [min(frames, first + size) / self.rate for first in range(0, frames, size)]

    @property
    def reference(self) -> list[str]:
        """The text of each action of the reference."""
        return [
            "".join(
                content_part.text for content_part in action if isinstance(content_part, TextPart)
            ).strip()
            for action in self.sample.messages[-1].actions()
        ]


@torch.inference_mode()
def interpret_streams(
    policy: StreamPolicy,
    prompts: Sequence[StreamPrompt],
    seeds: Sequence[int],
    sampling: SamplingConfig,
    limits: Limits,
    answer: AnswerKind = "text",
    silence_bias: float = 0.0,
    max_slots: int = 64,
) -> list[list[Acted]]:
    """Return the model's actions over each stream.

    Args:
        seeds: of each stream; greedy sampling reads none.
        silence_bias: added to the logit of silence where an action begins.

    Raises:
        BadSample: a stream that does not fit the model.
    """
    courses = [
        stream_course(prompt.prompted, seed, sampling, limits, answer, silence_bias)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    acted = policy.run_streams(courses, max_slots)
    return [stream.actions for stream in acted]


def said_over(
    prompt: StreamPrompt, texts: Sequence[str], durations_s: Sequence[float] | None = None
) -> list[SaidPiece]:
    """Return what was said over a stream, each piece at the end of its chunk.

    Args:
        texts: of the action after each chunk.
        durations_s: of the speech of each action; None where there is none.

    Raises:
        BadSample: another number of actions than of chunks.
    """
    ends_s = prompt.chunk_ends_s
    if len(texts) != len(ends_s):
        reason = f"{len(texts)} actions for {len(ends_s)} chunks"
        raise BadSample(prompt.prompted.place, prompt.sample.id, reason, "not one action for each chunk")
    pieces = [
        SaidPiece(text.strip(), end_s, None, duration_s)
        for text, end_s, duration_s in zip(texts, ends_s, durations_s or [0.0] * len(texts), strict=True)
    ]
    return [piece for piece in pieces if piece.text or piece.duration_s]


def logged_stream(
    index: int, prompt: StreamPrompt, pieces: Sequence[SaidPiece], source: str = "", speech: str | None = None
) -> LoggedOutput:
    """Return the line of SimulEval's log for a stream.

    Args:
        source: path of the recording.
        speech: path of the sound of an output in speech.
    """
    reference = " ".join(text for text in prompt.reference if text)
    heard_source = HeardSource(index, prompt.chunk_ends_s[-1], source, reference, prompt.sample.id)
    return logged_output(pieces, heard_source, speech)


@torch.inference_mode()
def write_speech(prompt: StreamPrompt, actions: Sequence[Acted], codec: Codec, path: Path) -> list[float]:
    """Write the speech of the actions over a stream to a file, where it is heard; the file lasts as long as the stream.

    Returns:
        The duration of each action's speech in seconds, 0 for silence and text.
    """
    durations_s = []
    with closing(SpeechFile(path, codec.sample_rate)) as file:
        for action, end_s in zip(actions, prompt.chunk_ends_s, strict=True):
            codes = [
                action_part
                for action_part in action.parts
                if isinstance(action_part, Tensor) and action_part.shape[1]
            ]
            durations_s.append(0.0)
            if codes:
                samples_1N = codec.decode(torch.cat(codes, dim=1)).float().cpu()
                file.write(samples_1N, end_s)
                durations_s[-1] = samples_1N.shape[1] / codec.sample_rate
        file.write(torch.zeros(1, 0), prompt.chunk_ends_s[-1])
    return durations_s


def right_segments(prompt: StreamPrompt, texts: Sequence[str], unit: Unit = "word") -> list[bool]:
    """Return, for each segment of the reference, whether exactly its words are said for it.

    The output is divided among the segments by the fewest edits between words (`resegment`); times do not count.

    Args:
        unit: `word`, or `character` for languages without spaces.
    """
    segments = [
        ReferenceSegment(0.0, 1.0, tuple(split_units(text, unit))) for text in prompt.reference if text
    ]
    spoken_units = [spoken_unit for text in texts for spoken_unit in split_units(text, unit)]
    if not segments:
        return []
    return [
        segment_output.units == segment_output.segment.units
        for segment_output in resegment(spoken_units, [0.0] * len(spoken_units), segments)
    ]


def read_streams(
    policy: StreamPolicy, path: Path, split: str, max_streams: int
) -> tuple[list[StreamPrompt], list[BadSample]]:
    """Read the streams of a split, evenly picked, and what cannot be interpreted.

    Args:
        path: a .jsonl or a folder of shards.
    """
    source = open_source(path)
    prompts: list[StreamPrompt] = []
    bad = list(source.bad)
    places = [
        n for n in range(len(source)) if is_of_split(source[n].sample.metadata.get("split") or "train", split)
    ]
    for number in (places[place_number] for place_number in evenly(len(places), max_streams)):
        place = f"{source.name} [{number}]"
        try:
            prompts.append(_read_stream_prompt(policy, source[number], place))
        except BadSample as error:
            bad.append(error.with_traceback(None))
    return prompts, bad


def _read_stream_prompt(policy: StreamPolicy, loaded: LoadedSample, place: str) -> StreamPrompt:
    chunk_frames = loaded.sample.messages[-1].chunk_frames
    if chunk_frames is None:
        raise BadSample(
            place, loaded.sample.id, "is no stream: its last message has no chunk_frames", "no stream"
        )
    prompted = policy.take(without_right_answer(loaded), [], place)
    prompt = StreamPrompt(
        loaded.sample, replace(prompted, chunk_frames=chunk_frames), stream_rate(policy.encoder)
    )
    check_stream(prompt.prompted, len(loaded.sample.messages[-1].actions()))
    policy.check_prompt(prompt.prompted)
    return prompt
