"""The features of a clip that a judge sees, and their variation in training.

Properties that must not decide are removed (level, DC, silence at both ends, everything above the band of the
training clips) or varied in training (tempo, pitch, channel, noise floor, smoothness).

Shapes: B clips, T frames of 10 ms, M mel bands, F frequency bins, C channels, N samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from audiollm.audio import resample, to_mono

Clip = tuple[Tensor, int]
"""Samples `[channels, samples]` in [-1, 1] and their rate in Hz."""

SAMPLE_RATE = 16_000
HOP_SAMPLES = 160
WINDOW_SAMPLES = 400
FFT_SAMPLES = 512
LOWEST_HZ = 60.0
HIGHEST_HZ = 7_600.0
NUM_MELS = 40
MAX_FRAMES = 1_500
FLOOR_DB = -50.0
TRIM = 10**-3.3
SILENT = 10**-4.5


# ------------------------------------------------------------------------------------------- front end


def estimate_bandwidth(clips: Sequence[Clip]) -> float:
    """The highest frequency in Hz with any energy, noise floor included, in nine of ten clips.

    A clip's edge is where its mean spectrum falls 75 dB below its highest bin for good: the cliff that a
    recording at a lower rate or a lossy codec left, whatever the file's own sample rate is.
    """
    edges = []
    for samples_CN, sample_rate in clips:
        power_F = _power_spectrogram(_mono_at_judge_rate(samples_CN, sample_rate)).mean(dim=0)
        audible = torch.nonzero(power_F > power_F.max() * 10**-7.5)
        if len(audible):
            edges.append(float(audible.max()) * SAMPLE_RATE / FFT_SAMPLES)
    return float(np.quantile(edges, 0.1)) if edges else 0.0


def mel_power(samples_CN: Tensor, sample_rate: int, filters_FM: Tensor) -> Tensor:
    """Mel power `[T, M]` of a clip: mean removed, quiet ends trimmed, the mean band of a loud frame at 1.

    Loud is the sixth loudest frame, which neither clicks nor silence around the clip move. A clip that is
    nowhere above -90 dBFS has 0 frames.
    """
    mono_N = _mono_at_judge_rate(samples_CN, sample_rate)
    if len(mono_N) == 0 or mono_N.abs().max() < SILENT:
        return filters_FM.new_zeros(0, filters_FM.shape[1])
    around = (WINDOW_SAMPLES // 2, WINDOW_SAMPLES // 2)
    power_TM = _power_spectrogram(F.pad(mono_N, around)) @ filters_FM
    energy_T = power_TM.sum(dim=1)
    loud = energy_T.topk(min(10, len(energy_T))).values.median().clamp(min=1e-12)
    audible = torch.nonzero(energy_T >= torch.minimum(loud * TRIM, energy_T.max())).flatten()
    first, last = max(int(audible[0]) - 1, 0), min(int(audible[-1]) + 2, len(power_TM))
    return power_TM[first:last][:MAX_FRAMES] / loud * filters_FM.shape[1]


def judge_mel_filters(bandwidth_hz: float) -> Tensor:
    """Triangular mel filters `[F, M]` from 60 Hz to just below the bandwidth."""
    from torchaudio.functional import melscale_fbanks

    highest = min(max(0.92 * bandwidth_hz, 2_000.0), HIGHEST_HZ)
    filters_FM: Tensor = melscale_fbanks(FFT_SAMPLES // 2 + 1, LOWEST_HZ, highest, NUM_MELS, SAMPLE_RATE)
    return filters_FM


def _mono_at_judge_rate(samples_CN: Tensor, sample_rate: int) -> Tensor:
    mono_N = resample(to_mono(samples_CN), sample_rate, SAMPLE_RATE)[0].float()
    return mono_N - mono_N.mean() if len(mono_N) else mono_N


def _power_spectrogram(mono_N: Tensor) -> Tensor:
    """Power `[T, F]` of whole frames, whose windows taper off: a cut through sound would look like a wide band."""
    padded_N = F.pad(mono_N, (0, max(0, FFT_SAMPLES - len(mono_N))))
    window = torch.hann_window(WINDOW_SAMPLES)
    spectrum_FT = torch.stft(
        padded_N, FFT_SAMPLES, HOP_SAMPLES, WINDOW_SAMPLES, window, center=False, return_complex=True
    )
    return spectrum_FT.abs().square().T


def log_features(power_BTM: Tensor) -> Tensor:
    """Decibels below a loud frame's mean band, from the floor up, scaled to about [-1, 1]."""
    decibels = 10 * torch.log10(power_BTM.clamp(min=10 ** (FLOOR_DB / 10)))
    return (decibels - FLOOR_DB / 2) / 20


