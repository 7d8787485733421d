"""Where the user's turns begin and end, by the level of the sound above that of the room.

Shapes: N samples.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from audiollm.serve.realtime_bodies import TurnDetection

FRAME_S = 0.02
ONSET_S = 0.06
"""Sound above the threshold that begins a turn: clicks are shorter."""
QUIETEST_DBFS = -50.0
"""Below this level nothing is speech."""
FLOOR_S = 3.0
"""The room's level is the lowest of so many seconds."""
LEAST_DB, MORE_DB = 6.0, 12.0
"""Decibels above the room at a threshold of 0, and how many more at 1."""


@dataclass(frozen=True)
class TurnEdge:
    """A turn of the user begins or ends."""

    kind: Literal["started", "stopped"]
    at_s: float
    """Seconds since the first sample; of a beginning, with the padding before it."""


class TurnDetector:
    """Takes samples as they arrive, and tells the edges of turns."""

    def __init__(self, settings: TurnDetection, sample_rate: int) -> None:
        self._settings, self._rate = settings, sample_rate
        self._frame = round(FRAME_S * sample_rate)
        self._left_N = torch.zeros(0)
        self._floor: deque[float] = deque(maxlen=round(FLOOR_S / FRAME_S))
        self._num_frames, self._loud, self._quiet, self._is_speech = 0, 0, 0, False

    def push(self, samples_1N: Tensor) -> list[TurnEdge]:
        """Take samples in [-1, 1], and return the edges that they complete."""
        samples_N = torch.cat([self._left_N, samples_1N[0]])
        whole = len(samples_N) // self._frame * self._frame
        self._left_N = samples_N[whole:]
        powers = samples_N[:whole].reshape(-1, self._frame).double().square().mean(dim=1)
        edges = [self._count(10 * math.log10(power + 1e-12)) for power in powers.tolist()]
        return [edge for edge in edges if edge is not None]

    def _count(self, level_db: float) -> TurnEdge | None:
        self._num_frames += 1
        room = min(self._floor, default=QUIETEST_DBFS)
        margin = LEAST_DB + MORE_DB * self._settings.threshold
        is_loud = level_db > max(QUIETEST_DBFS, room + margin)
        self._floor.append(level_db)
        self._loud = self._loud + 1 if is_loud else 0
        is_sustained = self._loud * FRAME_S >= ONSET_S
        self._quiet = 0 if is_sustained else self._quiet + 1
        if not self._is_speech and is_sustained:
            self._is_speech = True
            begun_s = (self._num_frames - self._loud) * FRAME_S - self._settings.prefix_padding_ms / 1000
            return TurnEdge("started", max(0.0, begun_s))
        if self._is_speech and self._quiet * FRAME_S >= self._settings.silence_duration_ms / 1000:
            self._is_speech = False
            return TurnEdge("stopped", self._num_frames * FRAME_S)
        return None
