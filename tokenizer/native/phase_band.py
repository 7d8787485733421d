"""The waveform below a cutoff as numbers of a latent: how a continuous autoencoder keeps the phase of low harmonics.

A lapped transform (modified discrete cosine transform, Princen and Bradley 1986) of one latent frame to a hop turns the
waveform into real coefficients, of which those below the cutoff are kept. They are linear in the waveform, so a latent
that repeats them decodes to the waveform itself, sample for sample.

Shapes: B batch, C channels, N samples, H hop samples, T latent frames, P coefficients of a channel, R mel frames per
latent frame, F = T * R mel frames, D latent dimension, K frequency bins of the mel frames' STFT, L the lowest of them,
W window samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokenizer.native.operations import ExactLinear, frame, overlap_add
from tokenizer.quantizers.codebooks import at_least_float32

QUIET = 1e-2
"""Coefficients far above it enter the encoder's net as their square root, those below it in proportion."""
LEAKED_BINS = 3
"""STFT bins above the cutoff into which the window spreads what lies below it."""


@dataclass(frozen=True)
class PhaseBand:
    """The band whose waveform a latent carries."""

    cutoff_hz: float
    channels: int
    """The first channels of the encoder, whose waveform it is."""
    numbers: int
    """Numbers of a latent that hold the lowest coefficients when training begins; it decides on all of them."""


class LappedTransform(nn.Module):
    """Waveform `[B, C, H / 2 + T * H + H / 2]` to coefficients `[B, T, C, P]`, and back."""

    def __init__(self, sample_rate: int, hop_samples: int, cutoff_hz: float) -> None:
        super().__init__()
        self.hop_samples = hop_samples
        self.num_coefficients = min(hop_samples, math.ceil(2 * hop_samples * cutoff_hz / sample_rate))
        sample_W = torch.arange(2 * hop_samples, dtype=torch.float64) + 0.5
        frequency_P = torch.arange(self.num_coefficients, dtype=torch.float64) + 0.5
        angle_WP = math.pi / hop_samples * (sample_W[:, None] + hop_samples / 2) * frequency_P
        window_W = torch.sin(math.pi / (2 * hop_samples) * sample_W)
        basis_WP = math.sqrt(2 / hop_samples) * window_W[:, None] * angle_WP.cos()
        self.register_buffer("basis_WP", basis_WP.float(), persistent=False)
        self.basis_WP: Tensor

    def forward(self, samples_BCN: Tensor) -> Tensor:
        with torch.autocast(samples_BCN.device.type, enabled=False):
            framed = frame(
                at_least_float32(samples_BCN).flatten(0, 1), 2 * self.hop_samples, self.hop_samples
            )
            coefficients = _product(framed, self.basis_WP)
        return coefficients.unflatten(0, samples_BCN.shape[:2]).transpose(1, 2)

    def inverse(self, coefficients_BTCP: Tensor) -> Tensor:
        """What lies below the cutoff of the waveform; a hop at both ends, which wants frames beyond, is wrong."""
        framed = _product(coefficients_BTCP.transpose(1, 2), self.basis_WP.T)
        samples = overlap_add(framed.flatten(0, 1), self.hop_samples)
        return samples.unflatten(0, framed.shape[:2])


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """In the finer of both types."""
    dtype = torch.promote_types(x.dtype, matrix.dtype)
    return x.to(dtype) @ matrix.to(dtype)


class BandInput(nn.Module):
    """Adds the band's coefficients to an encoder: to its net, in a compressed form, and to its output as they are.

    At first, the mean of the channels' coefficients are the first `PhaseBand.numbers` of the output.
    """

    def __init__(self, transform: LappedTransform, band: PhaseBand, hidden_size: int, outputs: int) -> None:
        super().__init__()
        self.transform, self.channels = transform, band.channels
        coefficients = transform.num_coefficients
        self.to_hidden = ExactLinear(band.channels * coefficients, hidden_size)
        self.to_output = ExactLinear(band.channels * coefficients, outputs)
        with torch.no_grad():
            self.to_output.weight.zero_()
            self.to_output.bias.zero_()
            for number in range(min(band.numbers, coefficients)):
                self.to_output.weight[number, number::coefficients] = 1 / band.channels

    def coefficients(self, samples_BCN: Tensor) -> Tensor:
        """`[B, T, channels * P]` of a waveform with half a hop more on each side."""
        coefficients_BTCP: Tensor = self.transform(samples_BCN[:, : self.channels])
        return coefficients_BTCP.flatten(2)

    def hidden(self, coefficients_BTX: Tensor) -> Tensor:
        """`[B, T, hidden_size]`."""
        root_BTX = coefficients_BTX * (coefficients_BTX.square() + QUIET**2).pow(-0.25)
        added: Tensor = self.to_hidden(root_BTX)
        return added

    def output(self, coefficients_BTX: Tensor) -> Tensor:
        """`[B, T, outputs]`."""
        added: Tensor = self.to_output(coefficients_BTX)
        return added


