"""Signals that tests of `audiollm.audio` know in closed form or by a seed, and how far off they are."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def sines(sample_rate: int, num_samples: int, frequencies_hz: tuple[float, ...]) -> Tensor:
    """Equal sines that add up to at most 0.8, [1, N]: band-limited, and known at every instant."""
    time_s = np.arange(num_samples) / sample_rate
    total = sum(np.sin(2 * np.pi * hz * time_s + index) for index, hz in enumerate(frequencies_hz))
    return torch.from_numpy((0.8 / len(frequencies_hz) * total).astype(np.float32))[None]


def noise(seed: int, num_channels: int, num_samples: int) -> Tensor:
    """Uniform in [-1, 1], [C, N]."""
    return torch.rand(num_channels, num_samples, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def error_db(actual_CN: Tensor, expected_CN: Tensor, edge: int) -> float:
    """Largest error, away from both edges, in dB re the largest expected sample."""
    inner = slice(edge, -edge)
    error = (actual_CN[:, inner].double() - expected_CN[:, inner].double()).abs().max()
    return 20 * math.log10(max(float(error / expected_CN.abs().max()), 1e-12))
