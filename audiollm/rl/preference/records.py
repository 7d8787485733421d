"""The records that a training on preferences can use, found by one look at each before any work.

Shapes: N records of a source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from audiollm.data.records.sample import AudioPart, Sample, check_without_video
from audiollm.data.records.source import Source
from audiollm.errors import BadSample
from audiollm.files.set_aside import SetAside
from audiollm.rl.groups import PairChoice, SampleGroup, groups_of, with_answer
from audiollm.rl.objectives.catalog import GroupKind


@dataclass(frozen=True)
class Grouping:
    """How records become groups of answers."""

    kind: GroupKind
    fields: frozenset[str]
    """Fields that the objectives read of a group (`desirable_N`, `score_N`)."""
    pairs: PairChoice = "best_worst"
    needs_recording: bool = False
    """Whether the messages must have a recording (an objective exchanges it)."""
    takes_video: bool = False
    """Whether the messages may have pictures of videos."""

    def groups(self, sample: Sample, place: str) -> tuple[Sample, list[SampleGroup]]:
        """Return the record with its answers set apart from its messages, and the groups of these answers.

        Raises:
            BadSample: it lacks something that the kind needs, or has a video part where none is taken.
        """
        if not self.takes_video:
            check_without_video(sample, place)
        answered = with_answer(sample, place) if self.kind == "singles" else sample
        has_recording = any(
            isinstance(content_part, AudioPart)
            for message in sample.messages
            for content_part in message.content
        )
        if self.needs_recording and not has_recording:
            reason = (
                "its messages have no recording, and the objective compares answers to different recordings"
            )
            raise BadSample(place, sample.id, reason, "no recording")
        return answered, groups_of(answered, self.kind, self.fields, self.pairs, place)


@dataclass(frozen=True)
class UsableRecords:
    """Numbers of the records of each source that are trained on, and of those that are held out."""

    train: list[np.ndarray]
    """int64 `[N]` each."""
    held_out: list[np.ndarray]
    """int64 `[N]` each: records whose metadata say `split: test`."""
    digests: tuple[str, ...]
    """Digests of the sources, in their order."""


def find_usable(
    sources: Sequence[Source],
    grouping: Grouping,
    set_aside: SetAside,
    advance: Callable[[], None] = lambda: None,
) -> UsableRecords:
    """Read every record once, without its sound.

    Raises:
        BadSample: the first bad one, where `set_aside` is strict.
    """
    train: list[list[int]] = [[] for _ in sources]
    held_out: list[list[int]] = [[] for _ in sources]
    for place, source in enumerate(sources):
        set_aside.add(source.bad)
        for index in range(len(source)):
            advance()
            try:
                sample = source[index].sample
                grouping.groups(sample, f"{source.name} [{index}]")
            except BadSample as bad:
                set_aside.add([bad.with_traceback(None)])
                continue
            split = held_out if sample.is_held_out else train
            split[place].append(index)
    return UsableRecords(
        [np.array(indices, np.int64) for indices in train],
        [np.array(indices, np.int64) for indices in held_out],
        tuple(source.digest for source in sources),
    )
