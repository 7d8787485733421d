"""Building blocks of the tokenizer: mel front end, ConvNeXt blocks, inverse-STFT head.

Everything is channels-last, `[B, T, C]`, so that a pointwise layer is a plain matrix product and a strided
layer a reshape (on CPU several times faster than the same blocks as `Conv1d`).

Shapes: B batch, N samples, C channels, T frames, W window samples, F frequency bins, M mel bands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from librosa.filters import mel as librosa_mel
from torch import Tensor, nn
from torch.nn import functional

from tokenizer.native.operations import ExactLinear, magnitudes, overlap_add
from tokenizer.native.pitch import PitchSalience
from tokenizer.native.source import Excitation
from tokenizer.quantizers.codebooks import at_least_float32

HARMONIC_SLOPE, HARMONIC_BIAS = 2.0, 0.5
"""Applied to the logits of the harmonic share: the expected share of many like frames is more even than the share of
each, and sounds hoarse."""


def mel_filters(sample_rate: int, n_fft: int, num_mels: int) -> Tensor:
    """librosa's Slaney filterbank, `[F, M]`."""
    return torch.from_numpy(librosa_mel(sr=sample_rate, n_fft=n_fft, n_mels=num_mels)).T.contiguous()


class LogMel(nn.Module):
    """Waveform `[B, N]` to log-mel `[B, N / hop, M]`, with pitch salience M + L; N must be a multiple of the hop.

    Frame t is centred on its own hop, with `(n_fft - hop) / 2` samples of context (zeros at the ends).
    """

    def __init__(
        self, sample_rate: int, n_fft: int, hop_samples: int, num_mels: int, highest_pitch_hz: float = 0.0
    ) -> None:
        """`highest_pitch_hz`: salience reaches up to it; 0: there is none."""
        super().__init__()
        self.n_fft, self.hop_samples = n_fft, hop_samples
        self.register_buffer("filters_FM", mel_filters(sample_rate, n_fft, num_mels), persistent=False)
        self.register_buffer("window_W", torch.hann_window(n_fft), persistent=False)
        self.filters_FM: Tensor
        self.window_W: Tensor
        self.salience: PitchSalience | None = None
        if highest_pitch_hz:
            self.salience = PitchSalience(sample_rate, self.window_W, highest_pitch_hz)
        self.num_features = num_mels + (self.salience.num_lags if self.salience is not None else 0)

    def forward(self, samples_BN: Tensor) -> Tensor:
        before = (self.n_fft - self.hop_samples) // 2
        return self.valid(functional.pad(samples_BN, (before, self.n_fft - self.hop_samples - before)))

    def valid(self, samples_BN: Tensor) -> Tensor:
        """The frames that lie wholly in the samples: `[B, (N - n_fft) / hop + 1, M]`."""
        with torch.autocast(samples_BN.device.type, enabled=False):
            magnitude_BTF = magnitudes(at_least_float32(samples_BN), self.window_W, self.hop_samples)
            log_mel_BTM = torch.log((magnitude_BTF @ self.filters_FM).clamp_min(1e-4))
            if self.salience is None:
                return log_mel_BTM
            return torch.cat([log_mel_BTM, self.salience(magnitude_BTF)], dim=2)


Carry = dict[nn.Module, Any]
"""State that each causal layer keeps of earlier frames when a sequence is processed piece by piece."""


class TimeConv(nn.Conv2d):
    """A "valid" convolution over time on `[B, T, C]`: T - kernel + 1 frames come out."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, groups: int = 1) -> None:
        super().__init__(in_channels, out_channels, (1, kernel_size), groups=groups)

    def forward(self, x_BTC: Tensor) -> Tensor:
        # [B, T, C] seen as a channels-last image of height 1: oneDNN's and cuDNN's fast layout, no copy
        return super().forward(x_BTC.transpose(1, 2).unsqueeze(2)).squeeze(2).transpose(1, 2)


class CausalConv(nn.Module):
    """A convolution over time that sees the past only: zeros, or what `carry` holds, stand before the first frame."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, groups: int = 1) -> None:
        super().__init__()
        self.context = kernel_size - 1
        self.conv = TimeConv(in_channels, out_channels, kernel_size, groups)

    def forward(self, x_BTC: Tensor, carry: Carry | None = None) -> Tensor:
        if carry is not None and self in carry:
            x_BTC = torch.cat([carry[self], x_BTC], dim=1)
        else:
            x_BTC = functional.pad(x_BTC, (0, 0, self.context, 0))
        if carry is not None:
            carry[self] = x_BTC[:, -self.context :]
        convolved: Tensor = self.conv(x_BTC)
        return convolved


