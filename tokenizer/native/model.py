"""The 25 Hz tokenizer `native`: waveform -> latent -> residual vector quantization -> waveform.

Shapes: B batch, N samples, T frames at 25 Hz, K codebooks, D latent dimension, H teacher's feature dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.models.pretrained import load_model, report_model_errors, save_model
from tokenizer.checks import check_codes, check_mono_samples
from tokenizer.native.autoencoder import AutoencoderShape, Decoder, Encoder
from tokenizer.native.layers import ConvNeXtBlock
from tokenizer.native.pitch import VOICE_HZ, PitchTarget
from tokenizer.native.streaming import StreamingDecoder, StreamingEncoder
from tokenizer.quantizers.codebooks import at_least_float32
from tokenizer.quantizers.residual import QUANTIZERS
from tokenizer.rates import CODEBOOK_SIZE, HOP_SAMPLES, NUM_CODEBOOKS, SAMPLE_RATE


def semantic_loss(predicted_BTH: Tensor, features_BTH: Tensor) -> Tensor:
    """Mean squared error on standardised features (as in X-Codec and Higgs), plus one minus their cosine."""
    predicted = at_least_float32(predicted_BTH)
    cosine = functional.cosine_similarity(predicted, features_BTH, dim=2, eps=1e-4).mean()
    return functional.mse_loss(predicted, features_BTH) + (1 - cosine)


MODEL_TYPE = "audiollm_tokenizer"
DECODE_FRAMES = 128
"""Frames that are decoded at a time, so that memory does not grow with length."""


@dataclass(frozen=True)
class TokenizerConfig:
    """The shape of a tokenizer. The defaults of rate, codebooks and size are the published 2 kbps."""

    sample_rate: int = SAMPLE_RATE
    mel_hop_samples: int = HOP_SAMPLES // 4
    stride: int = 4
    n_fft: int = HOP_SAMPLES
    num_mels: int = 100
    num_codebooks: int = NUM_CODEBOOKS
    codebook_size: int = CODEBOOK_SIZE
    latent_dim: int = 64
    """Dimension of a code vector. With `split_rvq` the latent is twice as wide: semantic, then acoustic."""
    quantizer: str = "rvq"
    """`rvq`, `split_rvq` (the first codebook is the semantic one, beside the others) or `fsq`."""
    mel_hidden_size: int = 192
    hidden_size: int = 384
    encoder_layers: tuple[int, int] = (3, 4)
    """Blocks at the mel rate, blocks at the frame rate."""
    decoder_layers: tuple[int, int] = (4, 3)
    """Blocks at the frame rate, blocks at the mel rate."""
    semantic_dim: int = 0
    """Dimension of the teacher's features that the codes are trained to predict; 0 without a teacher."""
    step_frames: int = 8
    """Frames that the encoder computes at a time, always. Part of what the codes are: see `streaming.py`."""
    harmonic_source: bool = False
    """The decoder has a harmonic source, whose pitch the codes carry; False in tokenizers made before it."""
    linear_path: bool = False
    """A linear map beside the encoder's blocks, and one beside the decoder's; False in tokenizers made before them."""

    @property
    def hop_samples(self) -> int:
        return self.mel_hop_samples * self.stride

    @property
    def shape(self) -> AutoencoderShape:
        """The shape of the encoder and the decoder."""
        return AutoencoderShape(
            sample_rate=self.sample_rate,
            channels=1,
            mel_hop_samples=self.mel_hop_samples,
            stride=self.stride,
            n_fft=self.n_fft,
            num_mels=self.num_mels,
            mel_hidden_size=self.mel_hidden_size,
            hidden_size=self.hidden_size,
            encoder_layers=self.encoder_layers,
            decoder_layers=self.decoder_layers,
            highest_pitch_hz=VOICE_HZ if self.harmonic_source else 0.0,
            linear_path=self.linear_path,
        )


class TokenizerOutput(NamedTuple):
    """The result of a training forward pass."""

    samples_BN: Tensor
    latent_BTD: Tensor
    """Before the quantizer."""
    codes_BKT: Tensor | None
    commitment: Tensor
    semantic: Tensor | None
    """Loss of predicting the teacher's features from the codes; None without a teacher."""
    pitch: Tensor | None = None
    """Loss of predicting pitch and voicing from the codes; None where they were not given."""


