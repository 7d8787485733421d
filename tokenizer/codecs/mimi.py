"""Mimi (Kyutai's 12.5 Hz codec) through transformers, behind the `Codec` protocol.

Shapes: C channels, N samples, K codebooks, T frames, V codebook size, D latent dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import MimiConfig, MimiModel

from tokenizer.checks import check_codes, check_mono_samples
from tokenizer.codecs.pretrained import TransformersCodec, gaussian_codebooks

MAX_SAMPLES = 2**24
"""transformers counts frames in float32, which is exact up to here (11.6 minutes at 24 kHz)."""


class MimiCodec(TransformersCodec):
    """Waveform to codes and back with `transformers.MimiModel`; a `Codec`.

    The published model has 32 codebooks, of which Moshi uses `num_codebooks=8`. A clip runs in one piece:
    memory grows with the square of its length (attention), and `MAX_SAMPLES` is the longest.
    """

    model_class, model_type = MimiModel, "mimi"

    def __init__(self, model: MimiModel, num_codebooks: int | None = None) -> None:
        super().__init__(model, num_codebooks, model.config.num_quantizers)
        if self.num_codebooks < model.config.num_semantic_quantizers:
            raise ValueError(
                f"num_codebooks must be at least the {model.config.num_semantic_quantizers} semantic codebooks"
            )

    @property
    def frame_rate(self) -> float:
        return float(self.model.config.frame_rate)

    @property
    def hop_samples(self) -> int:
        return round(self.sample_rate / self.frame_rate)

    @property
    def codebook_vectors_KVD(self) -> Tensor:
        """The code vectors after their half's output projection: their sum over K is the decoder's input."""
        vectors = [
            vectors_VD if project is None else project(vectors_VD.T[None])[0].T
            for vectors_VD, project in self._books()
        ]
        return torch.stack(vectors).detach()

    @property
    def codebook_tensors(self) -> list[list[Tensor]]:
        return [
            [vectors_VD, *([] if project is None else [project.weight])]
            for vectors_VD, project in self._books()
        ]

    def _books(self) -> list[tuple[Tensor, nn.Conv1d | None]]:
        """Each codebook's vectors `[V, D']`, and what projects them."""
        quantizer = self.model.quantizer
        halves = quantizer.semantic_residual_vector_quantizer, quantizer.acoustic_residual_vector_quantizer
        books = [(layer.codebook.embed, half.output_proj) for half in halves for layer in half.layers]
        return books[: self.num_codebooks]

    @torch.no_grad()
    def encode(self, samples_CN: Tensor) -> Tensor:
        """Mono waveform `[1, N]` at `sample_rate` to codes `[K, ceil(N / hop)]`, int64.

        Raises:
            ValueError: not mono, empty, longer than `MAX_SAMPLES`, or not finite.
        """
        check_mono_samples(samples_CN)
        if samples_CN.shape[1] > MAX_SAMPLES:
            raise ValueError(f"Mimi encodes at most {MAX_SAMPLES} samples, not {samples_CN.shape[1]}: cut it")
        codes_KT: Tensor = self.model.encode(samples_CN[None], num_quantizers=self.num_codebooks).audio_codes[
            0
        ]
        return codes_KT

    @torch.no_grad()
    def decode(self, codes_KT: Tensor) -> Tensor:
        """Codes `[K', T]` of the first K' codebooks to `[1, T * hop]`; cut it to the sample count you need.

        Raises:
            ValueError: no frame, more codebooks than there are, or codes out of range.
        """
        check_codes(codes_KT, self.num_codebooks, self.codebook_size)
        samples_CN: Tensor = self.model.decode(codes_KT[None]).audio_values[0]
        return samples_CN.clamp(-1, 1)

    @classmethod
    def from_config(cls, config: MimiConfig, num_codebooks: int | None = None) -> MimiCodec:
        """Random weights in the shape that `config` describes; transformers leaves the code vectors at zero,
        so they are drawn here."""
        codec = cls(MimiModel(config), num_codebooks)
        codec._draw_codebooks()
        return codec

    @torch.no_grad()
    def _draw_codebooks(self) -> None:
        noise_CN = 0.1 * torch.randn(1, 64 * self.hop_samples)
        latent_BDT = self.model.encoder(noise_CN[None]).latents
        quantizer = self.model.quantizer
        for half in (
            quantizer.semantic_residual_vector_quantizer,
            quantizer.acoustic_residual_vector_quantizer,
        ):
            inner_BDT = latent_BDT if half.input_proj is None else half.input_proj(latent_BDT)
            drawn_KVD = gaussian_codebooks(inner_BDT[0].T, len(half.layers), self.codebook_size)
            for layer, vectors_VD in zip(half.layers, drawn_KVD, strict=True):
                layer.codebook.embed_sum.copy_(vectors_VD)  # the usage beside it is one

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MimiCodec:
        """Also forget transformers' cached code vectors, which `to(device)` would leave behind."""
        for module in self.modules():
            if hasattr(module, "_embed"):
                module._embed = None  # type: ignore[assignment]
        super()._apply(fn, recurse)
        return self
