"""Pitch of a voice, frame by frame: YIN's difference function, and the smoothest path through its dips.

As free of gross errors as librosa's pyin and many times as fast: `benchmarks/quality.py` has the figures.

Shapes: F frames of 10 ms, K candidates, L lags in samples, N samples.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 16000
FRAME_S = 0.01
CENTRE_S = 0.027
"""Time of the middle of the first frame."""
_HOP = int(FRAME_S * SAMPLE_RATE)
_WINDOW = 640
HIGHEST_HZ = 500.0
"""The highest pitch of a voice."""
_LOWEST_HZ = 60.0
_MAX_LAG = int(SAMPLE_RATE / _LOWEST_HZ)
_FFT, _BLOCK = 2048, 500

_CANDIDATES = 8
_NO_CANDIDATE_COST = 9.0  # cost where a frame has no candidate
_OCTAVE_COST = 0.05  # cost per octave downwards: half the pitch fits as well as the pitch itself
_JUMP_COST, _MAX_JUMP_COST = 2.0, 0.6  # cost per octave between frames, and its maximum
_VOICED_BELOW = 0.35
_MIN_VOICED_FRAMES = 3  # a shorter run of frames counts as unvoiced
_FLOOR_DB = 30.0


class Pitch(NamedTuple):
    """`pitch_hz_F` of every frame, a guess where there is no voice; `voiced_F` says where there is."""

    pitch_hz_F: NDArray[np.float64]
    voiced_F: NDArray[np.bool_]


def track_pitch(samples_N: NDArray[np.float32], highest_hz: float = HIGHEST_HZ) -> Pitch:
    """Track the pitch from 60 Hz on.

    Frame f is about 53 ms around 10 f + 27 ms; a clip shorter than one frame has none.

    Args:
        samples_N: mono at 16 kHz.
        highest_hz: the highest pitch, 2 kHz at most.

    Source: de Cheveigne and Kawahara, "YIN" (2002), equations 6 to 8; the path is chosen as in pYIN, by dynamic
    programming over the dips of each frame.
    """
    length = _WINDOW + _MAX_LAG
    if len(samples_N) < length:
        return Pitch(np.zeros(0), np.zeros(0, bool))
    frames_FN = np.lib.stride_tricks.sliding_window_view(samples_N, length)[::_HOP]
    min_lag = int(SAMPLE_RATE / highest_hz)
    starts = range(0, len(frames_FN), _BLOCK)
    pieces = [_find_pitch_candidates(frames_FN[start : start + _BLOCK], min_lag) for start in starts]
    pitch_FK = np.concatenate([pitch for pitch, _, _ in pieces])
    depth_FK = np.concatenate([depth for _, depth, _ in pieces])
    power_F = np.concatenate([power for _, _, power in pieces])
    path_F = _smoothest(pitch_FK, depth_FK)
    frames = np.arange(len(path_F))
    loud_F = power_F > np.percentile(power_F, 95) * 10 ** (-_FLOOR_DB / 10)
    voiced_F = (depth_FK[frames, path_F] < _VOICED_BELOW) & loud_F
    return Pitch(pitch_FK[frames, path_F], _without_short_runs(voiced_F))


# Private


def _find_pitch_candidates(
    frames_FN: NDArray[np.float32], min_lag: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Pitch and depth of each frame's deepest dips, [F, K] each, and the frame's power, [F]."""
    sound_FN = frames_FN.astype(np.float64)
    sound_FN -= sound_FN.mean(axis=1, keepdims=True)
    head_FN = sound_FN[:, :_WINDOW]
    spectrum_FK = np.fft.rfft(sound_FN, _FFT) * np.conj(np.fft.rfft(head_FN, _FFT))
    products_FL = np.fft.irfft(spectrum_FK, _FFT)[:, : _MAX_LAG + 1]
    sums_FN = np.pad(np.cumsum(sound_FN**2, axis=1), ((0, 0), (1, 0)))
    energy_FL = sums_FN[:, _WINDOW : _WINDOW + _MAX_LAG + 1] - sums_FN[:, : _MAX_LAG + 1]
    difference_FL = np.maximum(energy_FL[:, :1] + energy_FL - 2 * products_FL, 0.0)
    means_FL = np.cumsum(difference_FL[:, 1:], axis=1) / np.arange(1, _MAX_LAG + 1)
    normal_FL = np.ones_like(difference_FL)
    normal_FL[:, 1:] = difference_FL[:, 1:] / np.maximum(means_FL, 1e-12)

    middle_FL = normal_FL[:, min_lag:_MAX_LAG]
    left_FL, right_FL = normal_FL[:, min_lag - 1 : _MAX_LAG - 1], normal_FL[:, min_lag + 1 :]
    dips_FL = np.where((middle_FL <= left_FL) & (middle_FL < right_FL), middle_FL, _NO_CANDIDATE_COST)
    lags_FK = np.argsort(dips_FL, axis=1, kind="stable")[:, :_CANDIDATES]
    left_FK, middle_FK, right_FK = (
        np.take_along_axis(x, lags_FK, axis=1) for x in (left_FL, middle_FL, right_FL)
    )
    bend_FK = left_FK - 2 * middle_FK + right_FK
    shift_FK = np.where(
        np.abs(bend_FK) > 1e-12, 0.5 * (left_FK - right_FK) / np.where(bend_FK == 0, 1, bend_FK), 0.0
    )
    pitch_FK = SAMPLE_RATE / (lags_FK + min_lag + np.clip(shift_FK, -1, 1))
    return pitch_FK, np.take_along_axis(dips_FL, lags_FK, axis=1), energy_FL[:, 0] / _WINDOW


def _smoothest(pitch_FK: NDArray[np.float64], depth_FK: NDArray[np.float64]) -> NDArray[np.int64]:
    """The candidate of each frame on the cheapest path: deep dips, few jumps, no octave too low. [F]"""
    octave_FK = np.log2(pitch_FK)
    cost_FK = np.minimum(depth_FK, 2.0) - _OCTAVE_COST * (octave_FK - np.log2(_LOWEST_HZ))
    total_K = cost_FK[0]
    before_FK = np.zeros(pitch_FK.shape, np.int64)
    for frame in range(1, len(pitch_FK)):
        jumps_KK = np.abs(octave_FK[frame - 1][:, None] - octave_FK[frame])
        ways_KK = total_K[:, None] + np.minimum(_JUMP_COST * jumps_KK, _MAX_JUMP_COST)
        before_FK[frame] = ways_KK.argmin(axis=0)
        total_K = ways_KK.min(axis=0) + cost_FK[frame]
    path_F = np.zeros(len(pitch_FK), np.int64)
    path_F[-1] = total_K.argmin()
    for frame in range(len(pitch_FK) - 1, 0, -1):
        path_F[frame - 1] = before_FK[frame, path_F[frame]]
    return path_F


def _without_short_runs(voiced_F: NDArray[np.bool_]) -> NDArray[np.bool_]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], voiced_F, [False]]).astype(np.int8)))
    kept_F = voiced_F.copy()
    for start, end in edges.reshape(-1, 2):
        if end - start < _MIN_VOICED_FRAMES:
            kept_F[start:end] = False
    return kept_F