class SemanticHead(nn.Module):
    """Predicts the teacher's features from the quantized latent; used in training only."""

    def __init__(self, latent_dim: int, hidden_size: int, semantic_dim: int, layers: int = 2) -> None:
        super().__init__()
        self.input = nn.Linear(latent_dim, hidden_size)
        self.blocks = nn.ModuleList(ConvNeXtBlock(hidden_size) for _ in range(layers))
        self.output = nn.Sequential(nn.LayerNorm(hidden_size), nn.Linear(hidden_size, semantic_dim))

    def forward(self, latent_BTD: Tensor) -> Tensor:
        x_BTC = self.input(latent_BTD)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        predicted: Tensor = self.output(x_BTC)
        return predicted


class AudioTokenizer(nn.Module):
    """Waveform to codes and back; a `Codec`."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        self.config = config
        self.quantizer = QUANTIZERS[config.quantizer](
            config.num_codebooks, config.codebook_size, config.latent_dim
        )
        self.encoder = Encoder(config.shape, self.quantizer.latent_dim)
        self.decoder = Decoder(config.shape, self.quantizer.latent_dim)
        self.semantic_head: SemanticHead | None = None
        if config.semantic_dim:
            semantic_latent_dim = config.latent_dim  # of a split latent the semantic half alone
            self.semantic_head = SemanticHead(semantic_latent_dim, config.hidden_size, config.semantic_dim)

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
    def hop_samples(self) -> int:
        return self.config.hop_samples

    @property
    def codebook_vectors_KVD(self) -> Tensor:
        return self.quantizer.vectors_KVD.detach()

    @property
    def codebook_tensors(self) -> list[list[Tensor]]:
        """The stored tensors of each codebook."""
        return self.quantizer.codebook_tensors

    def forward(
        self,
        samples_BN: Tensor,
        num_codebooks: int | Tensor | None = None,
        quantize: bool = True,
        features_BTH: Tensor | None = None,
        pitch: PitchTarget | None = None,
    ) -> TokenizerOutput:
        """Reconstruct, for training.

        Args:
            samples_BN: N must be a multiple of the hop.
            num_codebooks: how many to use, of all or of each item.
            quantize: False is the plain autoencoder.
            features_BTH: the teacher's, where there is one.
            pitch: the pitch at the mel rate, which the source follows; for a model with a harmonic source.
        """
        latent_BTD = self.latent(samples_BN)
        if quantize:
            used_BTD, codes_BKT, commitment = self.quantizer(latent_BTD, num_codebooks)
        else:
            used_BTD, codes_BKT, commitment = latent_BTD, None, latent_BTD.new_zeros(())
        semantic = None
        if self.semantic_head is not None and features_BTH is not None:
            predicted_BTH = self.semantic_head(used_BTD[..., : self.config.latent_dim])
            semantic = semantic_loss(predicted_BTH, features_BTH)
        if pitch is None:
            return TokenizerOutput(self.synthesize(used_BTD), latent_BTD, codes_BKT, commitment, semantic)
        samples_BCN, pitch_loss = self.decoder.with_pitch(used_BTD, pitch, samples_BN[:, None])
        return TokenizerOutput(samples_BCN[:, 0], latent_BTD, codes_BKT, commitment, semantic, pitch_loss)

    def latent(self, samples_BN: Tensor) -> Tensor:
        """`[B, N]` to `[B, T, D]`, T = N / hop, the whole at once (training)."""
        latent: Tensor = self.encoder(samples_BN[:, None])
        return latent

    def synthesize(self, latent_BTD: Tensor) -> Tensor:
        """`[B, T, D]` to `[B, T * hop]`, the whole at once (training)."""
        samples_BCN: Tensor = self.decoder(latent_BTD)
        return samples_BCN[:, 0]

    def encode(self, samples_CN: Tensor, num_codebooks: int | None = None) -> Tensor:
        """Mono waveform `[1, N]` at `sample_rate` to codes `[K, ceil(N / hop)]`, int64; N may be hours long.

        Raises:
            ValueError: not mono, empty, or not finite.
        """
        check_mono_samples(samples_CN)
        return torch.cat(list(self.encode_stream([samples_CN], num_codebooks)), dim=1)

    def encode_stream(
        self, pieces_CN: Iterable[Tensor], num_codebooks: int | None = None
    ) -> Iterator[Tensor]:
        """Codes of a waveform that comes in pieces `[1, n]`, at constant memory; the same codes as `encode`."""
        encoder = StreamingEncoder(self, num_codebooks)
        for piece_CN in pieces_CN:
            yield encoder.push(piece_CN)
        yield encoder.flush()

    def encode_batch(
        self, samples_BN: Tensor, lengths_B: Tensor | None = None, num_codebooks: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Clips of unequal length, padded with anything: codes `[B, K, T]` and a mask `[B, T]` of real frames.

        The codes are those of each clip alone, which is how they are made: on a CPU a batch costs more per clip
        than single clips do.
        """
        if lengths_B is None:
            lengths_B = torch.full((len(samples_BN),), samples_BN.shape[1])
        lengths = lengths_B.tolist()
        if max(lengths) > samples_BN.shape[1]:
            raise ValueError(f"lengths up to {max(lengths)}, but clips of {samples_BN.shape[1]} samples")
        codes = [
            self.encode(row_N[None, :length], num_codebooks)
            for row_N, length in zip(samples_BN, lengths, strict=True)
        ]
        frames_B = torch.tensor([codes_KT.shape[1] for codes_KT in codes], device=samples_BN.device)
        max_frames = int(frames_B.max())
        codes_BKT = torch.stack([functional.pad(c, (0, max_frames - c.shape[1])) for c in codes])
        return codes_BKT, torch.arange(max_frames, device=samples_BN.device) < frames_B[:, None]

    def decode(self, codes_KT: Tensor, num_samples: int | None = None) -> Tensor:
        """Codes `[K', T]` of the first K' codebooks to `[1, T * hop]`, cut to `num_samples` where given.

        Raises:
            ValueError: no frame, more codebooks than there are, or codes out of range.
        """
        check_codes(codes_KT, self.num_codebooks, self.codebook_size)
        samples_CN = torch.cat(list(self.decode_stream([codes_KT])), dim=1)
        return samples_CN if num_samples is None else samples_CN[:, :num_samples]

    def decode_stream(self, pieces_KT: Iterable[Tensor]) -> Iterator[Tensor]:
        """Waveform pieces `[1, n]` of codes that come in pieces `[K', t]`, at constant memory."""
        decoder = StreamingDecoder(self)
        for piece_KT in pieces_KT:
            for part_KT in piece_KT.split(DECODE_FRAMES, dim=1):
                yield decoder.push(part_KT)
        yield decoder.flush()

    def code_stream(self) -> StreamingDecoder:
        """Decodes codes that come in pieces of any size; what it gives out is together what `decode` gives."""
        return StreamingDecoder(self)

    def sample_stream(self) -> StreamingEncoder:
        """Encodes samples that come in pieces of any size; what it gives out is together what `encode` gives."""
        return StreamingEncoder(self)

    def decode_batch(self, codes_BKT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `encode_batch`: waveforms `[B, N]`, zero beyond the end, and their lengths `[B]`."""
        audio = [self.decode(codes[:, mask])[0] for codes, mask in zip(codes_BKT, mask_BT, strict=True)]
        lengths_B = torch.tensor([len(samples_N) for samples_N in audio], device=codes_BKT.device)
        return nn.utils.rnn.pad_sequence(audio, batch_first=True), lengths_B

    def save_pretrained(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors`."""
        save_model(folder, self, MODEL_TYPE, self.config)

    @classmethod
    def from_pretrained(cls, folder: Path | str, num_codebooks: int | None = None) -> AudioTokenizer:
        """Load what `save_pretrained` wrote, or a `train_tokenizer` stage's folder; use its first `num_codebooks`.

        Raises:
            ConfigError: nothing there, or another kind of model.
            ValueError: more codebooks than there are, or none.
        """
        config, weights = load_model(Path(folder), MODEL_TYPE, TokenizerConfig)
        if num_codebooks is not None and not 1 <= num_codebooks <= config.num_codebooks:
            raise ValueError(f"num_codebooks must be 1..{config.num_codebooks}, not {num_codebooks}")
        with report_model_errors(Path(folder)):
            model = cls(replace(config, num_codebooks=num_codebooks or config.num_codebooks))
            model.load_state_dict(_of_first_codebooks(weights, model) if num_codebooks else weights)
        return model.eval()


def _of_first_codebooks(weights: Mapping[str, Tensor], model: AudioTokenizer) -> dict[str, Tensor]:
    """The weights without those of codebooks that the model does not have."""
    model_weights = model.state_dict()
    return {
        name: tensor[: len(model_weights[name])] if tensor.ndim and name.startswith("quantizer.") else tensor
        for name, tensor in weights.items()
        if name in model_weights
    }
