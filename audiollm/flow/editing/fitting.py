"""Made sound in its place in a track: aligned, as loud as the track allows, with seams, over the track's low band.

The band of a track below hearing (its offset and infrasound) goes on through an edited span: models make nothing there
(the lowest mel band begins above 0 Hz), and a track whose offset ends with the span steps twice. So a model hears the
track without this band, and the band is added to what it makes.

Shapes: C channels, N samples, G points of a grid of some 100 Hz.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from scipy.signal import butter, sosfiltfilt
from torch import Tensor
from torch.nn import functional

from audiollm.flow.editing.levels import (
    CEILING_DBFS,
    decibels,
    decibels_to_gain,
    limit_peaks,
    loudest_rms,
    true_peak,
)
from audiollm.flow.editing.seams import (
    FADE_S,
    MOST_LAG_S,
    WINDOW_S,
    best_lag,
    continued,
    fade_weights,
    with_seams,
)

MAX_LOUDER_DB = 12.0
"""Level of made sound above the loudest 0.4 s of the track around it, at most. In the scenes of the training a sound is
up to 17 dB louder than its background, and as loud as the sounds beside it."""
_SILENT_RMS = 1e-3
"""Level below which a track does not tell how loud a sound in it should be."""
_MAX_CALIBRATION_DB = 6.0


@dataclass(frozen=True)
class Surroundings:
    """The part of a track around a span, in two bands; beyond the track's end it is silent."""

    operation: str
    track_CN: Tensor
    """The section without its low band, which is the model's input."""
    low_CN: Tensor
    """The low band; where the operation hides the span, as it goes on through it."""
    start: int
    """First sample of the span in the section."""
    end: int
    sample_rate: int
    is_end: bool
    """The span ends the track, so that there is no seam behind it."""

    def beside(self, samples_CN: Tensor) -> Tensor:
        """Samples of the section that lie outside of the span."""
        return torch.cat([samples_CN[:, : self.start], samples_CN[:, self.end :]], dim=1)


class FittedSpan(NamedTuple):
    """The samples of an edited span."""

    samples_CN: Tensor
    gain_db: float
    """Gain by which the made sound was turned down to the level of the track."""
    limited_db: float
    """Lowest gain at a peak."""


def fit_to_track(made_CN: Tensor, around: Surroundings) -> FittedSpan:
    """The samples of the span, in which made sound meets the track.

    Args:
        made_CN: made sound of the section, without its low band; it may be shorter.
    """
    span, rate = slice(around.start, around.end), around.sample_rate
    made_CN = functional.pad(made_CN, (0, max(0, around.track_CN.shape[1] - made_CN.shape[1])))
    if around.operation != "add":
        made_CN = made_CN * _calibration(made_CN, around)
    gain = min(1.0, _loudest_allowed(around) / max(1e-9, loudest_rms(made_CN[:, span], rate)))
    made_CN = made_CN * gain
    original_CN, low_CN = around.track_CN[:, span], around.low_CN[:, span]
    if around.operation == "add":
        part_CN = original_CN + _fade_in_and_out(made_CN[:, span], rate)
    else:
        part_CN = _join_span(made_CN, around, original_CN)
    whole_CN = around.track_CN + around.low_CN
    ceiling = decibels_to_gain(CEILING_DBFS)
    is_between = (
        true_peak(whole_CN, rate) <= ceiling
    )  # a track that is louder has peaks of its own between samples
    ceiling = max(ceiling, float(whole_CN.abs().max()))
    part_CN, limited_db = limit_peaks(part_CN + low_CN, rate, ceiling, is_between)
    return FittedSpan(part_CN, decibels(gain), limited_db)


# Private


def _loudest_allowed(around: Surroundings) -> float:
    """The level that made sound may have: for `remove` the track's in the span, else somewhat above the track's."""
    if around.operation == "remove":
        return loudest_rms(around.track_CN[:, around.start : around.end], around.sample_rate)
    track_CN = around.track_CN if around.operation == "add" else around.beside(around.track_CN)
    level = loudest_rms(track_CN, around.sample_rate)
    return level * decibels_to_gain(MAX_LOUDER_DB) if level > _SILENT_RMS else float("inf")


def _fade_in_and_out(part_CN: Tensor, rate: int) -> Tensor:
    """Added sound, faded in and out."""
    part_CN = part_CN.clone()
    size = min(round(FADE_S * rate), part_CN.shape[1] // 2)
    if size:
        part_CN[:, :size] *= fade_weights(size)
        part_CN[:, -size:] *= fade_weights(size).flip(0)
    return part_CN


def _join_span(made_CN: Tensor, around: Surroundings, original_CN: Tensor) -> Tensor:
    """Made sound in place of the span, with seams to the track."""
    rate, width = around.sample_rate, round(WINDOW_S * around.sample_rate)
    before_CN = around.track_CN[:, max(0, around.start - width) : around.start]
    after_CN = (
        around.track_CN[:, around.end : around.end + width] if not around.is_end else original_CN[:, :0]
    )
    part_CN = _align_to_track(made_CN, before_CN, after_CN, around)
    return with_seams(
        part_CN, before_CN, after_CN, original_CN if around.operation == "remove" else None, rate
    )


def _calibration(made_CN: Tensor, around: Surroundings) -> float:
    """The gain with which kept latents sound as loud as the track that they were encoded from.

    An autoencoder that loses the texture of noise makes it quieter: a span of rain would be a dip.
    """
    track_rms, made_rms = (
        float(around.beside(samples_CN).square().mean().sqrt()) for samples_CN in (around.track_CN, made_CN)
    )
    if not min(track_rms, made_rms) > _SILENT_RMS:
        return 1.0
    limit = decibels_to_gain(_MAX_CALIBRATION_DB)
    return min(limit, max(1 / limit, track_rms / made_rms))


def _align_to_track(made_CN: Tensor, before_CN: Tensor, after_CN: Tensor, around: Surroundings) -> Tensor:
    """The made span moved to fit the track before it, and from its middle on to fit the track after it."""
    offset, length, rate = around.start, around.end - around.start, around.sample_rate
    max_lag = min(round(MOST_LAG_S * rate), length // 4)
    padded_CN = functional.pad(made_CN, (max_lag + before_CN.shape[1], max_lag + after_CN.shape[1] + length))
    shift = max_lag + before_CN.shape[1]  # of a sample of the section in `padded_CN`

    def lag(there_CN: Tensor, begin: int) -> int:
        piece_CN = padded_CN[:, shift + begin - max_lag : shift + begin + there_CN.shape[1] + max_lag]
        return best_lag(there_CN, piece_CN, max_lag)

    early = lag(before_CN, offset - before_CN.shape[1]) if before_CN.shape[1] else 0
    late = lag(after_CN, offset + length) if after_CN.shape[1] else early
    first_CN, second_CN = (
        padded_CN[:, shift + offset + moved : shift + offset + moved + length] for moved in (early, late)
    )
    if early == late:
        return first_CN.clone()
    size = min(2 * round(FADE_S * rate), length // 2)
    begin = (length - size) // 2
    weight_N = torch.zeros(length)
    weight_N[begin : begin + size], weight_N[begin + size :] = fade_weights(size), 1.0
    return first_CN * (1 - weight_N) + second_CN * weight_N


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
