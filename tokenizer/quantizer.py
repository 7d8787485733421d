"""Residual vector quantization with EMA codebooks that revives dead codes for real.

Shapes: B batch, D latent dimension, T frames, S vectors, K codebooks, V codebook size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Quantized(NamedTuple):
    """What the quantizer returns."""

    latent_BTD: Tensor
    """The quantized latent, with straight-through gradients to the input."""
    codes_BKT: Tensor
    commitment: Tensor
    """Mean squared distance of each level's residual to its (fixed) code vector, mean over the levels used."""


class ResidualVectorQuantizer(nn.Module):
    """K codebooks of V vectors, each quantizing what the ones before left over.

    The EMA state (`embed_sum`, `usage`) is what is learned; the vectors are their ratio, so a revived code
    is written where the next update reads it (in the EnCodec lineage revival writes the ratio only, and the
    same step overwrites it).
    """

    def __init__(self, num_codebooks: int, codebook_size: int, dim: int, decay: float = 0.98) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("embed_sum_KVD", torch.randn(num_codebooks, codebook_size, dim))
        self.register_buffer("usage_KV", torch.ones(num_codebooks, codebook_size))
        self.embed_sum_KVD: Tensor
        self.usage_KV: Tensor

    @property
    def vectors_KVD(self) -> Tensor:
        return self.embed_sum_KVD / self.usage_KV.clamp_min(1e-5).unsqueeze(-1)

    def forward(self, latent_BTD: Tensor, num_codebooks: int | None = None) -> Quantized:
        """Quantize with the first `num_codebooks` levels; in training mode update their statistics."""
        batch, frames, dim = latent_BTD.shape
        latent_SD = latent_BTD.float().reshape(-1, dim)
        residual_SD, total_SD = latent_SD, torch.zeros_like(latent_SD)
        codes, commitment = [], latent_SD.new_zeros(())
        vectors_KVD = self.vectors_KVD.clone()
        used = num_codebooks or len(vectors_KVD)
        for level in range(used):
            codes_S = nearest_codes(residual_SD.detach(), vectors_KVD[level])
            chosen_SD = vectors_KVD[level][codes_S]
            commitment = commitment + (residual_SD - chosen_SD).square().mean()
            if self.training:
                self._update(level, residual_SD.detach(), codes_S)
            residual_SD = residual_SD - chosen_SD
            total_SD = total_SD + chosen_SD
            codes.append(codes_S)
        straight_SD = latent_SD + (total_SD - latent_SD).detach()
        return Quantized(
            straight_SD.reshape(batch, frames, dim),
            torch.stack(codes, dim=1).reshape(batch, frames, used).transpose(1, 2),
            commitment / used,
        )

    def decode(self, codes_BKT: Tensor) -> Tensor:
        """Codes of the first K' levels to the latent `[B, T, D]`."""
        vectors_KVD = self.vectors_KVD
        levels = [vectors_KVD[level][codes_BKT[:, level]] for level in range(codes_BKT.shape[1])]
        return torch.stack(levels).sum(dim=0)

    @torch.no_grad()
    def initialize(self, latent_SD: Tensor, generator: torch.Generator, iterations: int = 12) -> None:
        """k-means on real latents, level by level on what the levels before leave over."""
        residual_SD = latent_SD.float()
        size = self.usage_KV.shape[1]
        for level in range(len(self.usage_KV)):
            picked = torch.randperm(len(residual_SD), generator=generator)[:size]
            repeats = -(-size // len(picked))
            vectors_VD = residual_SD[picked].repeat(repeats, 1)[:size].clone()
            for _ in range(iterations):
                codes_S = nearest_codes(residual_SD, vectors_VD)
                counts_V = torch.bincount(codes_S, minlength=size).float()
                sums_VD = torch.zeros_like(vectors_VD).index_add_(0, codes_S, residual_SD)
                vectors_VD = torch.where(
                    counts_V[:, None] > 0, sums_VD / counts_V[:, None].clamp_min(1), vectors_VD
                )
            self.usage_KV[level] = 1.0
            self.embed_sum_KVD[level] = vectors_VD
            residual_SD = residual_SD - vectors_VD[nearest_codes(residual_SD, vectors_VD)]

    @torch.no_grad()
    def revive(self, latent_BTD: Tensor, generator: torch.Generator, threshold: float = 0.05) -> int:
        """Move codes used less than `threshold` times the mean onto residuals of this batch; returns how many."""
        residual_SD = latent_BTD.float().flatten(0, 1)
        revived = 0
        for level in range(len(self.usage_KV)):
            usage_V = self.usage_KV[level]
            dead = (usage_V < threshold * usage_V.mean()).nonzero()[:, 0]
            vectors_VD = self.vectors_KVD[level]
            residual_next = residual_SD - vectors_VD[nearest_codes(residual_SD, vectors_VD)]
            picked = torch.randint(len(residual_SD), (len(dead),), generator=generator)
            new_usage = usage_V.mean()
            self.embed_sum_KVD[level, dead] = residual_SD[picked] * new_usage
            self.usage_KV[level, dead] = new_usage
            residual_SD = residual_next
            revived += len(dead)
        return revived

    @torch.no_grad()
    def _update(self, level: int, residual_SD: Tensor, codes_S: Tensor) -> None:
        counts_V = torch.bincount(codes_S, minlength=self.usage_KV.shape[1]).float()
        sums_VD = torch.zeros_like(self.embed_sum_KVD[level]).index_add_(0, codes_S, residual_SD)
        self.usage_KV[level].lerp_(counts_V, 1 - self.decay)
        self.embed_sum_KVD[level].lerp_(sums_VD, 1 - self.decay)


def nearest_codes(x_SD: Tensor, vectors_VD: Tensor) -> Tensor:
    """Index of the nearest vector, int64 `[S]`; in float32 on centred values, where cancellation is least."""
    with torch.autocast(x_SD.device.type, enabled=False):
        centre_D = vectors_VD.mean(dim=0)
        x, v = (x_SD - centre_D).float(), (vectors_VD - centre_D).float()
        return (v.square().sum(dim=1) - 2 * x @ v.T).argmin(dim=1)


def perplexity(codes_KT: Tensor, codebook_size: int) -> Tensor:
    """exp(entropy) of each codebook's use, `[K]`, between 1 (collapsed) and `codebook_size`."""
    counts_KV = torch.stack([torch.bincount(codes, minlength=codebook_size) for codes in codes_KT]).float()
    shares_KV = counts_KV / counts_KV.sum(dim=1, keepdim=True)
    return torch.exp(-(shares_KV * shares_KV.clamp_min(1e-12).log()).sum(dim=1))
