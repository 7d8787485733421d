"""Playback of spoken output: a piece is heard when it has come out and the piece before it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Playback:
    """The intervals in which pieces of speech are heard, in the unit of their times."""

    intervals: tuple[tuple[float, float], ...]
    """(start, duration) of each piece."""

    @classmethod
    def of(cls, times: Sequence[float], durations: Sequence[float]) -> Playback:
        """Play pieces that came out at these times."""
        intervals: list[tuple[float, float]] = []
        end = 0.0
        for time, duration in zip(times, durations, strict=True):
            start = max(end, time)
            intervals.append((start, duration))
            end = start + duration
        return cls(tuple(intervals))

    @property
    def end(self) -> float:
        """End of the last piece; 0 without one."""
        return sum(self.intervals[-1]) if self.intervals else 0.0

    @property
    def gaps(self) -> list[float]:
        """Silences between pieces, where the output ran out."""
        ends = [start + duration for start, duration in self.intervals]
        starts = [start for start, _ in self.intervals[1:]]
        return [start - end for end, start in zip(ends, starts, strict=False) if start > end]

    def frames(self, length: float) -> list[float]:
        """Return the time at which each frame of this length begins to be heard."""
        return [
            start + place * length
            for start, duration in self.intervals
            for place in range(round(duration / length))
        ]
