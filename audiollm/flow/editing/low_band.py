"""The band of a track below hearing: its offset and infrasound go on through an edited span.

Models make nothing there (the lowest mel band begins above 0 Hz), and a track whose offset ends with the span steps
twice. So a model hears the track without this band, and the band is added to what it makes.

Shapes: C channels, N samples, G points of a grid of some 100 Hz.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from scipy.signal import butter, sosfiltfilt
from torch import Tensor

from audiollm.flow.editing.seams import continued, fade_weights

CUT_HZ = 20.0
_GRID_HZ = 100.0
_EDGE_POINTS = 4
"""Points beside hidden samples that are predicted, too: a filter that lacks what comes next is wrong there."""
_MIN_POINTS = 8
"""Points of the grid below which a sound has a mean and no slow movement."""


def low_band(samples_CN: Tensor, sample_rate: int, hidden: tuple[int, int] | None = None) -> Tensor:
    """The part of a sound below `CUT_HZ`, without delay, `[C, N]`.

    Args:
        hidden: samples that do not count: the band is continued through them from both sides, or from the only one.
    """
    length = samples_CN.shape[1]
    start, end = hidden or (length, length)
    step = max(1, round(sample_rate / _GRID_HZ))
    grid_G = np.arange(0, length, step)
    edge = 0 if hidden is None else _EDGE_POINTS * step
    before_CN = _average_on_grid(samples_CN[:, :start], grid_G[grid_G < start - edge], sample_rate)
    after_CN = _average_on_grid(samples_CN[:, end:], grid_G[grid_G >= end + edge] - end, sample_rate)
    gap = len(grid_G) - before_CN.shape[1] - after_CN.shape[1]
    points_CG = (
        torch.cat([before_CN, _bridge_points(before_CN, after_CN, gap), after_CN], dim=1).double().numpy()
    )
    slow_CG = _low_pass(points_CG, CUT_HZ, sample_rate / step, 2)
    if len(grid_G) < _MIN_POINTS:
        slow_CG = np.broadcast_to(points_CG.mean(axis=1, keepdims=True), (len(points_CG), 2))
        grid_G = np.array([0, max(1, length - 1)])
    return torch.from_numpy(CubicSpline(grid_G, slow_CG, axis=1)(np.arange(length))).float()


# Private


def _average_on_grid(samples_CN: Tensor, grid_G: NDArray[np.int64], sample_rate: int) -> Tensor:
    if not len(grid_G):
        return samples_CN.new_zeros(len(samples_CN), 0)
    filtered_CN = _low_pass(samples_CN.double().numpy(), _GRID_HZ / 4, sample_rate, 4)
    return torch.from_numpy(filtered_CN[:, grid_G].copy()).float()


def _low_pass(samples_CN: NDArray[np.float64], cut_hz: float, rate: float, order: int) -> NDArray[np.float64]:
    """Low-passed forwards and backwards; a sound of too few samples as it is."""
    pad = min(samples_CN.shape[1] - 1, round(2 * rate / cut_hz))
    if pad < 1 or cut_hz >= rate / 2:
        return samples_CN
    sections = butter(order, cut_hz, fs=rate, output="sos")
    return np.asarray(sosfiltfilt(sections, samples_CN, axis=1, padtype="even", padlen=pad))


def _bridge_points(before_CG: Tensor, after_CG: Tensor, count: int) -> Tensor:
    """`count` points between two sounds: their means, and their movements continued, faded into one another."""
    sides = [_continue_side(before_CG, count), _continue_side(after_CG.flip(1), count).flip(1)]
    if not after_CG.shape[1]:
        return sides[0]
    if not before_CG.shape[1]:
        return sides[1]
    weight_N = fade_weights(count)
    return sides[0] * (1 - weight_N) + sides[1] * weight_N


def _continue_side(points_CG: Tensor, count: int) -> Tensor:
    """A sound's mean and the continuation of what moves around it; zeros where there is none."""
    if not points_CG.shape[1]:
        return points_CG.new_zeros(len(points_CG), count)
    mean_C1 = points_CG.mean(dim=1, keepdim=True)
    return mean_C1 + continued(points_CG - mean_C1, count)
