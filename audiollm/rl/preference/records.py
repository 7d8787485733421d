"""How the records of a training on preferences become groups of answers."""

from __future__ import annotations

from dataclasses import dataclass

from audiollm.data.records.sample import AudioPart, Sample, check_without_video
from audiollm.errors import BadSample
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
