"""Residual vector quantization with EMA codebooks and replacement of dead codes, whole or split in two.

Shapes: B batch, D latent dimension, T frames, S vectors, K codebooks, V codebook size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tokenizer.quantizers.codebooks import (
    Quantized,
    ResidualLevels,
    Search,
    at_least_float32,
    cluster_sums,
    copy_from_rank_0,
    draw_indices,
    kmeans,
    level_counts,
    nearest_codes,
    perplexity,
    place_among_ranks,
    real_frames,
    rows_of_all_ranks,
    sample_of_all_ranks,
    search_codes,
    search_of,
    spread_over_frames,
    sum_over_ranks,
)
from tokenizer.quantizers.finite_scalar import FiniteScalarQuantizer

__all__ = [
    "QUANTIZERS",
    "Quantized",
    "Quantizer",
    "ResidualVectorQuantizer",
    "SplitResidualQuantizer",
    "nearest_codes",
    "perplexity",
]

MIN_USAGE = 1e-5
"""Usage is kept above this, the vector as it was: a code that nothing chooses must not fade to zero."""


class Quantizer(Protocol):
    """The interface of every entry of `QUANTIZERS`, which is also an `nn.Module`.

    Under several ranks, forwards in training mode, `initialize` and `revive` are collective: every rank calls
    them, with generators in the same state, and all end with the codebooks of one rank on the whole batch.
    """

    num_codebooks: int
    codebook_size: int
    latent_dim: int
    """Size of the latent that it takes and gives."""

    def __init__(self, num_codebooks: int, codebook_size: int, dim: int, decay: float = 0.98) -> None: ...

    def __call__(
        self, latent_BTD: Tensor, num_codebooks: int | Tensor | None = None, mask_BT: Tensor | None = None
    ) -> Quantized:
        """Quantize with the first `num_codebooks` levels, of all items or `[B]` of each.

        An item's further levels add nothing to the latent, the statistics or the commitment; given for each
        item, codes have all levels all the same. Frames where `mask_BT` is false are quantized, and count
        neither in the statistics nor in the commitment.

        Raises:
            ValueError: a count out of range, or a mask of another shape.
        """

    @property
    def vectors_KVD(self) -> Tensor:
        """The vector of every code."""

    @property
    def codebook_tensors(self) -> list[list[Tensor]]:
        """The stored tensors from which each codebook's vectors follow, exact on any machine."""

    def encode(self, pieces_BTD: Sequence[Tensor], num_codebooks: int | None = None) -> list[Tensor]:
        """Codes `[B, K, T]` of latents, every piece with arithmetic of its own shape; nothing is updated."""

    def decode(self, codes_BKT: Tensor) -> Tensor:
        """Codes of the first K' levels to the latent `[B, T, D]`."""

    def initialize(self, latent_SD: Tensor, generator: torch.Generator) -> None:
        """Start from real latents.

        Raises:
            ValueError: there are none.
        """

    def refit(self, latent_SD: Tensor, generator: torch.Generator) -> None:
        """Fit the codebooks, from where they are, to the latents of an encoder that no longer changes."""

    def revive(
        self,
        latent_BTD: Tensor,
        generator: torch.Generator,
        threshold: float = 0.05,
        mask_BT: Tensor | None = None,
    ) -> int:
        """Bring codes used less than `threshold` times the mean back into use; returns how many."""

    def alive_K(self, threshold: float = 0.05) -> Tensor:
        """Share of each codebook used at least `threshold` times the mean, by the EMA of use."""

    def ema_perplexity_K(self) -> Tensor:
        """Perplexity of each codebook by the EMA of use: 1 is collapsed, V is even use."""


