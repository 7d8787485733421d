"""The adversary: multi-period (HiFi-GAN) and multi-scale STFT (EnCodec) discriminators.

Samples go in as `[B, C, N]`; each sub-discriminator gives a map of logits and the features that led there.

Shapes: B batch, C audio channels, N samples, P period, L samples of one phase (about N / P), H convolution
channels, T frames, F frequency bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from tokenizer.native.operations import frame
from tokenizer.quantizers.codebooks import at_least_float32


class DiscriminatorOutput(NamedTuple):
    """A sub-discriminator's output for a batch."""

    logits: Tensor
    """`[B P, 1, L]` or `[B, 1, T, F]`, above 0 for "real"."""
    features: list[Tensor]
    """The activations of every layer before the logits, `[B P, H, L]` or `[B, H, T, F]`; T, F and L shrink."""


@dataclass(frozen=True)
class DiscriminatorConfig:
    """The defaults are the published sizes (HiFi-GAN's periods, EnCodec's windows); see also `TINY`."""

    periods: tuple[int, ...] = (2, 3, 5, 7, 11)
    stft_windows: tuple[int, ...] = (2048, 1024, 512, 256, 128)
    """Windows of the STFT discriminators, in samples."""
    stft_overlap: int = 4
    """Ratio of window to hop."""
    channels: int = 32
    """Channels of the first layer; the STFT discriminators keep this number throughout."""
    period_growth: int = 4
    """Factor by which each layer of a period discriminator is wider than the one before."""
    max_channels: int = 1024
    """Channels of the widest layer of a period discriminator."""
    stft_dilations: tuple[int, ...] = (1, 2, 4)
    """Dilation over time of each inner layer of an STFT discriminator; each also halves the bins."""
    stft_first_stride: int = 1
    """Frequency stride of the first STFT layer, where nearly all the cost lies; EnCodec's is 1."""
    audio_channels: int = 1


TINY = DiscriminatorConfig(
    periods=(2, 5),
    stft_windows=(1024, 256),
    stft_overlap=2,
    channels=8,
    period_growth=2,
    max_channels=32,
    stft_dilations=(1, 2),
    stft_first_stride=8,
)
"""For training on a CPU: a step of both sides takes about 0.015 CPU-seconds for a second of audio."""


class PeriodDiscriminator(nn.Module):
    """Looks at every P-th sample, from each of the P starts.

    HiFi-GAN folds `[B, C, N]` to `[B, C, N / P, P]` and convolves with kernels of `(5, 1)`, so the P columns
    never meet: they are sequences of a batch here, and `Conv1d` does the same in half the time on a CPU.
    """

    def __init__(
        self, period: int, audio_channels: int, channels: int, growth: int, max_channels: int
    ) -> None:
        super().__init__()
        self.period = period
        widths = [audio_channels] + [min(channels * growth**i, max_channels) for i in range(4)]
        widths.append(widths[-1])
        strides = (3, 3, 3, 3, 1)
        self.convolutions = nn.ModuleList(
            weight_norm(nn.Conv1d(before, after, 5, stride, padding=2))
            for before, after, stride in zip(widths[:-1], widths[1:], strides, strict=True)
        )
        self.to_logits = weight_norm(nn.Conv1d(widths[-1], 1, 3, padding=1))

    def forward(self, samples_BCN: Tensor) -> DiscriminatorOutput:
        missing = -samples_BCN.shape[2] % self.period
        padded = functional.pad(samples_BCN, (0, missing), "reflect") if missing else samples_BCN
        phases_BPCL = padded.unflatten(2, (-1, self.period)).permute(0, 3, 1, 2)
        return _convolve(
            phases_BPCL.flatten(0, 1).contiguous(), self.convolutions, self.to_logits, negative_slope=0.1
        )