class BandOutput(nn.Module):
    """The complex spectrum of the band in a decoder, `[B, F, C, L]`: a linear map of three latents, and the net's part.

    At first, the map is the inverse of what `BandInput` does, in every channel, and the net's part is 0.
    """

    def __init__(
        self,
        transform: LappedTransform,
        window_W: Tensor,
        frames_per_latent: int,
        channels: int,
        latent_dim: int,
        hidden_size: int,
        numbers: int,
    ) -> None:
        super().__init__()
        self.frames_per_latent, self.channels, self.n_fft = frames_per_latent, channels, len(window_W)
        cutoff_share = transform.num_coefficients / transform.hop_samples
        self.num_bins = min(self.n_fft // 2 + 1, math.ceil(cutoff_share * self.n_fft / 2) + 1 + LEAKED_BINS)
        outputs = channels * 2 * self.num_bins
        self.from_latents = ExactLinear(3 * latent_dim, frames_per_latent * outputs)
        self.from_hidden = ExactLinear(hidden_size, outputs)
        with torch.no_grad():
            self.from_hidden.weight.zero_()
            self.from_hidden.bias.zero_()
            self.from_latents.bias.zero_()
            self.from_latents.weight.copy_(self._inverse(transform, window_W, latent_dim, numbers))

    def forward(self, latent_BTD: Tensor, features_BFC: Tensor) -> Tensor:
        """Latents with one more before and one behind; the net's features `[B, F, hidden_size]`."""
        frames = latent_BTD.shape[1] - 2
        windows_BTX = torch.cat([latent_BTD[:, i : i + frames] for i in range(3)], dim=2)
        linear_BFX = self.from_latents(windows_BTX).unflatten(2, (self.frames_per_latent, -1)).flatten(1, 2)
        both_BFX = at_least_float32(linear_BFX) + at_least_float32(self.from_hidden(features_BFC))
        return torch.view_as_complex(both_BFX.unflatten(2, (self.channels, self.num_bins, 2)).contiguous())

    def _inverse(self, transform: LappedTransform, window_W: Tensor, latent_dim: int, numbers: int) -> Tensor:
        """STFT frames of the waveform that each coefficient of the latent before, the latent itself and the one behind
        stands for: `[R * C * L * 2, 3 * D]`."""
        hop, coefficients = transform.hop_samples, min(numbers, transform.num_coefficients)
        mel_hop = hop // self.frames_per_latent
        margin = (self.n_fft - mel_hop) // 2
        unit = torch.zeros(3 * coefficients, 3, 1, transform.num_coefficients)
        for place in range(3):
            rows = torch.arange(coefficients)
            unit[place * coefficients + rows, place, 0, rows] = 1
        # the first frame of three begins half a hop in; the latent's own hop is the second
        samples_XN = functional.pad(transform.inverse(unit)[:, 0], (margin, margin))
        begin = hop // 2 + hop
        framed = frame(samples_XN[:, begin : begin + hop + 2 * margin], self.n_fft, mel_hop)
        spectrum_XRL = torch.fft.rfft(framed * window_W)[..., : self.num_bins]
        parts = torch.view_as_real(spectrum_XRL)[:, :, None].expand(-1, -1, self.channels, -1, -1)
        weight = torch.zeros(parts[0].numel(), 3, latent_dim)
        weight[:, :, :coefficients] = parts.flatten(1).T.unflatten(1, (3, coefficients))
        return weight.flatten(1)
