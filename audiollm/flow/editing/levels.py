"""Levels of made sound: as loud as the track allows, below full scale, and whether an edit can be heard at all.

Shapes: C channels, N samples, W windows, B bands.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from audiollm.audio import resample

CEILING_DBFS = -1.0
"""Highest peak of made sound between its samples (true peak); a louder track keeps its own."""
AUDIBLE_DB = 1.0
"""Smallest change of a band, in 0.2 s, with which an edit counts as audible. At 1 dB a listener to a pair notices a
change of level (Zwicker and Fastl, Psychoacoustics, chapter 7); the sounds of an edit are not heard as a pair."""
_LOUDNESS_S = 0.4
_OVERSAMPLING = 4
_PAD_SAMPLES = 64
_LIMITER_S = 0.005
_BAND_S = 0.2
_NARROWEST_HZ, _RELATIVE_WIDTH = 100.0, 0.2
"""Widths of critical bands: 100 Hz below 500 Hz, a fifth of the frequency above."""
_FLOOR_DB = -60.0
"""Level of a band, relative to the loudest window of the track, below which it is taken for silence."""


def loudest_rms(samples_CN: Tensor, sample_rate: int) -> float:
    """Root mean square of the loudest 0.4 s, over all channels; 0 without a sample."""
    if not samples_CN.numel():
        return 0.0
    power_N = samples_CN.double().square().mean(dim=0)
    window = min(len(power_N), round(_LOUDNESS_S * sample_rate))
    sums_N = functional.pad(power_N.cumsum(0), (1, 0))
    return math.sqrt(max(0.0, float((sums_N[window:] - sums_N[:-window]).max()) / window))


def true_peak(samples_CN: Tensor, sample_rate: int) -> float:
    """Largest magnitude of the waveform, between its samples too (ITU-R BS.1770-4, annex 2)."""
    return float(_true_peaks(samples_CN, sample_rate).max()) if samples_CN.numel() else 0.0


def below_ceiling(samples_CN: Tensor, sample_rate: int) -> tuple[Tensor, float]:
    """A sound by itself, turned down to the ceiling where it is above it, and the gain in dB (0: as it was)."""
    peak, ceiling = true_peak(samples_CN, sample_rate), decibels_to_gain(CEILING_DBFS)
    if peak <= ceiling:
        return samples_CN, 0.0
    return samples_CN * (ceiling / peak), decibels(ceiling / peak)


def limit_peaks(
    samples_CN: Tensor, sample_rate: int, ceiling: float, between_samples: bool = True
) -> tuple[Tensor, float]:
    """A sound whose peaks above `ceiling` are turned down for some milliseconds each, and the lowest gain in dB.

    Args:
        between_samples: true peaks count, not those of the samples alone.
    """
    peaks_N = _true_peaks(samples_CN, sample_rate) if between_samples else samples_CN.abs().amax(dim=0)
    if not float(peaks_N.max()) > ceiling:
        return samples_CN, 0.0
    wanted_N = (ceiling / peaks_N.clamp_min(1e-9)).clamp_max(1.0)
    half = max(1, round(_LIMITER_S * sample_rate))
    lowest_N = -functional.max_pool1d(-wanted_N[None, None], 2 * half + 1, 1, half)
    window_N = torch.hann_window(2 * half + 3, periodic=False)[1:-1]
    padded_N = functional.pad(lowest_N, (half, half), "replicate")
    gain_N = functional.conv1d(padded_N, (window_N / window_N.sum())[None, None])[0, 0]
    gain_N = torch.where(gain_N > 1 - 1e-6, 1.0, gain_N)
    return samples_CN * gain_N, decibels(float(gain_N.min()))


def change_db(before_CN: Tensor, after_CN: Tensor, sample_rate: int, loudest: float) -> float:
    """The largest change of a band of any channel within 0.2 s, in dB.

    Args:
        loudest: root mean square of the loudest part of the track, which says what counts as silence.
    """
    floor = (max(loudest, 1e-5) * decibels_to_gain(_FLOOR_DB)) ** 2
    levels = [_band_powers(samples_CN, sample_rate) for samples_CN in (before_CN, after_CN)]
    before_CWB, after_CWB = (10 * np.log10(np.maximum(powers, floor)) for powers in levels)
    return float(np.abs(after_CWB - before_CWB).max())


def decibels(gain: float) -> float:
    """A gain of amplitudes in dB; -inf for 0."""
    return 20 * math.log10(gain) if gain > 0 else -math.inf


def decibels_to_gain(decibels: float) -> float:
    """The gain of amplitudes."""
    return float(10 ** (decibels / 20))


# Private


def _true_peaks(samples_CN: Tensor, sample_rate: int) -> Tensor:
    """The largest magnitude of any channel at each sample and up to the next one, `[N]`.

    The ends are held, as a sound that stops at once rings above its peak.
    """
    held_CN = functional.pad(samples_CN[None], (_PAD_SAMPLES, _PAD_SAMPLES), "replicate")[0]
    fine_CN = resample(held_CN, sample_rate, _OVERSAMPLING * sample_rate)
    between_N = (
        fine_CN.abs().amax(dim=0).unflatten(0, (-1, _OVERSAMPLING)).amax(dim=1)[_PAD_SAMPLES:-_PAD_SAMPLES]
    )
    return torch.maximum(between_N, samples_CN.abs().amax(dim=0))


def _band_powers(samples_CN: Tensor, sample_rate: int) -> NDArray[np.float64]:
    """Powers `[C, W, B]` of bands as wide as those of hearing, in windows that overlap by half."""
    size = 2 * max(1, round(_BAND_S * sample_rate / 2))
    missing = -samples_CN.shape[1] % (size // 2)
    padded_CN = functional.pad(samples_CN.double(), (size // 2, size // 2 + missing))
    frames_CWN = padded_CN.unfold(1, size, size // 2) * torch.hann_window(size, dtype=torch.float64)
    # Parseval: the sum over both signs of frequency is the mean square of the window
    powers_CWF = torch.fft.rfft(frames_CWN).abs().square().numpy() * (2 / size**2 / 0.375)
    edges_hz = [0.0]
    while edges_hz[-1] + max(_NARROWEST_HZ, _RELATIVE_WIDTH * edges_hz[-1]) < sample_rate / 2:
        edges_hz.append(edges_hz[-1] + max(_NARROWEST_HZ, _RELATIVE_WIDTH * edges_hz[-1]))
    edges = np.unique(np.round(np.array(edges_hz) * size / sample_rate).astype(int))
    return np.asarray(np.add.reduceat(powers_CWF, edges, axis=2))