class STFTDiscriminator(nn.Module):
    """Looks at the complex STFT, real and imaginary parts as channels: `[B, 2 C, T, F]`."""

    def __init__(
        self,
        window_samples: int,
        overlap: int,
        audio_channels: int,
        channels: int,
        dilations: Sequence[int],
        first_stride: int,
    ) -> None:
        super().__init__()
        if window_samples % overlap:
            raise ValueError(
                f"STFT window of {window_samples} samples: give a multiple of the overlap, {overlap} (window / hop)"
            )
        self.hop_samples = window_samples // overlap
        window_W = torch.hann_window(window_samples)
        # unit energy, so that all scales see values of one size
        self.register_buffer("window_W", window_W / window_W.square().sum().sqrt(), persistent=False)
        self.window_W: Tensor
        first = nn.Conv2d(2 * audio_channels, channels, (3, 9), (1, first_stride), padding=(1, 4))
        inner = [
            nn.Conv2d(channels, channels, (3, 9), (1, 2), dilation=(d, 1), padding=(d, 4)) for d in dilations
        ]
        last = nn.Conv2d(channels, channels, 3, padding=1)
        self.convolutions = nn.ModuleList(weight_norm(layer) for layer in [first, *inner, last])
        self.to_logits = weight_norm(nn.Conv2d(channels, 1, 3, padding=1))

    def forward(self, samples_BCN: Tensor) -> DiscriminatorOutput:
        # channels-last: with few channels, several times faster on a CPU
        spectrum = self._spectrum(samples_BCN).contiguous(memory_format=torch.channels_last)
        return _convolve(spectrum, self.convolutions, self.to_logits, negative_slope=0.2)

    def _spectrum(self, samples_BCN: Tensor) -> Tensor:
        """`[B, 2 C, T, F]`, all real parts before all imaginary ones, without padding at the ends."""
        window_samples = len(self.window_W)
        count = samples_BCN.shape[2]
        if count < window_samples:
            raise ValueError(
                f"crops of {count} samples are shorter than the STFT discriminator's window of {window_samples}: "
                "lengthen the crops or leave that window out"
            )
        # fp32 from here on, under autocast too: it never narrows elementwise operations or FFTs
        whole_hops = at_least_float32(samples_BCN[..., : count - count % self.hop_samples]).flatten(0, 1)
        frames = frame(whole_hops, window_samples, self.hop_samples) * self.window_W
        parts = torch.view_as_real(torch.fft.rfft(frames)).unflatten(0, samples_BCN.shape[:2])
        # [B, C, T, F, 2]: for mono this order of axes is a channels-last image already
        return parts.permute(0, 4, 1, 2, 3).flatten(1, 2)


class MultiPeriodDiscriminator(nn.Module):
    """HiFi-GAN's (arXiv 2010.05646, section 2.3), one `PeriodDiscriminator` a period."""

    def __init__(
        self,
        periods: Sequence[int],
        audio_channels: int = 1,
        channels: int = 32,
        growth: int = 4,
        max_channels: int = 1024,
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(
            PeriodDiscriminator(period, audio_channels, channels, growth, max_channels) for period in periods
        )

    def forward(self, samples_BCN: Tensor) -> list[DiscriminatorOutput]:
        return [member(samples_BCN) for member in self.members]


class MultiScaleSTFTDiscriminator(nn.Module):
    """EnCodec's (arXiv 2210.13438, section 3.4), one `STFTDiscriminator` a window."""

    def __init__(
        self,
        windows: Sequence[int],
        overlap: int = 4,
        audio_channels: int = 1,
        channels: int = 32,
        dilations: Sequence[int] = (1, 2, 4),
        first_stride: int = 1,
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(
            STFTDiscriminator(window, overlap, audio_channels, channels, dilations, first_stride)
            for window in windows
        )

    def forward(self, samples_BCN: Tensor) -> list[DiscriminatorOutput]:
        return [member(samples_BCN) for member in self.members]


class Discriminators(nn.Module):
    """Both families: the periods' outputs, then the windows'."""

    def __init__(self, config: DiscriminatorConfig) -> None:
        super().__init__()
        if not config.periods and not config.stft_windows:
            raise ValueError("no discriminator: give at least one of `periods` and `stft_windows`")
        self.config = config
        self.period = MultiPeriodDiscriminator(
            config.periods, config.audio_channels, config.channels, config.period_growth, config.max_channels
        )
        self.stft = MultiScaleSTFTDiscriminator(
            config.stft_windows,
            config.stft_overlap,
            config.audio_channels,
            config.channels,
            config.stft_dilations,
            config.stft_first_stride,
        )

    @property
    def names(self) -> list[str]:
        """One a sub-discriminator, in the order of the outputs."""
        return [f"period {p}" for p in self.config.periods] + [f"stft {w}" for w in self.config.stft_windows]

    def forward(self, samples_BCN: Tensor) -> list[DiscriminatorOutput]:
        """Samples `[B, C, N]`, N at least the largest window, to one output a sub-discriminator."""
        if samples_BCN.dim() != 3 or samples_BCN.shape[1] != self.config.audio_channels:
            raise ValueError(
                f"samples have shape {list(samples_BCN.shape)}: "
                f"the discriminators take [batch, {self.config.audio_channels}, samples]"
            )
        return [*self.period(samples_BCN), *self.stft(samples_BCN)]


def _convolve(
    image: Tensor, convolutions: nn.ModuleList, to_logits: nn.Module, negative_slope: float
) -> DiscriminatorOutput:
    hidden = image
    features = []
    for convolution in convolutions:
        hidden = functional.leaky_relu(convolution(hidden), negative_slope)
        features.append(hidden)
    return DiscriminatorOutput(to_logits(hidden), features)
