"""DAC (Descript Audio Codec) through transformers, behind the `Codec` protocol.

Shapes: C channels, N samples, K codebooks, T frames, V codebook size, D latent dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DacConfig, DacModel

from tokenizer.checks import check_codes, check_mono_samples
from tokenizer.codecs.pretrained import TransformersCodec


class DacCodec(TransformersCodec):
    """Waveform to codes and back with `transformers.DacModel`; a `Codec`.

    transformers drops the last partial frame, raises on clips shorter than a frame and decodes some samples
    too few; here the end is filled with zeros, so that N samples make ceil(N / hop) frames, and T frames
    T * hop samples. A clip runs in one piece: memory grows with its length.
    """

    model_class, model_type = DacModel, "dac"

    def __init__(self, model: DacModel, num_codebooks: int | None = None) -> None:
        super().__init__(model, num_codebooks, model.config.n_codebooks)

    @property
    def frame_rate(self) -> float:
        return self.sample_rate / self.hop_samples

    @property
    def hop_samples(self) -> int:
        return int(self.model.config.hop_length)

    @property
    def codebook_vectors_KVD(self) -> Tensor:
        """The code vectors after each codebook's output projection: their sum over K is the decoder's input."""
        books = self.model.quantizer.quantizers[: self.num_codebooks]
        vectors = [book.out_proj(book.codebook.weight.T[None])[0].T for book in books]
        return torch.stack(vectors).detach()

    @property
    def codebook_tensors(self) -> list[list[Tensor]]:
        books = self.model.quantizer.quantizers[: self.num_codebooks]
        return [[book.codebook.weight, book.out_proj.weight, book.out_proj.bias] for book in books]

    @torch.no_grad()
    def encode(self, samples_CN: Tensor) -> Tensor:
        """Mono waveform `[1, N]` at `sample_rate` to codes `[K, ceil(N / hop)]`, int64.

        Raises:
            ValueError: not mono, empty, or not finite.
        """
        check_mono_samples(samples_CN)
        padded = functional.pad(samples_CN, (0, -samples_CN.shape[1] % self.hop_samples))
        codes_KT: Tensor = self.model.encode(padded[None], n_quantizers=self.num_codebooks).audio_codes[0]
        return codes_KT

    @torch.no_grad()
    def decode(self, codes_KT: Tensor) -> Tensor:
        """Codes `[K', T]` of the first K' codebooks to `[1, T * hop]`; cut it to the sample count you need.

        Raises:
            ValueError: no frame, more codebooks than there are, or codes out of range.
        """
        check_codes(codes_KT, self.num_codebooks, self.codebook_size)
        samples_CN: Tensor = self.model.decode(audio_codes=codes_KT[None]).audio_values
        # a negative pad cuts
        return functional.pad(samples_CN, (0, codes_KT.shape[1] * self.hop_samples - samples_CN.shape[1]))

    @classmethod
    def from_config(cls, config: DacConfig, num_codebooks: int | None = None) -> DacCodec:
        """Random weights (transformers' own draw) in the shape that `config` describes."""
        return cls(DacModel(config), num_codebooks)
