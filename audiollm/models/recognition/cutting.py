"""Cutting of long speech for models that take short pieces."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def cut_points(samples_N: NDArray[np.float32], sample_rate: int, longest_s: float) -> list[int]:
    """Cut sound into pieces of at most `longest_s`, each at the quietest 20 ms of the last third of its range.

    Returns:
        the first sample of each piece, and the number of samples at the end.
    """
    longest, block = int(longest_s * sample_rate), max(int(_BLOCK_S * sample_rate), 1)
    cuts = [0]
    while len(samples_N) - cuts[-1] > longest:
        start = cuts[-1] + longest * 2 // 3
        window_N = samples_N[start : cuts[-1] + longest]
        blocks = window_N[: len(window_N) // block * block].reshape(-1, block)
        quietest = int(np.square(blocks).mean(axis=1).argmin()) if len(blocks) else 0
        cuts.append(start + quietest * block + block // 2)
    return [*cuts, len(samples_N)]


_BLOCK_S = 0.02