class ConvNeXtBlock(nn.Module):
    """Causal depthwise convolution, LayerNorm over channels, two pointwise layers, residual (arXiv 2201.03545)."""

    def __init__(self, channels: int, expansion: int = 3, kernel_size: int = 7) -> None:
        super().__init__()
        self.depthwise = CausalConv(channels, channels, kernel_size, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.expand = ExactLinear(channels, expansion * channels)
        self.reduce = ExactLinear(expansion * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x_BTC: Tensor, carry: Carry | None = None) -> Tensor:
        hidden = self.norm(self.depthwise(x_BTC, carry))
        hidden = self.reduce(functional.gelu(self.expand(hidden)))
        return x_BTC + self.scale * hidden


class Downsample(nn.Module):
    """A convolution with kernel = stride: `[B, T, C]` to `[B, T / stride, C']`."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.project = ExactLinear(stride * in_channels, out_channels)

    def forward(self, x_BTC: Tensor) -> Tensor:
        folded: Tensor = self.project(x_BTC.unflatten(1, (-1, self.stride)).flatten(2))
        return folded


class Upsample(nn.Module):
    """A transposed convolution with kernel = stride: `[B, T, C]` to `[B, T * stride, C']`."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.project = ExactLinear(in_channels, stride * out_channels)

    def forward(self, x_BTC: Tensor) -> Tensor:
        expanded: Tensor = self.project(x_BTC)
        return expanded.unflatten(2, (self.stride, -1)).flatten(1, 2)


class InverseSTFTHead(nn.Module):
    """Features `[B, T, C]` to `[B, channels, T * hop]`: log-magnitude and phase, then inverse STFT (Vocos).

    With a harmonic source, the spectrum is magnitude * (v p E + (1 - v p) exp(i phase)): E the source's spectrum, v
    its voicing, and p, the harmonic share, read from the features in bands. A phase band's spectrum is added.

    Frame t is centred on its own hop. In pieces, what comes out is `delay_samples` late: the overlap with frames
    that are still to come is carried, and `finish` gives the rest.
    """

    def __init__(
        self,
        in_channels: int,
        n_fft: int,
        hop_samples: int,
        channels: int,
        sample_rate: int,
        band_centres_hz: Sequence[float] = (),
    ) -> None:
        """`band_centres_hz`: the bands of the harmonic share; none for a head without a source."""
        super().__init__()
        self.n_fft, self.hop_samples, self.channels = n_fft, hop_samples, channels
        self.delay_samples = (n_fft - hop_samples) // 2
        self.project = ExactLinear(in_channels, channels * (n_fft + 2))
        self.register_buffer("window_W", torch.hann_window(n_fft), persistent=False)
        self.window_W: Tensor
        if band_centres_hz:
            self.harmonic_share = ExactLinear(in_channels, channels * len(band_centres_hz))
            bands_PF = _interpolation(band_centres_hz, n_fft, sample_rate)
            self.register_buffer("bands_PF", bands_PF, persistent=False)
            self.bands_PF: Tensor

    def forward(
        self,
        x_BTC: Tensor,
        excitation: Excitation | None = None,
        band_BTCL: Tensor | None = None,
        linear_BTCF: Tensor | None = None,
    ) -> Tensor:
        carry: Carry = {}
        return torch.cat(
            [self.step(x_BTC, carry, excitation, band_BTCL, linear_BTCF), self.finish(carry)], dim=2
        )

    def step(
        self,
        x_BTC: Tensor,
        carry: Carry,
        excitation: Excitation | None = None,
        band_BTCL: Tensor | None = None,
        linear_BTCF: Tensor | None = None,
    ) -> Tensor:
        """The samples `[B, channels, n]` that these frames complete.

        Args:
            band_BTCL: the complex spectrum of the lowest L bins of a phase band.
            linear_BTCF: log-magnitudes that are added to those of the features.
        """
        first = self not in carry
        spectrum_RTF = self._spectrum(x_BTC, excitation, linear_BTCF)
        if band_BTCL is not None:
            band_RTL = band_BTCL.transpose(1, 2).flatten(0, 1)
            spectrum_RTF = spectrum_RTF + functional.pad(
                band_RTL, (0, spectrum_RTF.shape[2] - band_RTL.shape[2])
            )
        frames_BTW = torch.fft.irfft(spectrum_RTF, n=self.n_fft) * self.window_W
        weights_1TW = self.window_W.square().expand(1, x_BTC.shape[1], -1)
        both_RN = overlap_add(torch.cat([frames_BTW, weights_1TW]), self.hop_samples)
        if not first:
            before_RN = carry[self]
            both_RN = both_RN + functional.pad(before_RN, (0, both_RN.shape[1] - before_RN.shape[1]))
        done = x_BTC.shape[1] * self.hop_samples
        carry[self] = both_RN[:, done:]
        return self._normalized(both_RN[:, self.delay_samples * first : done])

    def finish(self, carry: Carry) -> Tensor:
        """The last `delay_samples` samples."""
        return self._normalized(carry.pop(self)[:, : self.delay_samples])

    def share_logits(self, x_BTC: Tensor) -> Tensor:
        """Logits of the harmonic share of every channel and band where there is voice, `[B, T, C, P]`."""
        return at_least_float32(self.harmonic_share(x_BTC)).unflatten(2, (self.channels, -1))

    def _spectrum(self, x_BTC: Tensor, excitation: Excitation | None, linear_BTCF: Tensor | None) -> Tensor:
        """Complex, `[B * channels, T, F]`."""
        parts_BTCX = at_least_float32(self.project(x_BTC)).unflatten(2, (self.channels, self.n_fft + 2))
        log_magnitude, phase = parts_BTCX.chunk(2, dim=3)
        if linear_BTCF is not None:
            log_magnitude = log_magnitude + at_least_float32(linear_BTCF)
        magnitude_BTCF = torch.exp(log_magnitude.clamp_max(6.0))
        if excitation is None:
            spectrum_BTCF = torch.polar(magnitude_BTCF, phase)
        else:
            logits_BTCP = HARMONIC_SLOPE * self.share_logits(x_BTC).detach() + HARMONIC_BIAS
            share_BTCF = logits_BTCP.sigmoid() @ self.bands_PF
            voice_BTCF = share_BTCF * excitation.voicing_BF[:, :, None, None]
            source_BTCF = excitation.spectrum_BFK[:, :, None] * (magnitude_BTCF * voice_BTCF)
            spectrum_BTCF = source_BTCF + torch.polar(magnitude_BTCF * (1 - voice_BTCF), phase)
        return spectrum_BTCF.transpose(1, 2).flatten(0, 1)

    def _normalized(self, both_RN: Tensor) -> Tensor:
        samples_RN = both_RN[:-1] / both_RN[-1:].clamp_min(1e-3)
        return samples_RN.unflatten(0, (-1, self.channels))


def _interpolation(centres_hz: Sequence[float], n_fft: int, sample_rate: int) -> Tensor:
    """Weights `[P, F]` of linear interpolation between the bands' centres, constant beyond the outer ones."""
    hz_F = np.linspace(0, sample_rate / 2, n_fft // 2 + 1)
    rows = [np.interp(hz_F, centres_hz, unit_P) for unit_P in np.eye(len(centres_hz))]
    return torch.from_numpy(np.stack(rows)).float()
