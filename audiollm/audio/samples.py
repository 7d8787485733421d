"""Sound in memory: the waveform type, resampling, channels and loudness, on tensors alone.

Imported through `audiollm.audio.files`. No files here: a wrong argument is a `ValueError`.

Shapes: C channels, N samples, M samples after resampling, B blocks of a loudness measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import soxr
import torch
from torch import Tensor

from audiollm.audio.discovery import is_rate
from audiollm.audio.mixing import SURROUND, to_mono, to_stereo


@dataclass(frozen=True, eq=False)
class Waveform:
    """Sound: float32 `samples_CN` in [-1, 1], shape [channels, samples], and `sample_rate` in Hz."""

    samples_CN: Tensor
    sample_rate: int

    def __post_init__(self) -> None:
        if self.samples_CN.ndim != 2 or self.samples_CN.dtype != torch.float32:
            shape, dtype = tuple(self.samples_CN.shape), self.samples_CN.dtype
            raise ValueError(f"a waveform is float32 [channels, samples], not {dtype} {shape}")
        _check_rate(self.sample_rate)

    @property
    def num_channels(self) -> int:
        return self.samples_CN.shape[0]

    @property
    def num_samples(self) -> int:
        return self.samples_CN.shape[1]

    @property
    def duration_s(self) -> float:
        return self.num_samples / self.sample_rate

    def mono(self) -> Waveform:
        """One channel: the mean of the channels, or the loudest where they cancel each other."""
        return Waveform(to_mono(self.samples_CN), self.sample_rate)

    def resample(self, sample_rate: int) -> Waveform:
        """Resample the waveform (see `resample`); overshoots of the filter are clipped to [-1, 1]."""
        if sample_rate == self.sample_rate:
            return self
        samples_CM = resample(self.samples_CN, self.sample_rate, sample_rate)
        return Waveform(samples_CM.clamp(-1.0, 1.0), sample_rate)


# Changing


def resample(samples_CN: Tensor, orig_rate: int, new_rate: int) -> Tensor:
    """Change the sample rate: soxr VHQ on the CPU, torchaudio's windowed sinc where soxr cannot go.

    torchaudio serves CUDA tensors and tensors that require a gradient, at the settings it gives as the
    equivalent of resampy's and librosa's `kaiser_best`. Neither clips: the filter may overshoot [-1, 1].

    Args:
        samples_CN: [C, N], floating point.
        orig_rate, new_rate: in Hz.

    Returns:
        [C, M] with M = ceil(N * new_rate / orig_rate), always; the input itself when the rates are equal.

    Raises:
        ValueError: a rate that is not a positive integer.
    """
    _check_rate(orig_rate)
    _check_rate(new_rate)
    num_channels, num_samples = samples_CN.shape
    if orig_rate == new_rate:
        return samples_CN
    num_resampled = -(-num_samples * new_rate // orig_rate)
    if num_samples == 0 or num_channels == 0:
        return samples_CN.new_zeros(num_channels, num_resampled)
    # Both libraries round the length in their own way: give them silence to spare, then cut to the rule.
    spare = 64 * orig_rate // new_rate + 64
    padded_CN = torch.nn.functional.pad(samples_CN, (0, spare))
    if samples_CN.device.type != "cpu" or samples_CN.requires_grad:
        import torchaudio.functional

        resampled_CM: Tensor = torchaudio.functional.resample(
            padded_CN,
            int(orig_rate),
            int(new_rate),
            lowpass_filter_width=64,
            rolloff=0.9475937167399596,
            resampling_method="sinc_interp_kaiser",
            beta=14.769656459379492,
        )
    else:
        resampled = soxr.resample(padded_CN.T.contiguous().numpy(), orig_rate, new_rate, quality="VHQ")
        resampled_CM = torch.from_numpy(resampled).T
    return resampled_CM[:, :num_resampled].contiguous()


def set_channels(samples_CN: Tensor, num_channels: int) -> Tensor:
    """[C, N] as [num_channels, N]: surround sound to stereo by `to_stereo`, else by `to_mono` and copies of that."""
    if samples_CN.shape[0] == num_channels:
        return samples_CN
    if num_channels == 2 and samples_CN.shape[0] in SURROUND:
        return to_stereo(samples_CN)
    return to_mono(samples_CN).repeat(num_channels, 1)


# Loudness

SILENCE_DBFS = -60.0
"""Peak level below which a recording counts as silent."""


class LevelMeter:
    """Measures the level of sound that comes in pieces, as it is heard: many channels are mixed to mono.

    Pieces of many channels are mixed one by one; a recording's channels are mixed before (`audiollm.audio.streams`).
    """

    def __init__(self) -> None:
        self._energy = self._peak = 0.0
        self.num_samples = 0

    def push(self, samples_CN: Tensor) -> None:
        samples_N = to_mono(samples_CN)[0].double() if samples_CN.numel() else samples_CN.reshape(-1)
        self._energy += float(samples_N.square().sum())
        self._peak = max(self._peak, float(samples_N.abs().max()) if len(samples_N) else 0.0)
        self.num_samples += len(samples_N)

    @property
    def rms_dbfs(self) -> float:
        """Root mean square in dB re full scale 1.0; -inf for silence.

        A full-scale sine is at -3.01 dBFS (some meters, after AES17, call that 0).
        """
        return _decibels(math.sqrt(self._energy / self.num_samples)) if self.num_samples else -math.inf

    @property
    def peak_dbfs(self) -> float:
        """The largest absolute sample, in dB re full scale 1.0; -inf for silence."""
        return _decibels(self._peak)

    def gain_to(self, target_dbfs: float, peak_limit: float) -> float:
        """The gain that brings the sound to an RMS of `target_dbfs`, or its peak to `peak_limit`; 1 for silence."""
        if self.rms_dbfs == -math.inf:
            return 1.0
        return min(10 ** ((target_dbfs - self.rms_dbfs) / 20), peak_limit / self._peak)


def rms_dbfs(samples_CN: Tensor) -> float:
    """Root mean square of the sound in mono, in dB re full scale 1.0; -inf for silence."""
    return _meter_levels(samples_CN).rms_dbfs


def peak_dbfs(samples_CN: Tensor) -> float:
    """The largest absolute sample of the sound in mono, in dB re full scale 1.0; -inf for silence."""
    return _meter_levels(samples_CN).peak_dbfs


def integrated_loudness_lufs(waveform: Waveform) -> float:
    """Gated loudness of a programme after ITU-R BS.1770-4 (equations 3 to 7), in LUFS; -inf for silence.

    Not torchaudio's `loudness`: that clips the weighted signal (a full-scale 997 Hz sine reads 0.27 dB low)
    and approximates the filters. A clip shorter than one 0.4 s block is measured as one block of its length.

    Raises:
        ValueError: more than 5 channels (left, right, centre, left and right surround).
    """
    import scipy.signal

    if waveform.num_channels > 5:
        raise ValueError(f"loudness is defined for up to 5 channels, not {waveform.num_channels}: mix down")
    if waveform.num_samples == 0:
        return -math.inf
    samples_CN = waveform.samples_CN.detach().cpu().double().numpy()
    weighted_CN = scipy.signal.sosfilt(_k_weighting(waveform.sample_rate), samples_CN, axis=1)
    block = min(round(0.4 * waveform.sample_rate), waveform.num_samples)
    blocks_CBN = np.lib.stride_tricks.sliding_window_view(weighted_CN**2, block, axis=1)
    power_CB = blocks_CBN[:, :: max(1, round(0.1 * waveform.sample_rate))].mean(axis=2)
    power_B = np.array([1.0, 1.0, 1.0, 1.41, 1.41])[: waveform.num_channels] @ power_CB
    power_B = power_B[power_B > 10 ** ((-70.0 + 0.691) / 10)]
    if len(power_B) == 0:
        return -math.inf
    power_B = power_B[power_B > 0.1 * power_B.mean()]
    return -0.691 + 10 * math.log10(power_B.mean())


def normalize_rms(samples_CN: Tensor, target_dbfs: float, peak_limit: float = 0.99) -> Tensor:
    """Scale to an RMS of `target_dbfs` in mono, or as near as the peak allows: no sample exceeds `peak_limit`.

    One gain for all samples, so nothing is clipped. Silence comes back unchanged.

    Returns:
        [C, N] like the input.
    """
    meter = _meter_levels(samples_CN)
    if meter.rms_dbfs == -math.inf:
        return samples_CN
    # channels may be louder than their mix
    gain = min(meter.gain_to(target_dbfs, peak_limit), peak_limit / float(samples_CN.abs().max()))
    # float64, where no gain overflows; the clamp takes only the last rounding
    return (samples_CN.double() * gain).to(samples_CN.dtype).clamp(-peak_limit, peak_limit)


# Checks and measures


def _check_rate(sample_rate: int) -> None:
    if not is_rate(sample_rate):
        raise ValueError(f"a sample rate is a positive integer in Hz, not {sample_rate!r}")


def _k_weighting(sample_rate: int) -> list[list[float]]:
    """The two filters of BS.1770-4, Annex 1, as second-order sections for any rate.

    From their analog parameters, as in libebur128; at 48 kHz these are the coefficients of the standard.
    """
    shelf_hz, shelf_db, shelf_q = 1681.974450955533, 3.999843853973347, 0.7071752369554196
    k, high = math.tan(math.pi * shelf_hz / sample_rate), 10 ** (shelf_db / 20)
    band, a0 = high**0.4996667741545416, 1 + k / shelf_q + k * k
    shelf = [high + band * k / shelf_q + k * k, 2 * (k * k - high), high - band * k / shelf_q + k * k]
    shelf += [a0, 2 * (k * k - 1), 1 - k / shelf_q + k * k]
    low_cut_hz, low_cut_q = 38.13547087602444, 0.5003270373238773
    k = math.tan(math.pi * low_cut_hz / sample_rate)
    a0 = 1 + k / low_cut_q + k * k
    low_cut = [a0, -2 * a0, a0, a0, 2 * (k * k - 1), 1 - k / low_cut_q + k * k]
    return [[value / section[3] for value in section] for section in (shelf, low_cut)]


def _meter_levels(samples_CN: Tensor) -> LevelMeter:
    meter = LevelMeter()
    meter.push(samples_CN)
    return meter


def _decibels(amplitude: float) -> float:
    return -math.inf if amplitude == 0 else 20 * math.log10(amplitude)
