"""Residual vector quantization with a projection in and out of every codebook, under transformers' key names.

Shapes: B batch, F frames, S vectors, D latent dimension, E codebook dimension, K codebooks, V codebook size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokenizer.quantizers.codebooks import (
    Quantized,
    alive_share,
    all_rows,
    copy_from_rank_0,
    kmeans,
    level_counts,
    sum_over_ranks,
    usage_perplexity,
)

EMA_DECAY = 0.99
CLUSTER_SIZE_SMOOTHING = 1e-5


class Codebook(nn.Module):
    """Code vectors that follow the exponential mean of what is assigned to them."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        vectors_VE = torch.randn(size, dim)
        self.register_buffer("inited", torch.zeros(1))
        self.register_buffer("cluster_size", torch.ones(size))
        self.register_buffer("embed", vectors_VE)
        self.register_buffer("embed_avg", vectors_VE.clone())
        self.inited: Tensor
        self.cluster_size: Tensor
        self.embed: Tensor
        self.embed_avg: Tensor

    def nearest(self, x_SE: Tensor) -> Tensor:
        """The nearest vector's index, int64 `[S]`; ties and rounding as in transformers."""
        with torch.autocast(x_SE.device.type, enabled=False):
            x_SE, embed_EV = x_SE.float(), self.embed.t()
            squared_S1 = x_SE.pow(2).sum(1, keepdim=True)
            distance_SV = squared_S1 - 2 * x_SE @ embed_EV + embed_EV.pow(2).sum(0, keepdim=True)
            return distance_SV.argmin(dim=1)

    @torch.no_grad()
    def follow(self, x_SE: Tensor, codes_S: Tensor) -> None:
        """One step of the exponential mean, over all ranks."""
        counts_V, sums_VE = totals(x_SE, codes_S, len(self.embed))
        sum_over_ranks(counts_V)
        sum_over_ranks(sums_VE)
        self.cluster_size.lerp_(counts_V, 1 - EMA_DECAY)
        self.embed_avg.lerp_(sums_VE, 1 - EMA_DECAY)
        total = self.cluster_size.sum()
        smooth_V = (
            (self.cluster_size + CLUSTER_SIZE_SMOOTHING)
            / (total + len(counts_V) * CLUSTER_SIZE_SMOOTHING)
            * total
        )
        self.embed.copy_(self.embed_avg / smooth_V[:, None])

    @torch.no_grad()
    def place(self, rows: Tensor, vectors_VE: Tensor, usage: float | Tensor = 1.0) -> None:
        """Put vectors at `rows`, in the exponential mean too, so that the next step does not undo it."""
        self.embed[rows] = vectors_VE
        self.embed_avg[rows] = vectors_VE * usage
        self.cluster_size[rows] = usage


class Level(nn.Module):
    """One codebook and its projections."""

    def __init__(self, hidden_size: int, codebook_size: int, codebook_dim: int) -> None:
        super().__init__()
        self.codebook = Codebook(codebook_size, codebook_dim)
        self.project_in = nn.Linear(hidden_size, codebook_dim)
        self.project_out = nn.Linear(codebook_dim, hidden_size)

    def decode(self, codes: Tensor) -> Tensor:
        """Codes of any shape to the latent `[..., D]`."""
        vectors: Tensor = self.project_out(functional.embedding(codes, self.codebook.embed))
        return vectors


