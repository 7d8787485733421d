"""Augmentation of heard audio in training: frequencies, level, tilt, shift in time, masks over time and mel bins.

Masks are SpecAugment's (arXiv 1904.08779, section 2) without its warping, filled with the mean of the clip. Frequencies
are multiplied by one factor, as in vocal tract length perturbation (Jaitly and Hinton 2013), without its bend at the
upper end: there the highest bin is repeated. The draws depend on the generator alone.

Shapes: M mel bins, F mel frames of a clip.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from audiollm.data.hearing.augmentation import Augmentation
from audiollm.data.hearing.features import FRAMES_PER_SECOND, SAMPLE_RATE, ClipFeatures, FeatureShape

LOG_MEL_UNITS_PER_DB = 1 / 40
"""Change of a log-mel value per decibel: log-mels are (log10 of the power + 4) / 4."""


def augment_features(
    clip: ClipFeatures, config: Augmentation, shape: FeatureShape, generator: torch.Generator
) -> ClipFeatures:
    """The clip as it is heard this time: as many windows, frames and rows.

    Args:
        shape: what the windows were made for; silence that fills a window up stays behind the sound.
    """
    mel_MF = torch.cat([window.mel_MF for window in clip.windows], dim=1)
    sound = min(mel_MF.shape[1], clip.rows * shape.frames_per_row)
    if config.frequency_warp:
        factor = 1 + config.frequency_warp * (2 * torch.rand((), generator=generator).item() - 1)
        mel_MF = warp_frequencies(mel_MF, factor)
    mel_MF = mel_MF + _level_M1(len(mel_MF), config, generator)
    mel_MF[:, :sound] = _moved(mel_MF[:, :sound], config, generator)
    _mask(mel_MF, sound, config, generator)
    edges = accumulate((window.mel_MF.shape[1] for window in clip.windows), initial=0)
    parts = [mel_MF[:, start:end].contiguous() for start, end in pairwise(edges)]
    windows = [
        window._replace(mel_MF=window_mel_MF)
        for window, window_mel_MF in zip(clip.windows, parts, strict=True)
    ]
    return ClipFeatures(tuple(windows))


def warp_frequencies(mel_MF: Tensor, factor: float) -> Tensor:
    """Log-mels [M, F] of the same sound with all of its frequencies multiplied by a factor."""
    centres_M = _bin_centres_hz(len(mel_MF))
    bins_M = np.interp(centres_M / factor, centres_M, np.arange(len(centres_M)))
    lower_M = torch.from_numpy(bins_M).floor().long()
    share_M1 = (torch.from_numpy(bins_M) - lower_M)[:, None].to(mel_MF)
    upper_M = (lower_M + 1).clamp(max=len(mel_MF) - 1)
    return torch.lerp(mel_MF[lower_M], mel_MF[upper_M], share_M1)


# Private


@cache
def _bin_centres_hz(bins: int) -> np.ndarray:
    """Centre frequencies of the mel bins, as `WhisperFeatureExtractor` has them: Slaney's scale from 0 Hz to half of
    the sampling rate."""
    from librosa import mel_frequencies

    return mel_frequencies(bins + 2, fmin=0, fmax=SAMPLE_RATE / 2)[1:-1]


def _level_M1(bins: int, config: Augmentation, generator: torch.Generator) -> Tensor:
    gain, tilt = (2 * torch.rand(2, generator=generator) - 1).tolist()
    slope_M = torch.linspace(-1, 1, bins)
    return LOG_MEL_UNITS_PER_DB * (gain * config.gain_db + tilt * config.tilt_db * slope_M)[:, None]


def _moved(sound_MF: Tensor, config: Augmentation, generator: torch.Generator) -> Tensor:
    share = torch.rand((), generator=generator).item() * config.shift
    return sound_MF.roll(int(share * sound_MF.shape[1]), dims=1)


def _mask(mel_MF: Tensor, sound: int, config: Augmentation, generator: torch.Generator) -> None:
    """Fill random masks in place, all with one value: the mean of the sound."""
    mean = mel_MF[:, :sound].mean()
    widest = min(config.time_mask_s * FRAMES_PER_SECOND, config.time_mask_share * sound)
    for _ in range(config.time_masks):
        start, end = _stretch(widest, sound, generator)
        mel_MF[:, start:end] = mean
    for _ in range(config.mel_masks):
        start, end = _stretch(config.mel_mask_share * len(mel_MF), len(mel_MF), generator)
        mel_MF[start:end, :sound] = mean


def _stretch(widest: float, room: int, generator: torch.Generator) -> tuple[int, int]:
    """Somewhere in the room, from 0 up to the widest, every whole width as likely."""
    width, start = torch.rand(2, generator=generator).tolist()
    size = int(width * (int(widest) + 1))
    first = int(start * (room - size + 1))
    return first, first + size
