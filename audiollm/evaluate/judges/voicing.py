"""Voicing and pitch of a sound, and how a decoded sound keeps them; the tracker is librosa's pYIN.

The tracker shares nothing with the one that labels the tokenizer's training audio (`audiollm.audio.pitch`).

Shapes: N samples, F frames of 10 ms, L lags.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from audiollm.audio import resample
from audiollm.evaluate.report.metric_error import MetricError

RATE = 16_000
FRAME_S = 0.01
LOWEST_HZ, HIGHEST_HZ = 60.0, 500.0
CLOSE_CENTS = 50.0
HARMONIC_BAND_HZ = (1000.0, 4000.0)
_WINDOW = 1024
_SPAN_S = 0.04
_LAG_SEARCH = 0.04
_UPSAMPLING = 3
_MIN_S = 0.1


@dataclass(frozen=True)
class Voicing:
    """Pitch of a mono sound by pYIN (Mauch and Dixon 2014)."""

    samples_N: NDArray[np.float32]
    """At `RATE`."""
    pitch_hz_F: NDArray[np.float64]
    """NaN where there is no voice."""
    probability_F: NDArray[np.float64]
    """Probability that the frame is voiced."""

    @cached_property
    def voiced_F(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.pitch_hz_F)

    @property
    def voiced_share(self) -> float:
        return float(self.voiced_F.mean())

    @property
    def mean_pitch_hz(self) -> float:
        """Geometric mean over the voiced frames. Raises: MetricError: there are none."""
        if not self.voiced_F.any():
            raise MetricError("no voiced frame")
        return float(np.exp(np.log(self.pitch_hz_F[self.voiced_F]).mean()))


def track_voicing(samples_1N: Tensor, sample_rate: int, highest_hz: float = HIGHEST_HZ) -> Voicing:
    """Track the pitch from 60 Hz on.

    Args:
        samples_1N: mono.
        highest_hz: the highest pitch; the default is that of a voice.

    Raises:
        MetricError: less than 0.1 s.
    """
    from librosa import pyin

    if samples_1N.shape[1] < _MIN_S * sample_rate:
        raise MetricError(f"the pitch of less than {_MIN_S:g} s cannot be tracked")
    samples_N = resample(samples_1N.float(), sample_rate, RATE)[0].numpy()
    pitch_hz_F, _, probability_F = pyin(
        samples_N,
        fmin=LOWEST_HZ,
        fmax=highest_hz,
        sr=RATE,
        frame_length=_WINDOW,
        hop_length=round(FRAME_S * RATE),
    )
    return Voicing(samples_N, pitch_hz_F, probability_F)


def voicing_f1(reference: Voicing, decoded: Voicing) -> float:
    """F1 of "voiced" over the frames, the reference's voicing being right (Vocos, arXiv 2306.00814, table 1).

    Raises:
        MetricError: the reference has no voiced frame.
    """
    real_F, made_F = _voiced_pair(reference, decoded)
    return float(2 * (real_F & made_F).sum() / (real_F.sum() + made_F.sum()))


def close_pitch_share(reference: Voicing, decoded: Voicing) -> float:
    """Share of the reference's voiced frames that are voiced in the decoded sound, within 50 cents of its pitch.

    Raises:
        MetricError: the reference has no voiced frame.
    """
    real_F, _ = _voiced_pair(reference, decoded)
    cents_F = _cents(reference, decoded)
    return float((np.abs(cents_F) <= CLOSE_CENTS).sum() / real_F.sum())  # NaN compares as False


def pitch_error_cents(reference: Voicing, decoded: Voicing) -> float:
    """Median difference of pitch, in cents, over the frames that are voiced in both.

    Raises:
        MetricError: no frame is voiced in both.
    """
    cents_F = _cents(reference, decoded)
    cents_F = np.abs(cents_F[~np.isnan(cents_F)])
    if not len(cents_F):
        raise MetricError("no frame is voiced in both")
    return float(np.median(cents_F))


def periodicity_error(reference: Voicing, decoded: Voicing) -> float:
    """Root mean square difference of the frames' probability of voice (CARGAN, arXiv 2110.10139, section 4.2)."""
    count = min(len(reference.probability_F), len(decoded.probability_F))
    difference_F = reference.probability_F[:count] - decoded.probability_F[:count]
    return float(np.sqrt(np.square(difference_F).mean()))


def harmonicity(voicing: Voicing) -> float:
    """Periodicity from 1 to 4 kHz: mean over the voiced frames of the band's autocorrelation at the pitch's period.

    Of each frame the highest normalised correlation of 40 ms within 4 % of the period; noise has about 0.25.

    Raises:
        MetricError: no voiced frame.
    """
    from scipy.signal import butter, resample_poly, sosfiltfilt

    frames = np.flatnonzero(voicing.voiced_F)
    if not len(frames):
        raise MetricError("no voiced frame")
    band = butter(6, HARMONIC_BAND_HZ, "bandpass", fs=RATE, output="sos")
    rate = RATE * _UPSAMPLING
    span = round(_SPAN_S * rate)
    longest = round(rate / LOWEST_HZ * (1 + _LAG_SEARCH)) + 1
    fine_N = np.pad(resample_poly(sosfiltfilt(band, voicing.samples_N), _UPSAMPLING, 1), span + longest)
    values = []
    for frame in frames:
        start = round(frame * FRAME_S * rate) + longest + span // 2
        period = rate / voicing.pitch_hz_F[frame]
        lags_L = np.arange(int(period * (1 - _LAG_SEARCH)), int(period * (1 + _LAG_SEARCH)) + 2)
        first_N = fine_N[start - int(period) // 2 :][:span]
        later_LN = np.lib.stride_tricks.sliding_window_view(
            fine_N[start - int(period) // 2 + lags_L[0] :], span
        )
        later_LN = later_LN[: len(lags_L)]
        energy_L = np.sqrt(np.square(first_N).sum() * np.square(later_LN).sum(axis=1))
        values.append(float((later_LN @ first_N / np.maximum(energy_L, 1e-12)).max()))
    return float(np.mean(values))


def _voiced_pair(reference: Voicing, decoded: Voicing) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    count = min(len(reference.voiced_F), len(decoded.voiced_F))
    if not reference.voiced_F[:count].any():
        raise MetricError("the reference has no voiced frame")
    return reference.voiced_F[:count], decoded.voiced_F[:count]


def _cents(reference: Voicing, decoded: Voicing) -> NDArray[np.float64]:
    """Difference of pitch in each frame, NaN where one of the two is not voiced."""
    count = min(len(reference.pitch_hz_F), len(decoded.pitch_hz_F))
    cents_F: NDArray[np.float64] = 1200 * np.log2(decoded.pitch_hz_F[:count] / reference.pitch_hz_F[:count])
    return cents_F
