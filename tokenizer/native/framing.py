"""Waveforms to overlapping frames and back, and short-time magnitudes.

Shapes: B batch, N samples, T frames, W window samples, H hop samples, F frequency bins.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def frame(samples_BN: Tensor, window_samples: int, hop_samples: int) -> Tensor:
    """Overlapping frames `[B, T, W]`, T = (N - W) / hop + 1; W and N must be multiples of the hop.

    The same values as `Tensor.unfold`, with a backward that adds slices in place of a scatter.
    """
    blocks_BTH = samples_BN.unflatten(1, (-1, hop_samples))
    count = window_samples // hop_samples
    frames = blocks_BTH.shape[1] - count + 1
    return torch.cat([blocks_BTH[:, i : i + frames] for i in range(count)], dim=2)


def overlap_add(frames_BTW: Tensor, hop_samples: int) -> Tensor:
    """The transpose of `frame`: `[B, T, W]` to `[B, (T - 1) * hop + W]`."""
    count = frames_BTW.shape[2] // hop_samples
    parts = frames_BTW.unflatten(2, (count, hop_samples))
    padded = [functional.pad(parts[:, :, i], (0, 0, i, count - 1 - i)) for i in range(count)]
    return torch.stack(padded).sum(dim=0).flatten(1)


def magnitudes(samples_BN: Tensor, window_W: Tensor, hop_samples: int) -> Tensor:
    """STFT magnitudes `[B, T, F]` without padding (`torch.stft(center=False)`, transposed), differentiable at 0."""
    spectrum = torch.fft.rfft(frame(samples_BN, len(window_W), hop_samples) * window_W)
    return (spectrum.real.square() + spectrum.imag.square() + 1e-10).sqrt()
