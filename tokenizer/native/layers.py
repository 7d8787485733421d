"""Building blocks of the tokenizer: framing, mel front end, ConvNeXt blocks, inverse-STFT head.

Everything is channels-last, `[B, T, C]`, so that a pointwise layer is a plain matrix product and a strided
layer a reshape (on CPU several times faster than the same blocks as `Conv1d`).

Shapes: B batch, N samples, C channels, T frames, W window samples, F frequency bins, M mel bands.
"""

from __future__ import annotations

import torch
from librosa.filters import mel as librosa_mel
from torch import Tensor, nn
from torch.nn import functional

from tokenizer.native.linear import Linear
from tokenizer.quantizers.codebooks import at_least_float32


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


def mel_filters(sample_rate: int, n_fft: int, num_mels: int) -> Tensor:
    """librosa's Slaney filterbank, `[F, M]`."""
    return torch.from_numpy(librosa_mel(sr=sample_rate, n_fft=n_fft, n_mels=num_mels)).T.contiguous()


class LogMel(nn.Module):
    """Waveform `[B, N]` to log-mel `[B, N / hop, M]`; N must be a multiple of the hop.

    Frame t is centred on its own hop, with `(n_fft - hop) / 2` samples of context (zeros at the ends).
    """

    def __init__(self, sample_rate: int, n_fft: int, hop_samples: int, num_mels: int) -> None:
        super().__init__()
        self.n_fft, self.hop_samples = n_fft, hop_samples
        self.register_buffer("filters_FM", mel_filters(sample_rate, n_fft, num_mels), persistent=False)
        self.register_buffer("window_W", torch.hann_window(n_fft), persistent=False)
        self.filters_FM: Tensor
        self.window_W: Tensor

    def forward(self, samples_BN: Tensor) -> Tensor:
        before = (self.n_fft - self.hop_samples) // 2
        return self.valid(functional.pad(samples_BN, (before, self.n_fft - self.hop_samples - before)))

    def valid(self, samples_BN: Tensor) -> Tensor:
        """The frames that lie wholly in the samples: `[B, (N - n_fft) / hop + 1, M]`."""
        with torch.autocast(samples_BN.device.type, enabled=False):
            mel_BTM = (
                magnitudes(at_least_float32(samples_BN), self.window_W, self.hop_samples) @ self.filters_FM
            )
            return torch.log(mel_BTM.clamp_min(1e-4))


Carry = dict[nn.Module, Tensor]
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
        self.expand = Linear(channels, expansion * channels)
        self.reduce = Linear(expansion * channels, channels)
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
        self.project = Linear(stride * in_channels, out_channels)

    def forward(self, x_BTC: Tensor) -> Tensor:
        folded: Tensor = self.project(x_BTC.unflatten(1, (-1, self.stride)).flatten(2))
        return folded


class Upsample(nn.Module):
    """A transposed convolution with kernel = stride: `[B, T, C]` to `[B, T * stride, C']`."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.project = Linear(in_channels, stride * out_channels)

    def forward(self, x_BTC: Tensor) -> Tensor:
        expanded: Tensor = self.project(x_BTC)
        return expanded.unflatten(2, (self.stride, -1)).flatten(1, 2)


class InverseSTFTHead(nn.Module):
    """Features `[B, T, C]` to `[B, channels, T * hop]`: log-magnitude and phase, then inverse STFT (Vocos).

    Frame t is centred on its own hop. In pieces, what comes out is `delay_samples` late: the overlap with frames
    that are still to come is carried, and `finish` gives the rest.
    """

    def __init__(self, in_channels: int, n_fft: int, hop_samples: int, channels: int = 1) -> None:
        super().__init__()
        self.n_fft, self.hop_samples, self.channels = n_fft, hop_samples, channels
        self.delay_samples = (n_fft - hop_samples) // 2
        self.project = Linear(in_channels, channels * (n_fft + 2))
        self.register_buffer("window_W", torch.hann_window(n_fft), persistent=False)
        self.window_W: Tensor

    def forward(self, x_BTC: Tensor) -> Tensor:
        carry: Carry = {}
        return torch.cat([self.step(x_BTC, carry), self.finish(carry)], dim=2)

    def step(self, x_BTC: Tensor, carry: Carry) -> Tensor:
        """The samples `[B, channels, n]` that these frames complete."""
        first = self not in carry
        frames_BTW = self._frames(x_BTC)
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

    def _frames(self, x_BTC: Tensor) -> Tensor:
        """Windowed frames, `[B * channels, T, W]`."""
        parts_BTXF = at_least_float32(self.project(x_BTC)).unflatten(2, (self.channels, self.n_fft + 2))
        magnitude, phase = parts_BTXF.transpose(1, 2).flatten(0, 1).chunk(2, dim=2)
        spectrum = torch.polar(torch.exp(magnitude.clamp_max(6.0)), phase)
        return torch.fft.irfft(spectrum, n=self.n_fft) * self.window_W

    def _normalized(self, both_RN: Tensor) -> Tensor:
        samples_RN = both_RN[:-1] / both_RN[-1:].clamp_min(1e-3)
        return samples_RN.unflatten(0, (-1, self.channels))