class ResidualVectorQuantizer(ResidualLevels):
    """K codebooks of V vectors, each quantizing what the ones before left over; a `Quantizer`.

    The EMA state (`embed_sum`, `usage`) is what is learned; the vectors are their ratio, so a revived code
    is written where the next update reads it (in the EnCodec lineage revival writes the ratio only, and the
    same step overwrites it).
    """

    def __init__(self, num_codebooks: int, codebook_size: int, dim: int, decay: float = 0.98) -> None:
        super().__init__()
        self.num_codebooks, self.codebook_size, self.latent_dim = num_codebooks, codebook_size, dim
        self.decay = decay
        self.register_buffer("embed_sum_KVD", torch.randn(num_codebooks, codebook_size, dim))
        self.register_buffer("usage_KV", torch.ones(num_codebooks, codebook_size))
        self.embed_sum_KVD: Tensor
        self._prepared: tuple[list[tuple[Tensor, int]], list[Search]] | None = None

    @property
    def vectors_KVD(self) -> Tensor:
        return self.embed_sum_KVD / self.usage_KV.clamp_min(MIN_USAGE).unsqueeze(-1)

    @property
    def codebook_tensors(self) -> list[list[Tensor]]:
        return [[vectors_VD] for vectors_VD in self.vectors_KVD]

    def forward(
        self, latent_BTD: Tensor, num_codebooks: int | Tensor | None = None, mask_BT: Tensor | None = None
    ) -> Quantized:
        """See `Quantizer`; in training mode the statistics are updated, all levels with one all-reduce."""
        batch, frames, dim = latent_BTD.shape
        counts_B, levels = level_counts(num_codebooks, batch, self.num_codebooks)
        counts_S, real_S = spread_over_frames(counts_B, mask_BT, latent_BTD)
        latent_SD = at_least_float32(latent_BTD).reshape(-1, dim)
        vectors_KVD = self.vectors_KVD.to(latent_SD.dtype)
        chosen_KV = latent_SD.new_zeros(self.usage_KV.shape)
        sums_KVD = latent_SD.new_zeros(self.embed_sum_KVD.shape if self.training else 0)
        residual_SD, total_SD = latent_SD, torch.zeros_like(latent_SD)
        distance, pairs, codes = latent_SD.new_zeros(()), latent_SD.new_zeros(()), []
        for level in range(levels):
            codes_S = nearest_codes(residual_SD.detach(), vectors_KVD[level])
            code_SD = vectors_KVD[level][codes_S]
            used_S = level < counts_S
            counted_S = used_S & real_S
            distance = distance + ((residual_SD - code_SD).square().mean(dim=1) * counted_S).sum()
            pairs = pairs + counted_S.sum()
            if self.training:
                chosen_KV[level], sums_KVD[level] = cluster_sums(
                    residual_SD.detach(), codes_S, self.codebook_size, counted_S
                )
            total_SD = total_SD + code_SD * used_S[:, None]
            residual_SD = residual_SD - code_SD
            codes.append(codes_S.reshape(batch, frames))
        if self.training:
            self._update(chosen_KV, sums_KVD)
            pairs = sum_over_ranks(pairs)
        # no levels, no gradient: what the decoder got does not depend on that latent
        passed_SD = (latent_SD - latent_SD.detach()) * (counts_S > 0)[:, None]
        quantized_BTD = (total_SD + passed_SD).reshape(batch, frames, dim)
        return Quantized(quantized_BTD, torch.stack(codes, dim=1), distance / pairs.clamp_min(1))

    @torch.no_grad()
    def encode(self, pieces_BTD: Sequence[Tensor], num_codebooks: int | None = None) -> list[Tensor]:
        """See `Quantizer`; the codebooks are prepared once, and again when they have changed."""
        searches = self._searches()[:num_codebooks]
        return [self._codes(piece_BTD, searches) for piece_BTD in pieces_BTD]

    def __getstate__(self) -> dict[str, Any]:
        # a copy counts the writes to its tensors anew
        return {**self.__dict__, "_prepared": None}

    def _searches(self) -> list[Search]:
        """The codebooks prepared for searching; prepared anew where sums or use were written since the last call."""
        state = self.embed_sum_KVD, self.usage_KV
        if any(tensor.is_inference() for tensor in state):  # such tensors do not count their writes
            return [search_of(vectors_VD) for vectors_VD in self.vectors_KVD]
        prepared = self._prepared
        if prepared is None or any(
            tensor is not before or tensor._version != version
            for tensor, (before, version) in zip(state, prepared[0], strict=True)
        ):
            versions = [(tensor, tensor._version) for tensor in state]
            prepared = self._prepared = versions, [search_of(vectors_VD) for vectors_VD in self.vectors_KVD]
        return prepared[1]

    def _codes(self, latent_BTD: Tensor, searches: Sequence[Search]) -> Tensor:
        residual_SD = at_least_float32(latent_BTD).flatten(0, 1)
        codes = []
        for search in searches:
            codes_S = search_codes(residual_SD, search)
            residual_SD = residual_SD - search.vectors_VD[codes_S]
            codes.append(codes_S.unflatten(0, latent_BTD.shape[:2]))
        return torch.stack(codes, dim=1)

    @torch.no_grad()
    def initialize(self, latent_SD: Tensor, generator: torch.Generator, iterations: int = 12) -> None:
        """k-means on a sample of the latents, level by level on what the levels before leave over."""
        self._fit(latent_SD, generator, iterations, [None] * self.num_codebooks)

    @torch.no_grad()
    def refit(self, latent_SD: Tensor, generator: torch.Generator, iterations: int = 3) -> None:
        """A few steps of k-means from the codebooks as they are; codes that nothing is near to begin anew."""
        self._fit(latent_SD, generator, iterations, list(self.vectors_KVD.clone()))

    def _fit(
        self,
        latent_SD: Tensor,
        generator: torch.Generator,
        iterations: int,
        starts_VD: Sequence[Tensor | None],
    ) -> None:
        residual_SD = sample_of_all_ranks(latent_SD, self.codebook_size, generator)
        for level, start_VD in enumerate(starts_VD):
            vectors_VD, counts_V = kmeans(
                residual_SD,
                self.codebook_size,
                generator,
                iterations,
                None if start_VD is None else start_VD.to(residual_SD),
            )
            # sums and usage together, or the first update would pull every vector towards zero
            self.usage_KV[level] = (counts_V / counts_V.mean()).clamp_min(MIN_USAGE)
            self.embed_sum_KVD[level] = vectors_VD * self.usage_KV[level].unsqueeze(-1)
            residual_SD = residual_SD - vectors_VD[nearest_codes(residual_SD, vectors_VD)]
        copy_from_rank_0([self.usage_KV, self.embed_sum_KVD])

    @torch.no_grad()
    def revive(
        self,
        latent_BTD: Tensor,
        generator: torch.Generator,
        threshold: float = 0.05,
        mask_BT: Tensor | None = None,
    ) -> int:
        """Move codes used less than `threshold` times the mean onto residuals of this batch; returns how many."""
        residual_SD = at_least_float32(real_frames(latent_BTD, mask_BT))
        start, total = place_among_ranks(residual_SD)
        if total == 0:
            return 0
        revived = 0
        for level in range(self.num_codebooks):
            usage_V = self.usage_KV[level]
            dead_P = (usage_V < threshold * usage_V.mean()).nonzero()[:, 0]
            if len(dead_P):
                rows_PD = rows_of_all_ranks(residual_SD, draw_indices(total, len(dead_P), generator), start)
                new_usage = usage_V.mean()
                self.embed_sum_KVD[level, dead_P] = (rows_PD * new_usage).to(self.embed_sum_KVD.dtype)
                self.usage_KV[level, dead_P] = new_usage
            vectors_VD = self.vectors_KVD[level].to(residual_SD.dtype)
            residual_SD = residual_SD - vectors_VD[nearest_codes(residual_SD, vectors_VD)]
            revived += len(dead_P)
        return revived

    @torch.no_grad()
    def _update(self, chosen_KV: Tensor, sums_KVD: Tensor) -> None:
        """EMA of the statistics of all ranks; a level that no frame used stays as it is.

        Always all levels: ranks that drew different numbers of codebooks must reduce the same shape.
        """
        packed = sum_over_ranks(torch.cat([chosen_KV.unsqueeze(-1), sums_KVD], dim=-1)).to(
            self.usage_KV.dtype
        )
        chosen_KV, sums_KVD = packed[..., 0], packed[..., 1:]
        weight_K11 = (1 - self.decay) * (chosen_KV.sum(dim=1) > 0).to(packed.dtype)[:, None, None]
        self.usage_KV.lerp_(chosen_KV, weight_K11[..., 0])
        self.embed_sum_KVD.lerp_(sums_KVD, weight_K11)
        floor_KV = self.usage_KV.clamp_min(MIN_USAGE)
        self.embed_sum_KVD.mul_((floor_KV / self.usage_KV.clamp_min(1e-30)).unsqueeze(-1))
        self.usage_KV.copy_(floor_KV)


