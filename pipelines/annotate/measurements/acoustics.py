"""Noise, bandwidth and reverberation of a recording, estimated without a clean reference and without a model.

`benchmarks/quality.py` measures the error of each estimate.

Shapes: B bands, F frames, K frequency bins, N samples, W frames of one window.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 16000
"""Sample rate of the input of `band_energies`."""
_FRAME, _HOP = 512, 128
_HOP_S = _HOP / SAMPLE_RATE
_NUM_BANDS, _FIRST_BIN = 12, 2  # from 62 Hz: hum and offsets are no part of it
_FLOOR = 1e-13  # power of a band without sound, far below the rounding of 16 bits
_MIN_S = 1.0

_SMOOTHING, _QUIET = 8, 0.1
# a tenth of white noise, smoothed so, lies below this share of its mean: the wider the band, the steadier
_QUIET_SHARE_B = np.array([0.676, 0.7, 0.717, 0.736, 0.765, 0.797, 0.804, 0.824, 0.839, 0.859, 0.868, 0.878])
_ACTIVE_DB = 30.0  # frames this far below the loud ones are not speech
_ABOVE_NOISE = 0.1  # nor are frames with less than a tenth more power than the noise
_SNR_RANGE_DB = (-20.0, 80.0)

_DECAY_WINDOWS, _DECAY_QUANTILES = (8, 16), (50, 75, 90)
# Fitted by `benchmarks/quality.py --fit` on speech in simulated rooms. Weights of the logarithms of the two median
# decay times, and of all six; at the end the constant
_RT60_WEIGHTS = (0.6364, 0.7165, 0.361)
_C50_WEIGHTS = (0.06327, -2.254, -8.174, 3.837, -2.69, -9.306, -11.43)
_MIN_DECAYS, _MIN_SNR_DB = 8, 6.0
_RT60_RANGE_S, _C50_RANGE_DB = (0.05, 5.0), (-15.0, 40.0)

_BAND_HZ = 250
_BELOW_PEAK_DB, _SPREAD_DB = 60.0, 8.0


class Reverberation(NamedTuple):
    """`rt60_s`: time in which the room's sound falls by 60 dB; `c50_db`: its first 50 ms against all that is later."""

    rt60_s: float
    c50_db: float


def band_energies(samples_N: NDArray[np.float32]) -> NDArray[np.float64] | None:
    """Power in 12 bands of equal width on the mel scale, 62 Hz to 8 kHz, every 8 ms, [F, B].

    Args:
        samples_N: mono at 16 kHz.

    Returns:
        None where the sound is shorter than a second (too little pause to tell noise by) or digitally silent.
    """
    if len(samples_N) < _MIN_S * SAMPLE_RATE or not np.any(samples_N):
        return None
    window_N = np.hanning(_FRAME + 1)[:-1]
    window_N /= np.sqrt((window_N**2).sum())
    frames_FN = np.lib.stride_tricks.sliding_window_view(samples_N, _FRAME)[::_HOP]
    power_FK = np.abs(np.fft.rfft(frames_FN * window_N)) ** 2
    mel_K = 1127.0 * np.log1p(np.fft.rfftfreq(_FRAME, 1 / SAMPLE_RATE) / 700.0)
    edges = np.searchsorted(mel_K, np.linspace(mel_K[_FIRST_BIN], mel_K[-1], _NUM_BANDS + 1)[:-1])
    energies_FB: NDArray[np.float64] = np.add.reduceat(power_FK, edges, axis=1) + _FLOOR
    return energies_FB


def signal_to_noise_db(energies_FB: NDArray[np.float64]) -> float:
    """Estimate the power of active sound, without the noise, over that of the noise, in dB within -20..80.

    The noise of each band is what is left in its quietest tenth (64 ms at a time), as between words, corrected by what
    a tenth of steady noise is to its mean. Bands have their quiet moments apart, so short pauses are enough; unlike
    WADA-SNR it needs no law of how speech is distributed.

    What comes and goes as fast as speech (babble, music) counts as speech: such noise is underestimated. In a clip of a
    second or two without any pause the quietest speech counts as noise: a clean one can read 20 dB.

    Source: minimum statistics (Martin, 2001), with a quantile in place of the minimum.
    """
    noise = _noise_B(energies_FB).sum()
    above_F = energies_FB.sum(axis=1) - noise
    active_F = above_F >= max(np.percentile(above_F, 95) * 10 ** (-_ACTIVE_DB / 10), _ABOVE_NOISE * noise)
    signal = above_F[active_F].mean() if active_F.any() else 0.0
    ratio = max(signal, noise * 10 ** (_SNR_RANGE_DB[0] / 10)) / noise
    return float(np.clip(10 * np.log10(ratio), *_SNR_RANGE_DB))


