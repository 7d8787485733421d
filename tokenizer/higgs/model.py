"""The `higgs` preset: the published 25 Hz tokenizer, trainable, with the weights of transformers' class.

Structure and key names are those of `transformers.HiggsAudioV2TokenizerModel`; the forward pass is our own.

Shapes: B batch, C channels, N samples, F frames, D latent dimension, K codebooks, V codebook size.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokenizer.higgs.acoustic import AcousticDecoder, AcousticEncoder
from tokenizer.higgs.loading import assign, load_folder, load_hubert, published_config, save_folder
from tokenizer.higgs.quantizer import HiggsQuantizer
from tokenizer.higgs.semantic import (
    TEACHER_PADDING_SAMPLES,
    SemanticDecoder,
    SemanticEncoder,
    build_teacher,
    teacher_features,
    teacher_frames,
)
from tokenizer.native.model import TokenizerOutput
from tokenizer.native.operations import multiply_exactly
from tokenizer.native.pitch import PitchTarget


class HiggsTokenizer(nn.Module):
    """Waveform to codes and back; a `Codec`.

    Args:
        config: a `transformers.HiggsAudioV2TokenizerConfig`; `config.published_config()` for the published one.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        acoustic, semantic, hidden = (
            config.acoustic_model_config,
            config.semantic_model_config,
            config.hidden_size,
        )
        self.acoustic_encoder = AcousticEncoder(
            acoustic.encoder_hidden_size, acoustic.hidden_size, list(acoustic.downsampling_ratios)
        )
        self.acoustic_decoder = AcousticDecoder(
            acoustic.decoder_hidden_size, acoustic.hidden_size, list(acoustic.upsampling_ratios)
        )
        self.encoder_semantic = SemanticEncoder(config)
        self.decoder_semantic = SemanticDecoder(config)
        self.semantic_model = build_teacher(semantic)
        self.fc = nn.Linear(hidden, hidden)
        self.fc1 = nn.Linear(hidden, semantic.hidden_size)
        self.fc2 = nn.Linear(hidden, acoustic.hidden_size)
        self.quantizer = HiggsQuantizer(
            config.num_quantizers, hidden, config.codebook_size, config.codebook_dim
        )

    decoder_reach: ClassVar[int] = 10
    """See `LocalCodec`: how far the convolutions of the published decoder reach, at its upsampling ratios."""

    @property
    def hop_samples(self) -> int:
        return int(self.config.hop_length)

    @property
    def frame_rate(self) -> float:
        return self.sample_rate / self.hop_samples

    @property
    def num_codebooks(self) -> int:
        return int(self.config.num_quantizers)

    @property
    def codebook_size(self) -> int:
        return int(self.config.codebook_size)

    @property
    def sample_rate(self) -> int:
        return int(self.config.sample_rate)

    @property
    def codebook_vectors_KVD(self) -> Tensor:
        levels = self.quantizer.levels()
        return torch.stack([level.project_out(level.codebook.embed) for level in levels]).detach()

    @property
    def codebook_tensors(self) -> list[list[Tensor]]:
        levels = self.quantizer.levels()
        return [[x.codebook.embed, x.project_out.weight, x.project_out.bias] for x in levels]

    def train(self, mode: bool = True) -> HiggsTokenizer:
        """The teacher stays in evaluation mode: its dropouts would make codes random."""
        super().train(mode)
        self.semantic_model.eval()
        return self

    def codebooks_for(self, bandwidth_kbps: float) -> int:
        """The number of codebooks that a bandwidth of `config.target_bandwidths` affords.

        Raises:
            ValueError: another bandwidth.
        """
        if bandwidth_kbps not in self.config.target_bandwidths:
            raise ValueError(
                f"bandwidth {bandwidth_kbps} kbps: choose one of {list(self.config.target_bandwidths)}"
            )
        each_kbps = math.log2(self.codebook_size) * self.config.frame_rate / 1000
        return max(1, math.floor(bandwidth_kbps / each_kbps))

    def forward(
        self,
        samples_BN: Tensor,
        num_codebooks: int | Tensor | None = None,
        quantize: bool = True,
        features_BTH: Tensor | None = None,
        pitch: PitchTarget | None = None,
    ) -> TokenizerOutput:
        """Reconstruct, for training: straight-through gradients, and the losses that need the inside.

        Args:
            samples_BN: waveforms of a frame or more.
            num_codebooks: how many to use, of all or of each item.
            quantize: False is the plain autoencoder.
            features_BTH: not used: the teacher is a part of this tokenizer, and its features are encoded too.
            pitch: not used: the published decoder has no harmonic source.
        """
        self._check_length(samples_BN.shape[1])
        teacher_BFD = self._teacher(samples_BN)
        latent_BFD = self._fuse(samples_BN, teacher_BFD)
        used_BFD, codes_BKF, commitment = latent_BFD, None, latent_BFD.new_zeros(())
        if quantize:
            used_BFD, codes_BKF, commitment = self.quantizer(latent_BFD, num_codebooks)
        predicted_BDF = self.decoder_semantic(self.fc1(used_BFD).transpose(1, 2))
        semantic = functional.mse_loss(predicted_BDF.transpose(1, 2), teacher_BFD)
        decoded_B1N = self.acoustic_decoder(self.fc2(used_BFD).transpose(1, 2))
        return TokenizerOutput(decoded_B1N[:, 0], latent_BFD, codes_BKF, commitment, semantic)

    def latent(self, samples_BN: Tensor) -> Tensor:
        """The latent before quantization, `[B, F, D]`."""
        return self._fuse(samples_BN, self._teacher(samples_BN))

    @torch.no_grad()
    def encode_batch(self, samples_BN: Tensor, num_codebooks: int | None = None) -> Tensor:
        """Waveforms of one length to codes `[B, K, F]`, as transformers makes them.

        On a CPU one after the other: a batch costs more time per clip there (its activations leave the caches).

        Raises:
            ValueError: not `[B, N]`, empty, too short, not finite, or no such number of codebooks.
        """
        self._check(samples_BN, num_codebooks)
        parts = samples_BN.split(1) if samples_BN.device.type == "cpu" else (samples_BN,)
        return torch.cat(
            [self.quantizer.encode(self.latent(samples_1N), num_codebooks) for samples_1N in parts]
        )

    @torch.no_grad()
    def decode_batch(self, codes_BKF: Tensor) -> Tensor:
        """Codes of the first codebooks to waveforms `[B, F * hop]`, as transformers makes them (not clipped).

        Raises:
            ValueError: no frame, more codebooks than there are, or codes out of range.
        """
        books = codes_BKF.shape[1] if codes_BKF.ndim == 3 else 0
        if not 1 <= books <= self.num_codebooks or 0 in codes_BKF.shape:
            raise ValueError(
                f"decode takes codes of 1..{self.num_codebooks} codebooks and 1 frame or more, "
                f"not {list(codes_BKF.shape)}"
            )
        if int(codes_BKF.min()) < 0 or int(codes_BKF.max()) >= self.codebook_size:
            raise ValueError(f"codes must be 0..{self.codebook_size - 1}")
        latent_BFD = self.quantizer.decode(codes_BKF)
        x_BDF = multiply_exactly(latent_BFD, self.fc2.weight, self.fc2.bias).transpose(1, 2)
        if x_BDF.device.type != "cpu":
            return self.acoustic_decoder(x_BDF)[:, 0]
        return torch.cat([self.acoustic_decoder.infer(x_1DF) for x_1DF in x_BDF.split(1)])[:, 0]

    def encode(self, samples_CN: Tensor, num_codebooks: int | None = None) -> Tensor:
        """Mono waveform `[1, N]` at `sample_rate` to codes `[K, F]`; F is N / hop rounded to the nearest.

        Raises:
            ValueError: not mono, empty, too short, not finite, or no such number of codebooks.
        """
        if samples_CN.ndim != 2 or samples_CN.shape[0] != 1:
            raise ValueError(f"encode takes a mono waveform [1, samples >= 1], not {list(samples_CN.shape)}")
        return self.encode_batch(samples_CN, num_codebooks)[0]

    def decode(self, codes_KF: Tensor) -> Tensor:
        """Codes `[K', F]` of the first K' codebooks to `[1, F * hop]`.

        Raises:
            ValueError: no frame, more codebooks than there are, or codes out of range.
        """
        return self.decode_batch(codes_KF.unsqueeze(0))

    def save_pretrained(self, folder: Path | str) -> None:
        """Write what `transformers.HiggsAudioV2TokenizerModel.from_pretrained` loads."""
        save_folder(Path(folder), self.config, self.state_dict())

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> HiggsTokenizer:
        """Load what `save_pretrained`, ours or that of transformers, wrote.

        Raises:
            ConfigError: nothing there, another kind of model, or weights that do not fit it.
        """
        config, weights = load_folder(Path(folder))
        with torch.device("meta"):
            model = cls(config)
        assign(model, weights, str(folder))
        return model.eval()

    def _teacher(self, samples_BN: Tensor) -> Tensor:
        config = self.config
        keep_every = max(int(config.semantic_downsample_factor), 1)
        return teacher_features(
            self.semantic_model, samples_BN, config.sample_rate, config.semantic_sample_rate, keep_every
        )

    def _fuse(self, samples_BN: Tensor, teacher_BFD: Tensor) -> Tensor:
        semantic_BDF = self.encoder_semantic(teacher_BFD.transpose(1, 2))
        samples_B1N, frames = samples_BN.unsqueeze(1), semantic_BDF.shape[2]
        if self.acoustic_encoder.frames_for(samples_BN.shape[1]) != frames:
            pad = self.hop_samples // 2
            samples_B1N = functional.pad(samples_B1N, (pad, pad))
        by_spans = samples_BN.device.type == "cpu" and len(samples_BN) == 1 and not torch.is_grad_enabled()
        encode = self.acoustic_encoder.infer if by_spans else self.acoustic_encoder
        both_BFD = torch.cat([encode(samples_B1N), semantic_BDF], dim=1).transpose(1, 2)
        return multiply_exactly(both_BFD, self.fc.weight, self.fc.bias)

    def _check(self, samples_BN: Tensor, num_codebooks: int | None) -> None:
        if samples_BN.ndim != 2 or 0 in samples_BN.shape:
            raise ValueError(f"encode takes waveforms [batch, samples >= 1], not {list(samples_BN.shape)}")
        if num_codebooks is not None and not 1 <= num_codebooks <= self.num_codebooks:
            raise ValueError(f"num_codebooks {num_codebooks}: this tokenizer has 1..{self.num_codebooks}")
        if not bool(torch.isfinite(samples_BN).all()):
            raise ValueError("encode got samples that are not finite")
        self._check_length(samples_BN.shape[1])

    def _check_length(self, num_samples: int) -> None:
        if self._frames(num_samples) < 1:
            shortest = next(length for length in range(num_samples, 1 << 20) if self._frames(length) > 0)
            raise ValueError(
                f"{num_samples} samples are too few for one frame: give {shortest} or more, or pad with zeros"
            )

    def _frames(self, num_samples: int) -> int:
        """Frames that the teacher makes of so many samples."""
        config = self.config
        resampled = math.ceil(num_samples * config.semantic_sample_rate / config.sample_rate)
        return teacher_frames(config.semantic_model_config, resampled + 2 * TEACHER_PADDING_SAMPLES)


def new_higgs(teacher: Path) -> HiggsTokenizer:
    """An untrained tokenizer of the published shape around the HuBERT in a folder.

    Raises:
        ConfigError: no HuBERT there.
    """
    hubert: Any = load_hubert(teacher)
    model = HiggsTokenizer(published_config(hubert.config))
    model.semantic_model.load_state_dict(hubert.state_dict())
    return model
