"""The level of a sound that is still coming in: a gain that follows what was heard, and never what is to come.

A live system cannot know the level of a recording that has not ended, and speakers differ by tens of decibels. What is
trained on streams goes through the same gain, so that a model hears in training what it will hear live.

Shapes: N samples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK_S = 0.01
"""Seconds of a step of the gain, and the longest delay."""
WINDOW_BLOCKS = 4
"""Blocks over which the loudness of speech is measured."""
TARGET_DBFS = -12.0
"""RMS level that the loudest stretch of `WINDOW_BLOCKS` is brought to: that of speech of -23 dBFS with its pauses."""
DECAY_DB_PER_S = 1.0
"""The loudest stretch counts less and less: after a loud speaker a quiet one of 20 dB less is there in 20 seconds."""
MAX_GAIN_DB = 40.0
"""Below, noise stays noise."""
PEAK = 0.99


class RunningLevel:
    """Brings a stream of samples to the level of speech, block by block, whatever pieces it comes in."""

    def __init__(self, sample_rate: int) -> None:
        self._block = max(1, round(BLOCK_S * sample_rate))
        self._kept_1N = torch.zeros(1, 0)
        self._energies = [0.0] * WINDOW_BLOCKS
        self._loudest = 10 ** ((TARGET_DBFS - MAX_GAIN_DB) / 10)
        self._floor, self._decay = self._loudest, 10 ** (-DECAY_DB_PER_S * BLOCK_S / 10)
        self._gain: float | None = None

    def push(self, samples_1N: Tensor) -> Tensor:
        """Take samples; return those of the blocks that they complete, at their level."""
        samples_1N = torch.cat([self._kept_1N, samples_1N.float()], dim=1)
        num_complete = samples_1N.shape[1] // self._block * self._block
        self._kept_1N = samples_1N[:, num_complete:]
        return self._levelled(samples_1N[:, :num_complete])

    def flush(self) -> Tensor:
        """Return the last samples, fewer than a block."""
        last_1N, self._kept_1N = self._kept_1N, self._kept_1N[:, :0]
        return self._levelled(last_1N)

    def _levelled(self, samples_1N: Tensor) -> Tensor:
        pieces = [
            self._next(block_1N) for block_1N in samples_1N.split(self._block, dim=1) if block_1N.shape[1]
        ]
        return torch.cat([samples_1N[:, :0], *pieces], dim=1)

    def _next(self, block_1N: Tensor) -> Tensor:
        self._energies = [*self._energies[1:], float(block_1N.double().square().mean())]
        now = sum(self._energies) / WINDOW_BLOCKS
        self._loudest = max(now, self._loudest * self._decay, self._floor)
        gain = 10 ** (TARGET_DBFS / 20) / math.sqrt(self._loudest)
        before, self._gain = gain if self._gain is None else self._gain, gain
        ramp_N = torch.linspace(before, gain, block_1N.shape[1] + 1)[1:]
        return (block_1N * ramp_N).clamp(-PEAK, PEAK)


def running_level(samples_1N: Tensor, sample_rate: int) -> Tensor:
    """Return a whole recording as `RunningLevel` gives it out, `[1, N]`."""
    level = RunningLevel(sample_rate)
    return torch.cat([level.push(samples_1N), level.flush()], dim=1)