def reverberation(energies_FB: NDArray[np.float64]) -> Reverberation | None:
    """Estimate reverberation time and clarity from the decay of each band's sound after it stops.

    Sounds end no faster than the room lets them: the steepest falls tell the room's. Two regressions lead from them to
    `rt60_s` and `c50_db`. The clarity is the more certain one: in a dry recording the late sound that the reverberation
    time is about is not heard at all.

    Returns:
        None where too little falls far enough above the noise: below 6 dB, a steady tone, a very short clip.

    Source: Prego et al., "A blind algorithm for reverberation-time estimation using subband decomposition" (2012), for
    the idea of subband decays.
    """
    decays = log_decay_times(energies_FB)
    if decays is None or signal_to_noise_db(energies_FB) < _MIN_SNR_DB:
        return None
    medians = decays[:: len(_DECAY_QUANTILES)]
    rt60_log = medians @ np.array(_RT60_WEIGHTS[:-1]) + _RT60_WEIGHTS[-1]
    c50_db = decays @ np.array(_C50_WEIGHTS[:-1]) + _C50_WEIGHTS[-1]
    return Reverberation(
        float(np.exp(np.clip(rt60_log, *np.log(_RT60_RANGE_S)))),
        float(np.clip(c50_db, *_C50_RANGE_DB)),
    )


def log_decay_times(energies_FB: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Logarithms of the seconds that 60 dB take at the steepness that 50, 75 and 90 % of all falls do not exceed.

    Returns:
        Three for falls of 64 ms, three for falls of 128 ms; None where there are fewer than 8 of either.
    """
    level_FB = 10 * np.log10(energies_FB)
    noise_B = np.minimum(_noise_B(energies_FB), np.percentile(energies_FB, 95, axis=0) / 100)
    lowest_B = 10 * np.log10(noise_B) + 6
    loud_B = np.percentile(level_FB, 95, axis=0) - 25
    features: list[float] = []
    for length in _DECAY_WINDOWS:
        if len(level_FB) <= length:
            return None
        levels_FBW = np.lib.stride_tricks.sliding_window_view(level_FB, length, axis=0)
        times_W = np.arange(length) - (length - 1) / 2
        slopes_FB = levels_FBW @ times_W / (times_W**2).sum()
        falls_FB = -slopes_FB * (length - 1)
        # mean square about the fitted line, without building the lines
        spread_FB = levels_FBW.var(axis=-1) - slopes_FB**2 * (times_W**2).mean()
        straight_FB = np.sqrt(np.maximum(spread_FB, 0)) < np.maximum(1.0, 0.15 * falls_FB)
        heard_FB = (levels_FBW[..., -1] > lowest_B) & (levels_FBW[..., 0] > loud_B)
        rates = -slopes_FB[(falls_FB > 3) & straight_FB & heard_FB] / _HOP_S
        if len(rates) < _MIN_DECAYS:
            return None
        features += np.log(60 / np.percentile(rates, _DECAY_QUANTILES)).tolist()
    return np.array(features)


def bandwidth_hz(samples_N: NDArray[np.float32], sample_rate: int) -> float | None:
    """Estimate the highest frequency with sound, in steps of 250 Hz; at most 4,000 for a former 8 kHz recording.

    A band counts when its mean level is within 60 dB of the strongest band's (per Hz), and when it comes and goes (its
    loud tenth is 8 dB above its quiet one), which dither and the noise of a converter do not. Where even the strongest
    band is as steady as that (rain, an engine), its level alone counts.

    A cheap resampler (linear interpolation) leaves mirror images of the sound above its old limit: they count.

    Args:
        samples_N: mono, at the rate at which it was recorded.

    Returns:
        None where the sound is too short or digitally silent.
    """
    length = 1 << round(np.log2(0.04 * sample_rate))
    if len(samples_N) < 8 * length or not np.any(samples_N):
        return None
    frames_FN = np.lib.stride_tricks.sliding_window_view(samples_N, length)[:: length // 2]
    frames_FN = (frames_FN - frames_FN.mean(axis=1, keepdims=True)) * np.hanning(length + 1)[:-1]
    power_FK = np.abs(np.fft.rfft(frames_FN)) ** 2
    bands_K = (np.fft.rfftfreq(length, 1 / sample_rate) / _BAND_HZ).astype(int)
    num_bands = max(1, sample_rate // 2 // _BAND_HZ)
    edges = np.searchsorted(bands_K, np.arange(num_bands))
    num_bins = np.searchsorted(bands_K, num_bands)
    widths_B = np.diff(np.append(edges, num_bins))
    energies_FB = np.add.reduceat(power_FK[:, :num_bins], edges, axis=1) / widths_B + 1e-20
    frames_F = energies_FB.sum(axis=1)
    active_F = frames_F > np.percentile(frames_F, 95) * 10 ** (-_ACTIVE_DB / 10)
    level_B = 10 * np.log10(energies_FB[active_F].mean(axis=0))
    quiet_B, loud_B = 10 * np.log10(np.percentile(energies_FB, (10, 95), axis=0))
    loud_enough_B = level_B > level_B.max() - _BELOW_PEAK_DB
    lively_B = loud_B - quiet_B > _SPREAD_DB
    counted_B = loud_enough_B & lively_B if lively_B[level_B.argmax()] else loud_enough_B
    return float(min((np.flatnonzero(counted_B)[-1] + 1) * _BAND_HZ, sample_rate / 2))


# Private


def _noise_B(energies_FB: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean power of the steady part of each band."""
    sums_FB = np.cumsum(energies_FB, axis=0)
    smooth_FB = (sums_FB[_SMOOTHING:] - sums_FB[:-_SMOOTHING]) / _SMOOTHING
    quiet_B: NDArray[np.float64] = np.quantile(smooth_FB, _QUIET, axis=0) / _QUIET_SHARE_B
    return np.maximum(quiet_B, _FLOOR)