class SplitResidualQuantizer(nn.Module):
    """One codebook for the first half of the latent (semantic), K - 1 residual ones for the other (acoustic).

    A `Quantizer` whose latent is `[B, T, 2 * dim]`; code vectors are `[K, V, dim]`, each of its own half.
    """

    def __init__(self, num_codebooks: int, codebook_size: int, dim: int, decay: float = 0.98) -> None:
        super().__init__()
        if num_codebooks < 2:
            raise ValueError(f"split_rvq needs at least 2 codebooks, not {num_codebooks}: use rvq for one")
        self.num_codebooks, self.codebook_size, self.latent_dim = num_codebooks, codebook_size, 2 * dim
        self.dim = dim
        self.semantic = ResidualVectorQuantizer(1, codebook_size, dim, decay)
        self.acoustic = ResidualVectorQuantizer(num_codebooks - 1, codebook_size, dim, decay)

    @property
    def vectors_KVD(self) -> Tensor:
        return torch.cat([self.semantic.vectors_KVD, self.acoustic.vectors_KVD])

    @property
    def codebook_tensors(self) -> list[list[Tensor]]:
        return self.semantic.codebook_tensors + self.acoustic.codebook_tensors

    def forward(
        self, latent_BTD: Tensor, num_codebooks: int | Tensor | None = None, mask_BT: Tensor | None = None
    ) -> Quantized:
        """See `Quantizer`; without acoustic levels the second half of the quantized latent is zero."""
        semantic_BTD, acoustic_BTD = latent_BTD.split(self.dim, dim=-1)
        counts_B, levels = level_counts(num_codebooks, len(latent_BTD), self.num_codebooks)
        counts_S, real_S = spread_over_frames(counts_B, mask_BT, latent_BTD)
        semantic = self.semantic(semantic_BTD, counts_B.clamp(max=1), mask_BT)
        acoustic = self.acoustic(acoustic_BTD, (counts_B - 1).clamp(min=0), mask_BT)
        semantic_pairs, pairs = (real_S & (counts_S > 0)).sum(), (counts_S * real_S).sum()
        if self.training:  # as in each half, whose commitment is a part of the mean over all ranks
            semantic_pairs, pairs = sum_over_ranks(torch.stack([semantic_pairs, pairs])).unbind()
        distance = semantic.commitment * semantic_pairs + acoustic.commitment * (pairs - semantic_pairs)
        return Quantized(
            torch.cat([semantic.latent_BTD, acoustic.latent_BTD], dim=-1),
            torch.cat([semantic.codes_BKT, acoustic.codes_BKT], dim=1)[:, :levels],
            distance / pairs.clamp_min(1),
        )

    def encode(self, pieces_BTD: Sequence[Tensor], num_codebooks: int | None = None) -> list[Tensor]:
        """See `Quantizer`."""
        books = num_codebooks or self.num_codebooks
        codes = self.semantic.encode([piece[..., : self.dim] for piece in pieces_BTD])
        if books == 1:
            return codes
        acoustic = self.acoustic.encode([piece[..., self.dim :] for piece in pieces_BTD], books - 1)
        return [torch.cat(both, dim=1) for both in zip(codes, acoustic, strict=True)]

    def decode(self, codes_BKT: Tensor) -> Tensor:
        """Codes of the first K' levels to the latent `[B, T, 2 * dim]`."""
        semantic_BTD = self.semantic.decode(codes_BKT[:, :1])
        if codes_BKT.shape[1] == 1:
            return torch.cat([semantic_BTD, torch.zeros_like(semantic_BTD)], dim=-1)
        return torch.cat([semantic_BTD, self.acoustic.decode(codes_BKT[:, 1:])], dim=-1)

    def initialize(self, latent_SD: Tensor, generator: torch.Generator, iterations: int = 12) -> None:
        """k-means on a sample of each half."""
        self.semantic.initialize(latent_SD[:, : self.dim], generator, iterations)
        self.acoustic.initialize(latent_SD[:, self.dim :], generator, iterations)

    def refit(self, latent_SD: Tensor, generator: torch.Generator) -> None:
        """A few steps of k-means from the codebooks as they are, of each half."""
        self.semantic.refit(latent_SD[:, : self.dim], generator)
        self.acoustic.refit(latent_SD[:, self.dim :], generator)

    def revive(
        self,
        latent_BTD: Tensor,
        generator: torch.Generator,
        threshold: float = 0.05,
        mask_BT: Tensor | None = None,
    ) -> int:
        """Move codes used less than `threshold` times the mean onto residuals of this batch; returns how many."""
        revived = self.semantic.revive(latent_BTD[..., : self.dim], generator, threshold, mask_BT)
        return revived + self.acoustic.revive(latent_BTD[..., self.dim :], generator, threshold, mask_BT)

    def alive_K(self, threshold: float = 0.05) -> Tensor:
        """Share of each codebook used at least `threshold` times the mean, by the EMA of use."""
        return torch.cat([self.semantic.alive_K(threshold), self.acoustic.alive_K(threshold)])

    def ema_perplexity_K(self) -> Tensor:
        """Perplexity of each codebook by the EMA of use: 1 is collapsed, V is even use."""
        return torch.cat([self.semantic.ema_perplexity_K(), self.acoustic.ema_perplexity_K()])


QUANTIZERS: dict[str, type[Quantizer]] = {
    "rvq": ResidualVectorQuantizer,
    "split_rvq": SplitResidualQuantizer,
    "fsq": FiniteScalarQuantizer,
}
