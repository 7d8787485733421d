"""Findings that need all clips: the balance of music and effects, the clips to review, and partners of pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256

from audiollm.data.records.thoughts import ThoughtRecord
from pipelines.audiocot.answers.evidence import SURE, name_words
from pipelines.audiocot.rules import BALANCE
from pipelines.steps.results import Place, Row, Spool
from pipelines.steps.rules import Drop

_MAX_TRIED = 500
"""Clips that are tried as a partner."""


def kept_clips(spool: Spool) -> Iterator[tuple[Place, Row]]:
    """Yield the clips that no rule about single clips has dropped."""
    for file, number, row in spool.parts():
        if row["dropped"] is None:
            yield (file, number), row


def balance_drops(spool: Spool, max_ratio: float, seed: int) -> dict[Place, Drop]:
    """Drop clips of the larger group, music or effects, drawn by a hash of their content.

    Args:
        max_ratio: clips of the larger group for one of the smaller.
    """
    groups: dict[bool, list[tuple[str, Place]]] = {True: [], False: []}
    for place, row in kept_clips(spool):
        tagged = row["measured"].get("tags")
        if tagged is None:  # the tagger failed on it: it is of neither group
            continue
        is_music = tagged["kinds"]["music"] >= SURE
        groups[is_music].append((draw_key(row, f"balance {seed}"), place))
    music, effects = len(groups[True]), len(groups[False])
    if not music or not effects:  # a set of one kind is what was asked for
        return {}
    larger = music > effects
    allowed = int(max_ratio * min(music, effects))
    ratio = round(max(music, effects) / min(music, effects), 3)
    kind = "music" if larger else "effects"
    reason = (
        f"{ratio:g} clips of {kind} for one of {'effects' if larger else 'music'}, the limit is {max_ratio:g}"
    )
    dropped = sorted(groups[larger])[allowed:]
    return {
        place: Drop("corpus", BALANCE.threshold, BALANCE.title, reason, ratio, max_ratio)
        for _, place in dropped
    }


def draw_key(row: Row, purpose: str) -> str:
    """A hash by which clips are drawn: it depends on their content and on what they are drawn for alone."""
    return sha256(f"{purpose}\0{row['digest']}\0{row['start_s']}".encode()).hexdigest()


def review_ids(clips: Sequence[Row], share: float, seed: int) -> set[str]:
    """The ids of the clips to review: a share of all, at least one where any is asked for."""
    count = min(len(clips), max(1, round(share * len(clips)))) if share > 0 else 0
    return {row["id"] for row in sorted(clips, key=lambda row: draw_key(row, f"review {seed}"))[:count]}


class Partners:
    """Clips by split in an order of their content, among which each clip finds one that shares no sound with it.

    Sounds are compared by the words of their names, those of the records and of the tagger.
    """

    def __init__(self, clips: Sequence[Row], seed: int) -> None:
        self._seed = seed
        self._by_split: dict[str | None, list[tuple[Row, set[str]]]] = {}
        for row in sorted(clips, key=lambda row: draw_key(row, f"partners {seed}")):
            if (words := _sound_words(row)) is not None:
                self._by_split.setdefault(row["split"], []).append((row, words))

    def find(self, clip: Row) -> Row | None:
        """A clip of the same split with other sounds, from a place that is drawn; None: none among the next ones."""
        ring, clip_words = self._by_split.get(clip["split"], []), _sound_words(clip)
        if not ring or clip_words is None:
            return None
        start = int(draw_key(clip, f"partner {self._seed}")[:12], 16) % len(ring)
        for step in range(min(len(ring), _MAX_TRIED)):
            row, words = ring[(start + step) % len(ring)]
            if row["digest"] != clip["digest"] and not words & clip_words:
                return row
        return None


def _sound_words(row: Row) -> set[str] | None:
    """The words of a clip's sounds; None: there are no sounds, or one has a name that tells nothing (`a sound`)."""
    record = ThoughtRecord.model_validate(row["record"])
    tagged = row["measured"].get("tags") or {"events": []}
    names = [*record.sounds(), *(event["label"] for event in tagged["events"])]
    words = [name_words(name) for name in names]
    return set[str]().union(*words) if words and all(words) else None
