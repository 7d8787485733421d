"""The 25 Hz tokenizer: log-mel -> ConvNeXt -> stride 4 -> ConvNeXt -> RVQ -> ConvNeXt -> inverse STFT.

Shapes: B batch, N samples, C channels, T frames at 25 Hz, K codebooks, V codebook size, D latent dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.models.pretrained import load_model, save_model
from tokenizer.layers import ConvNeXtBlock, Downsample, InverseSTFTHead, LogMel, TimeConv, Upsample
from tokenizer.quantizer import ResidualVectorQuantizer

MODEL_TYPE = "audiollm_tokenizer"


@dataclass(frozen=True)
class TokenizerConfig:
    """The shape of a tokenizer. The defaults of rate, codebooks and size are the published 2 kbps."""

    sample_rate: int = 24_000
    mel_hop_samples: int = 240
    stride: int = 4
    num_codebooks: int = 8
    codebook_size: int = 1024
    latent_dim: int = 64
    num_mels: int = 80
    n_fft: int = 960
    hidden_size: int = 256
    encoder_layers: tuple[int, int] = (3, 4)
    """Blocks at the mel rate, blocks at the frame rate."""
    decoder_layers: tuple[int, int] = (4, 4)
    """Blocks at the frame rate, blocks at the mel rate."""

    @property
    def hop_samples(self) -> int:
        return self.mel_hop_samples * self.stride


class TokenizerOutput(NamedTuple):
    """What a training forward returns."""

    samples_BN: Tensor
    latent_BTD: Tensor
    """Before the quantizer."""
    codes_BKT: Tensor | None
    commitment: Tensor


class AudioTokenizer(nn.Module):
    """Waveform to codes and back; a `Codec`."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        self.config = config
        width, before, after = config.hidden_size, config.encoder_layers, config.decoder_layers
        self.mel = LogMel(config.sample_rate, config.n_fft, config.mel_hop_samples, config.num_mels)
        self.encoder = nn.Sequential(
            TimeConv(config.num_mels, width, 7),
            *(ConvNeXtBlock(width) for _ in range(before[0])),
            Downsample(width, config.stride),
            *(ConvNeXtBlock(width) for _ in range(before[1])),
        )
        self.to_latent = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, config.latent_dim))
        self.quantizer = ResidualVectorQuantizer(
            config.num_codebooks, config.codebook_size, config.latent_dim
        )
        self.decoder = nn.Sequential(
            TimeConv(config.latent_dim, width, 7),
            *(ConvNeXtBlock(width) for _ in range(after[0])),
            Upsample(width, config.stride),
            *(ConvNeXtBlock(width) for _ in range(after[1])),
            nn.LayerNorm(width),
        )
        self.head = InverseSTFTHead(width, config.n_fft, config.mel_hop_samples)

    @property
    def frame_rate(self) -> float:
        return self.config.sample_rate / self.config.hop_samples

    @property
    def num_codebooks(self) -> int:
        return self.config.num_codebooks

    @property
    def codebook_size(self) -> int:
        return self.config.codebook_size

    @property
    def sample_rate(self) -> int:
        return self.config.sample_rate

    @property
    def codebook_vectors_KVD(self) -> Tensor:
        return self.quantizer.vectors_KVD.detach()

    def forward(
        self, samples_BN: Tensor, num_codebooks: int | None = None, quantize: bool = True
    ) -> TokenizerOutput:
        """Reconstruct; N must be a multiple of the hop. `quantize=False` is the plain autoencoder."""
        latent_BTD = self.latent(samples_BN)
        if not quantize:
            return TokenizerOutput(self.synthesize(latent_BTD), latent_BTD, None, latent_BTD.new_zeros(()))
        quantized = self.quantizer(latent_BTD, num_codebooks)
        samples_BN = self.synthesize(quantized.latent_BTD)
        return TokenizerOutput(samples_BN, latent_BTD, quantized.codes_BKT, quantized.commitment)

    def latent(self, samples_BN: Tensor) -> Tensor:
        """`[B, N]` to `[B, T, D]`, T = N / hop."""
        latent: Tensor = self.to_latent(self.encoder(self.mel(samples_BN)))
        return latent

    def synthesize(self, latent_BTD: Tensor) -> Tensor:
        """`[B, T, D]` to `[B, T * hop]`."""
        samples: Tensor = self.head(self.decoder(latent_BTD))
        return samples

    @torch.no_grad()
    def encode(self, samples_CN: Tensor, num_codebooks: int | None = None) -> Tensor:
        """Mono waveform `[1, N]` at `sample_rate` to codes `[K, ceil(N / hop)]`, int64.

        Raises:
            ValueError: not mono, empty, or not finite.
        """
        if samples_CN.ndim != 2 or samples_CN.shape[0] != 1 or samples_CN.shape[1] == 0:
            raise ValueError(f"encode takes a mono waveform [1, samples >= 1], not {list(samples_CN.shape)}")
        if not bool(torch.isfinite(samples_CN).all()):
            raise ValueError("encode got samples that are not finite")
        padded = functional.pad(samples_CN, (0, -samples_CN.shape[1] % self.config.hop_samples))
        self.quantizer.eval()
        codes_KT: Tensor = self.quantizer(self.latent(padded), num_codebooks).codes_BKT[0]
        return codes_KT

    @torch.no_grad()
    def decode(self, codes_KT: Tensor) -> Tensor:
        """Codes `[K', T]` of the first K' codebooks to `[1, T * hop]`; cut it to the sample count you need.

        Raises:
            ValueError: no frame, more codebooks than there are, or codes out of range.
        """
        books = codes_KT.shape[0] if codes_KT.ndim == 2 else 0
        if not 1 <= books <= self.num_codebooks or codes_KT.shape[1] == 0:
            raise ValueError(
                f"decode takes codes [1..{self.num_codebooks}, frames >= 1], not {list(codes_KT.shape)}"
            )
        if int(codes_KT.min()) < 0 or int(codes_KT.max()) >= self.codebook_size:
            raise ValueError(f"codes must be 0..{self.codebook_size - 1}")
        return self.synthesize(self.quantizer.decode(codes_KT[None])).clamp(-1, 1)

    def save_pretrained(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors`."""
        save_model(folder, self, MODEL_TYPE, self.config)

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> AudioTokenizer:
        """Load what `save_pretrained` wrote, or a `train_tokenizer` stage's folder.

        Raises:
            ConfigError: nothing there, or another kind of model.
        """
        config, weights = load_model(Path(folder), MODEL_TYPE, TokenizerConfig)
        model = cls(config)
        model.load_state_dict(weights)
        return model.eval()
