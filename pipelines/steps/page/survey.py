"""One pass over the rows of a run: all figures of the page and the rows that it shows, at constant memory."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelines.steps.page.folder import Row, finite_number, named, seconds_of, value_at
from pipelines.steps.page.numbers import NumberTally

MAX_KEYS = 20_000
"""Distinct values of a column (speakers, labels) that are counted; later ones count as others."""
OTHERS_LABEL = "(others)"
MAX_REASONS = 60
CANDIDATES = 240
"""Kept rows held as candidates, of which the page shows a spread."""
CANDIDATES_PER_REASON = 24


@dataclass
class Sum:
    """Segments and their seconds."""

    segments: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.segments += 1
        self.seconds += seconds


@dataclass
class Groups:
    """Kept and dropped segments by the value of a column."""

    kept_sums: dict[str, Sum] = field(default_factory=dict)
    dropped_sums: dict[str, Sum] = field(default_factory=dict)

    def add(self, value: Any, seconds: float, is_kept: bool) -> None:
        name, side = named(value, 120), self.kept_sums if is_kept else self.dropped_sums
        if name not in side:
            if len(side) >= MAX_KEYS:
                name = OTHERS_LABEL
            side.setdefault(name, Sum())
        side[name].add(seconds)


class RowSample:
    """A sample of rows that depends neither on their order nor on chance: the smallest by distance, then by a hash."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._heap: list[tuple[float, int, int, Row]] = []
        self.offered = 0

    def offer(self, row: Row, distance: float = 0.0) -> None:
        self.offered += 1
        entry = (-distance, -_hash_row(row), -self.offered, row)
        if len(self._heap) < self._max_rows:
            heapq.heappush(self._heap, entry)
        elif entry > self._heap[0]:
            heapq.heapreplace(self._heap, entry)

    def rows(self) -> list[Row]:
        """The chosen rows, the smallest first."""
        return [entry[3] for entry in sorted(self._heap, key=lambda entry: entry[:3], reverse=True)]


@dataclass
class Reason:
    """The segments that one rule of one step dropped."""

    step: str
    rule: str
    title: str = ""
    dropped: Sum = field(default_factory=Sum)
    spread: RowSample = field(default_factory=lambda: RowSample(CANDIDATES_PER_REASON))
    nearest: RowSample = field(default_factory=lambda: RowSample(1))
    """The row whose value came nearest to the threshold."""


@dataclass
class PartSurvey:
    """Totals over all rows of a run."""

    numbers: NumberTally
    kept_sum: Sum = field(default_factory=Sum)
    dropped_sum: Sum = field(default_factory=Sum)
    reasons: dict[tuple[str, str], Reason] = field(default_factory=dict)
    groups: dict[str, Groups] = field(default_factory=dict)
    events: Groups = field(default_factory=Groups)
    """Sound events by label: the segments that hold one, and the seconds of the events."""
    candidates: RowSample = field(default_factory=lambda: RowSample(CANDIDATES))

    def add(self, row: Row, is_kept: bool) -> None:
        """Count one row, of the kept or of the dropped parts."""
        seconds = seconds_of(row)
        (self.kept_sum if is_kept else self.dropped_sum).add(seconds)
        self.numbers.add(row, None if is_kept else named(value_at(row, "dropped.rule")))
        for column, value in self.columns(row).items():
            self.groups.setdefault(column, Groups()).add(value, seconds, is_kept)
        for label, event_s in _event_seconds(row).items():
            self.events.add(label, event_s, is_kept)
        if is_kept:
            self.candidates.offer(row)
        else:
            self._add_reason(row, seconds)

    def columns(self, row: Row) -> Row:
        """The values of a row that the tables count by."""
        return {}

    def _add_reason(self, row: Row, seconds: float) -> None:
        key = (named(value_at(row, "dropped.step")), named(value_at(row, "dropped.rule")))
        if key not in self.reasons and len(self.reasons) >= MAX_REASONS:
            key = ("", OTHERS_LABEL)
        if key not in self.reasons:
            kind = "" if key[1] == OTHERS_LABEL else named(value_at(row, "dropped.kind"), 120)
            self.reasons[key] = Reason(*key, kind or key[1] or "no reason given")
        reason = self.reasons[key]
        reason.dropped.add(seconds)
        reason.spread.offer(row)
        value, limit = (
            finite_number(value_at(row, "dropped.value")),
            finite_number(value_at(row, "dropped.threshold")),
        )
        if value is not None and limit is not None:
            reason.nearest.offer(row, abs(value - limit))


def _event_seconds(row: Row) -> dict[str, float]:
    """Seconds of each sound event in a segment; the segment's length for events without times."""
    seconds: dict[str, float] = {}
    events = value_at(row, "measured.events.events")
    for event in events if isinstance(events, list) else ():
        if isinstance(event, Mapping) and isinstance(event.get("label"), str):
            seconds[event["label"]] = seconds.get(event["label"], 0.0) + seconds_of(dict(event))
    return seconds


def _hash_row(row: Row) -> int:
    name = f"{row.get('id')} {row.get('path')} {row.get('start_s')}"
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).digest(), "big")
