"""The two halves that every tokenizer of this family shares: waveform to latent, and latent to waveform.

Everything after an input layer is causal, so both halves can run in pieces with carried context. The input layers
look at neighbours on both sides; whoever calls in pieces supplies those (`tokenizer/native/streaming.py`).

Shapes: B batch, C audio channels, N samples, T latent frames, M mel bands, D latent dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from tokenizer.native.layers import (
    Carry,
    ConvNeXtBlock,
    Downsample,
    InverseSTFTHead,
    LogMel,
    TimeConv,
    Upsample,
)

MEL_CONTEXT = 3
"""Mel frames on each side that the encoder's input layer sees."""
PAST_FRAMES, FUTURE_FRAMES = 4, 2
"""Latent frames before and after its own that the decoder's input layer sees."""


@dataclass(frozen=True)
class AutoencoderShape:
    """Rates and widths of an encoder and a decoder."""

    sample_rate: int
    channels: int
    mel_hop_samples: int
    stride: int
    n_fft: int
    num_mels: int
    mel_hidden_size: int
    """Width at the mel rate."""
    hidden_size: int
    """Width at the frame rate."""
    encoder_layers: tuple[int, int]
    """Blocks at the mel rate, blocks at the frame rate."""
    decoder_layers: tuple[int, int]
    """Blocks at the frame rate, blocks at the mel rate."""

    @property
    def hop_samples(self) -> int:
        return self.mel_hop_samples * self.stride

    @property
    def context_samples(self) -> int:
        """Context that the encoder sees beyond a frame on each side, apart from the state it carries."""
        return (self.n_fft - self.mel_hop_samples) // 2 + MEL_CONTEXT * self.mel_hop_samples


class Encoder(nn.Module):
    """Waveform `[B, C, N]` to latents `[B, N / hop, D]`: log-mel, ConvNeXt, stride, ConvNeXt."""

    def __init__(self, shape: AutoencoderShape, latent_dim: int) -> None:
        super().__init__()
        self.shape = shape
        before, after = shape.encoder_layers
        self.mel = LogMel(shape.sample_rate, shape.n_fft, shape.mel_hop_samples, shape.num_mels)
        self.input = TimeConv(shape.channels * shape.num_mels, shape.mel_hidden_size, 2 * MEL_CONTEXT + 1)
        self.mel_blocks = nn.ModuleList(ConvNeXtBlock(shape.mel_hidden_size) for _ in range(before))
        self.downsample = Downsample(shape.mel_hidden_size, shape.hidden_size, shape.stride)
        self.blocks = nn.ModuleList(ConvNeXtBlock(shape.hidden_size) for _ in range(after))
        self.output = nn.Sequential(nn.LayerNorm(shape.hidden_size), nn.Linear(shape.hidden_size, latent_dim))

    def forward(self, samples_BCN: Tensor) -> Tensor:
        """The whole at once; N must be a multiple of the hop. Silence is assumed on both sides."""
        context = self.shape.context_samples
        return self.steps([functional.pad(samples_BCN, (context, context))], None)[0]

    def steps(self, windows_BCN: Sequence[Tensor], carry: Carry | None) -> list[Tensor]:
        """Windows that follow one another, each with `context_samples` more on each side, to their latents.

        `[B, C, context + T * hop + context]` each to `[B, T, D]`. All windows go through a layer before the
        next layer's weights are fetched: the same arithmetic as one after another, with fewer cache misses.
        """
        x_BTC = _run(self.mel_blocks, [self.input(self._mel(window)) for window in windows_BCN], carry)
        x_BTC = _run(self.blocks, [self.downsample(x) for x in x_BTC], carry)
        return [self.output(x) for x in x_BTC]

    def _mel(self, samples_BCN: Tensor) -> Tensor:
        """`[B, T, C * M]`."""
        mel_RTM = self.mel.valid(samples_BCN.flatten(0, 1))
        return mel_RTM.unflatten(0, (-1, self.shape.channels)).transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """Latents `[B, T, D]` to waveform `[B, C, T * hop]`: ConvNeXt, transposed stride, ConvNeXt, inverse STFT."""

    def __init__(self, shape: AutoencoderShape, latent_dim: int) -> None:
        super().__init__()
        self.shape = shape
        before, after = shape.decoder_layers
        self.input = TimeConv(latent_dim, shape.hidden_size, PAST_FRAMES + 1 + FUTURE_FRAMES)
        self.blocks = nn.ModuleList(ConvNeXtBlock(shape.hidden_size) for _ in range(before))
        self.upsample = Upsample(shape.hidden_size, shape.mel_hidden_size, shape.stride)
        self.mel_blocks = nn.ModuleList(ConvNeXtBlock(shape.mel_hidden_size) for _ in range(after))
        self.norm = nn.LayerNorm(shape.mel_hidden_size)
        self.head = InverseSTFTHead(shape.mel_hidden_size, shape.n_fft, shape.mel_hop_samples, shape.channels)

    def forward(self, latent_BTD: Tensor) -> Tensor:
        """The whole at once."""
        padded_BTD = functional.pad(latent_BTD, (0, 0, PAST_FRAMES, FUTURE_FRAMES))
        samples: Tensor = self.head(self._features(padded_BTD, None))
        return samples

    def step(self, latent_BTD: Tensor, carry: Carry) -> Tensor:
        """A piece with `PAST_FRAMES` more before and `FUTURE_FRAMES` more behind; the head's delay applies."""
        return self.head.step(self._features(latent_BTD, carry), carry)

    def _features(self, latent_BTD: Tensor, carry: Carry | None) -> Tensor:
        (x_BTC,) = _run(self.blocks, [self.input(latent_BTD)], carry)
        (x_BTC,) = _run(self.mel_blocks, [self.upsample(x_BTC)], carry)
        normed: Tensor = self.norm(x_BTC)
        return normed


def _run(blocks: Iterable[nn.Module], pieces_BTC: list[Tensor], carry: Carry | None) -> list[Tensor]:
    for block in blocks:
        pieces_BTC = [block(x_BTC, carry) for x_BTC in pieces_BTC]
    return pieces_BTC
