"""Operations that are faster than their plain forms: overlapping frames, magnitudes, matrix products through oneDNN.

Shapes: B batch, N samples, T frames, W window samples, H hop samples, F frequency bins, I input and O output features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from audiollm import products


def frame(samples_BN: Tensor, window_samples: int, hop_samples: int) -> Tensor:
    """Overlapping frames `[B, T, W]`, T = (N - W) / hop + 1; W and N must be multiples of the hop.

    The same values as `Tensor.unfold`, with a backward that adds slices in place of a scatter.
    """
    blocks_BTH = samples_BN.unflatten(1, (-1, hop_samples))
    count = window_samples // hop_samples
    return torch.cat([blocks_BTH[:, i : i - count + 1 or None] for i in range(count)], dim=2)


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


class ExactLinear(products.Linear):
    """`nn.Linear` that runs through oneDNN where no gradient is needed: a row has the same bits alone and among others,
    by which a signal that is encoded whole, in a batch or in pieces has the same codes."""

    def forward(self, input: Tensor) -> Tensor:
        return multiply_exactly(input, self.weight, self.bias)


def multiply_exactly(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """`functional.linear`: through oneDNN without a gradient, else by the faster library."""
    if uses_onednn(x):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
        return product
    return products.linear(x, weight_OI, bias_O)


def uses_onednn(x: Tensor) -> bool:
    """Whether the private oneDNN operators may run: float32 on a CPU, and nothing to differentiate."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and products.has_onednn()
    )