def pad_clips(clips_TM: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Mel power of clips to one batch `[B, T, M]` (silence after the end) and their frames `[B]`."""
    frames_B = torch.tensor([len(clip) for clip in clips_TM])
    power_BTM = nn.utils.rnn.pad_sequence(list(clips_TM), batch_first=True)
    return power_BTM, frames_B


# ---------------------------------------------------------------------------------------- augmentation


def augment_mel(power_BTM: Tensor, frames_B: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Vary the properties that must not decide: tempo, start and end, pitch, channel, smoothness, noise.

    Returns:
        Mel power `[B, T', M]` and frames `[B]`.
    """
    power_BTM, frames_B = _stretch_and_shift(power_BTM, frames_B, random)
    power_BTM = _warp_bands(power_BTM, random)
    power_BTM = _blur(power_BTM, random) * _draw_channel_gain(power_BTM, random)
    power_BTM = _add_noise(power_BTM, random)
    return _mask_bands(power_BTM, frames_B, random), frames_B


def _uniform(low: float, high: float, size: int, random: torch.Generator) -> Tensor:
    """`[size, 1, 1]`, evenly drawn."""
    return torch.rand(size, 1, 1, generator=random) * (high - low) + low


def _chance(probability: float, size: int, random: torch.Generator) -> Tensor:
    return (torch.rand(size, 1, 1, generator=random) < probability).float()


def _stretch_and_shift(power_BTM: Tensor, frames_B: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tempo 0.85 to 1.15; up to 3 frames lost or 12 frames of silence at each end."""
    batch, frames, mels = power_BTM.shape
    tempo_B11 = _uniform(0.85, 1.15, batch, random)
    lead_B11 = _uniform(-3, 12, batch, random) * _chance(0.7, batch, random)
    trail_B11 = _uniform(-3, 12, batch, random) * _chance(0.7, batch, random)
    new_B = (frames_B.view(-1, 1, 1) / tempo_B11 + lead_B11 + trail_B11).round().clamp(min=4).long().flatten()
    time_BT1 = (torch.arange(int(new_B.max())).view(1, -1, 1) - lead_B11) * tempo_B11
    inside = (time_BT1 > -1) & (time_BT1 < frames_B.view(-1, 1, 1))
    low_BT1 = time_BT1.floor().clamp(0, frames - 1).long()
    share = (time_BT1 - low_BT1).clamp(0, 1)
    low = power_BTM.gather(1, low_BT1.expand(-1, -1, mels))
    high = power_BTM.gather(1, (low_BT1 + 1).clamp(max=frames - 1).expand(-1, -1, mels))
    inside &= torch.arange(int(new_B.max())).view(1, -1, 1) < new_B.view(-1, 1, 1)
    return torch.where(inside, low * (1 - share) + high * share, 0.0), new_B


def _warp_bands(power_BTM: Tensor, random: torch.Generator) -> Tensor:
    """Move everything by up to 1.5 bands, as a recording played a little too fast or too slowly would."""
    batch, frames, mels = power_BTM.shape
    place_B1M = torch.arange(mels) + _uniform(-1.5, 1.5, batch, random) * torch.linspace(0.5, 1, mels)
    low_B1M = place_B1M.floor().clamp(0, mels - 2).long()
    share = (place_B1M - low_B1M).clamp(0, 1)
    low, high = (power_BTM.gather(2, (low_B1M + step).expand(-1, frames, -1)) for step in (0, 1))
    return low * (1 - share) + high * share


def _blur(power_BTM: Tensor, random: torch.Generator) -> Tensor:
    """Imitate a codec at a low bitrate: energy leaks into neighbours in time and frequency, and jitters."""
    batch = len(power_BTM)
    time_B11 = _uniform(0, 0.3, batch, random) * _chance(0.5, batch, random)
    band_B11 = _uniform(0, 0.3, batch, random) * _chance(0.3, batch, random)
    neighbours = F.pad(power_BTM, (0, 0, 1, 1))
    power_BTM = power_BTM * (1 - 2 * time_B11) + (neighbours[:, :-2] + neighbours[:, 2:]) * time_B11
    neighbours = F.pad(power_BTM, (1, 1))
    power_BTM = power_BTM * (1 - 2 * band_B11) + (neighbours[..., :-2] + neighbours[..., 2:]) * band_B11
    jitter_B11 = _uniform(0, 0.7, batch, random) * _chance(0.5, batch, random)
    return power_BTM * torch.exp(torch.randn(power_BTM.shape, generator=random) * jitter_B11)


def _draw_channel_gain(power_BTM: Tensor, random: torch.Generator) -> Tensor:
    """A gain per band `[B, 1, M]`: tilt and ripple of a few dB, sometimes a low pass within the upper third."""
    batch, _, mels = power_BTM.shape
    band_M = torch.linspace(-1, 1, mels)
    phase = _uniform(0, 2 * math.pi, batch, random)
    ripple = torch.sin(band_M * math.pi * _uniform(0.5, 2, batch, random) + phase)
    decibels = band_M * _uniform(-5, 5, batch, random) + ripple * _uniform(0, 3, batch, random)
    edge = _uniform(0.4, 1, batch, random) + 2 * (1 - _chance(0.2, batch, random))
    decibels = decibels - 200 * (band_M - edge).clamp(min=0, max=0.25)
    return 10 ** (decibels / 10)


def _add_noise(power_BTM: Tensor, random: torch.Generator) -> Tensor:
    """A tilted noise floor 10 to 60 dB below the loud frames, at random phase to what is there."""
    batch, _, mels = power_BTM.shape
    tilt = torch.linspace(-1, 1, mels) * _uniform(-10, 10, batch, random)
    level_B1M = 10 ** ((tilt - _uniform(10, 60, batch, random)) / 10)
    draws = -torch.log(torch.rand(2, *power_BTM.shape, generator=random).clamp(min=1e-6))
    noise_BTM = level_B1M * draws.mean(dim=0)
    cosine = torch.cos(torch.rand(power_BTM.shape, generator=random) * math.pi)
    return power_BTM + noise_BTM + 1.2 * cosine * torch.sqrt(power_BTM.clamp(min=0) * noise_BTM)


def _mask_bands(power_BTM: Tensor, frames_B: Tensor, random: torch.Generator) -> Tensor:
    """SpecAugment (arXiv 1904.08779): up to 6 bands, and up to a tenth of the frames, are silenced."""
    batch, frames, mels = power_BTM.shape
    for size, most_B11, position in (
        (frames_B.view(-1, 1, 1), 0.1 * frames_B.view(-1, 1, 1), torch.arange(frames).view(1, -1, 1)),
        (torch.tensor(mels), torch.tensor(6.0), torch.arange(mels).view(1, 1, -1)),
    ):
        width = _uniform(0, 1, batch, random) * most_B11 * _chance(0.5, batch, random)
        start = _uniform(0, 1, batch, random) * (size - width)
        power_BTM = power_BTM.masked_fill((position >= start) & (position < start + width), 0.0)
    return power_BTM