class HiggsQuantizer(nn.Module):
    """K levels, each quantizing what the ones before left over."""

    def __init__(self, num_codebooks: int, hidden_size: int, codebook_size: int, codebook_dim: int) -> None:
        super().__init__()
        self.quantizers = nn.ModuleList(
            Level(hidden_size, codebook_size, codebook_dim) for _ in range(num_codebooks)
        )

    def levels(self, num_codebooks: int | None = None) -> list[Level]:
        """The first `num_codebooks` levels, or all of them."""
        return [level for level in self.quantizers if isinstance(level, Level)][:num_codebooks]

    @torch.no_grad()
    def encode(self, latent_BFD: Tensor, num_codebooks: int | None = None) -> Tensor:
        """The codes `[B, K, F]`."""
        residual_BFD, codes = latent_BFD, []
        for level in self.levels(num_codebooks):
            codes_BF = level.codebook.nearest(level.project_in(residual_BFD).flatten(0, 1))
            codes.append(codes_BF.view(latent_BFD.shape[:2]))
            residual_BFD = residual_BFD - level.decode(codes[-1])
        return torch.stack(codes, dim=1)

    def decode(self, codes_BKF: Tensor) -> Tensor:
        """Codes of the first levels to the latent `[B, F, D]`."""
        total_BFD = self.levels()[0].decode(codes_BKF[:, 0])
        for index, level in enumerate(self.levels(codes_BKF.shape[1])[1:], start=1):
            total_BFD = total_BFD + level.decode(codes_BKF[:, index])
        return total_BFD

    def forward(self, latent_BFD: Tensor, num_codebooks: int | Tensor | None = None) -> Quantized:
        """Quantize with straight-through gradients; in training mode the codebooks follow.

        `num_codebooks`: of all items or `[B]` of each; an item's further levels add nothing.
        """
        counts_B, computed = level_counts(num_codebooks, len(latent_BFD), len(self.quantizers))
        counts_B = counts_B.to(latent_BFD.device)
        residual_BFD, total_BFD = latent_BFD, torch.zeros_like(latent_BFD)
        codes, distance, used = [], latent_BFD.new_zeros(()), latent_BFD.new_zeros(())
        for index, level in enumerate(self.levels(computed)):
            counted_B = index < counts_B
            x_BFE = level.project_in(residual_BFD)
            codes_BF = level.codebook.nearest(x_BFE.detach().flatten(0, 1)).view(x_BFE.shape[:2])
            # a copy: `follow` writes into the codebook before the backward pass reads these
            chosen_BFE = functional.embedding(codes_BF, level.codebook.embed)
            distance = distance + ((x_BFE - chosen_BFE).square().mean(dim=(1, 2)) * counted_B).sum()
            used = used + counted_B.sum()
            if self.training:
                level.codebook.follow(
                    x_BFE.detach()[counted_B].flatten(0, 1).float(), codes_BF[counted_B].flatten()
                )
            quantized_BFD = level.project_out(x_BFE + (chosen_BFE - x_BFE).detach())
            total_BFD = total_BFD + quantized_BFD * counted_B[:, None, None]
            residual_BFD = residual_BFD - quantized_BFD
            codes.append(codes_BF)
        if self.training:
            used = sum_over_ranks(used)
        return Quantized(total_BFD, torch.stack(codes, dim=1), distance / used.clamp_min(1))

    def initialize(self, latent_SD: Tensor, generator: torch.Generator, iterations: int = 12) -> None:
        """k-means on real latents, level by level on what the levels before leave over."""
        self._fit(latent_SD, generator, iterations, anew=True)

    def refit(self, latent_SD: Tensor, generator: torch.Generator, iterations: int = 3) -> None:
        """A few steps of k-means from the codebooks as they are; codes that nothing is near to begin anew."""
        self._fit(latent_SD, generator, iterations, anew=False)

    @torch.no_grad()
    def _fit(self, latent_SD: Tensor, generator: torch.Generator, iterations: int, anew: bool) -> None:
        residual_SD = all_rows(latent_SD.float())
        for level in self.levels():
            x_SE, book = level.project_in(residual_SD), level.codebook
            start_VE = None if anew else book.embed.clone()
            vectors_VE, _ = kmeans(x_SE, len(book.embed), generator, iterations, start_VE)
            book.place(torch.arange(len(book.embed), device=x_SE.device), vectors_VE)
            book.inited.fill_(1)
            residual_SD = residual_SD - level.decode(book.nearest(x_SE))
        copy_from_rank_0(self.buffers())

    @torch.no_grad()
    def revive(self, latent_BFD: Tensor, generator: torch.Generator, threshold: float = 0.05) -> int:
        """Move codes used less than `threshold` times the mean onto residuals of this batch; returns how many."""
        residual_SD, revived = all_rows(latent_BFD.flatten(0, 1).float()), 0
        with torch.autocast(latent_BFD.device.type, enabled=False):  # codebooks are float32
            for level in self.levels():
                x_SE, book = level.project_in(residual_SD), level.codebook
                residual_SD = residual_SD - level.decode(book.nearest(x_SE))
                usage = book.cluster_size.mean()
                dead = (book.cluster_size < threshold * usage).nonzero()[:, 0]
                picked = torch.randint(len(x_SE), (len(dead),), generator=generator).to(x_SE.device)
                book.place(dead, x_SE[picked], usage)
                revived += len(dead)
        copy_from_rank_0(self.buffers())
        return revived

    def alive_K(self, threshold: float = 0.05) -> Tensor:
        """Share of each codebook used at least `threshold` times the mean, by the EMA of use."""
        return alive_share(self._usage_KV(), threshold)

    def ema_perplexity_K(self) -> Tensor:
        """Perplexity of each codebook by the EMA of use: 1 is collapsed, V is even use."""
        return usage_perplexity(self._usage_KV())

    def _usage_KV(self) -> Tensor:
        return torch.stack([level.codebook.cluster_size for level in self.levels()])


def totals(x_SE: Tensor, codes_S: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The number of vectors with each code `[V]`, and their sums `[V, E]`."""
    counts_V = torch.bincount(codes_S, minlength=size).to(x_SE.dtype)
    return counts_V, x_SE.new_zeros(size, x_SE.shape[1]).index_add_(0, codes_S, x_SE)
