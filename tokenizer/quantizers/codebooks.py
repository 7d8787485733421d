"""Functions that the quantizers share: nearest vectors, k-means, use of the codes, sums over ranks.

Shapes: B batch, D vector dimension, T frames, S vectors, K codebooks, V codebook size, P picked rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

SAMPLES_PER_CODE = 64
"""More vectors than this for each code change a k-means start little and cost time in proportion."""
DISTANCES_AT_ONCE = 2**24
"""64 MB in float32: distances are made in blocks of at most this many."""


class Quantized(NamedTuple):
    """The result of a quantizer."""

    latent_BTD: Tensor
    """The quantized latent, exactly the decoded codes, with straight-through gradients to the input."""
    codes_BKT: Tensor
    commitment: Tensor
    """Mean squared distance of a level's residual to its code vector, over the (frame, level) pairs used.

    In training on several ranks: this rank's part of the mean over all ranks' pairs; the parts add up to it."""


def level_counts(num_codebooks: int | Tensor | None, batch: int, total: int) -> tuple[Tensor, int]:
    """The number of levels that each item uses, int64 `[B]`, and the number to compute.

    A number is for the whole batch; a tensor has one number an item (0 for none); None is all levels.

    Raises:
        ValueError: not in the range, or not one number an item.
    """
    if isinstance(num_codebooks, Tensor):
        if num_codebooks.shape != (batch,) or num_codebooks.is_floating_point():
            raise ValueError(
                f"num_codebooks must be one whole number for each of the {batch} items, "
                f"not {num_codebooks.dtype} {list(num_codebooks.shape)}"
            )
        if bool(((num_codebooks < 0) | (num_codebooks > total)).any()):
            raise ValueError(f"num_codebooks of an item must be 0..{total}, not {num_codebooks.tolist()}")
        return num_codebooks.long(), total
    levels = total if num_codebooks is None else num_codebooks
    if not 1 <= levels <= total:
        raise ValueError(f"num_codebooks must be 1..{total}, not {levels}")
    return torch.full((batch,), levels), levels


def spread_over_frames(counts_B: Tensor, mask_BT: Tensor | None, latent_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """The items' level counts for each frame, and which frames are real, both `[B * T]`.

    Raises:
        ValueError: the mask is not `[B, T]`.
    """
    shape = latent_BTD.shape[:2]
    counts_S = counts_B.to(latent_BTD.device)[:, None].expand(shape).reshape(-1)
    if mask_BT is None:
        return counts_S, torch.ones_like(counts_S, dtype=torch.bool)
    if mask_BT.shape != shape:
        raise ValueError(f"mask_BT must be {list(shape)} like the latent, not {list(mask_BT.shape)}")
    return counts_S, mask_BT.to(latent_BTD.device, torch.bool).reshape(-1)


def real_frames(latent_BTD: Tensor, mask_BT: Tensor | None) -> Tensor:
    """The latents where the mask is true, `[S, D]`."""
    return latent_BTD.flatten(0, 1) if mask_BT is None else latent_BTD[mask_BT.bool()]


def at_least_float32(x: Tensor) -> Tensor:
    """float64 stays; everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


class Search(NamedTuple):
    """A codebook, prepared for searching: in float32 (float64 for float64) and centred.

    Centred, because the expanded square cancels: a large common mean would leave no digits for the difference.
    """

    vectors_VD: Tensor
    centre_D: Tensor
    centred_VD: Tensor
    norms_V: Tensor


def search_of(vectors_VD: Tensor) -> Search:
    vectors_VD = at_least_float32(vectors_VD)
    centre_D = vectors_VD.mean(dim=0)
    centred_VD = vectors_VD - centre_D
    return Search(vectors_VD, centre_D, centred_VD, centred_VD.square().sum(dim=1))


def search_codes(x_SD: Tensor, search: Search) -> Tensor:
    """Index of the nearest vector, int64 `[S]`."""
    with torch.autocast(x_SD.device.type, enabled=False):
        _, centre_D, centred_VD, norms_V = search
        blocks = x_SD.split(max(1, DISTANCES_AT_ONCE // len(norms_V)))
        codes = [
            torch.addmm(norms_V, at_least_float32(block_SD) - centre_D, centred_VD.T, alpha=-2).argmin(dim=1)
            for block_SD in blocks
        ]
        return codes[0] if len(codes) == 1 else torch.cat(codes)


def nearest_codes(x_SD: Tensor, vectors_VD: Tensor) -> Tensor:
    """Index of the nearest vector, int64 `[S]`; see `Search`."""
    with torch.autocast(x_SD.device.type, enabled=False):
        return search_codes(x_SD, search_of(vectors_VD))


def cluster_sums(
    x_SD: Tensor, codes_S: Tensor, size: int, counted_S: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The number of vectors that chose each code `[V]`, and their sums `[V, D]`; only those with `counted_S`."""
    weight_S = torch.ones_like(x_SD[:, 0]) if counted_S is None else counted_S.to(x_SD.dtype)
    weighed_SD = x_SD if counted_S is None else x_SD * weight_S[:, None]
    counts_V = x_SD.new_zeros(size).index_add_(0, codes_S, weight_S)
    return counts_V, x_SD.new_zeros(size, x_SD.shape[1]).index_add_(0, codes_S, weighed_SD)


def kmeans(
    samples_SD: Tensor,
    size: int,
    generator: torch.Generator,
    iterations: int,
    start_VD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm from random samples or a start; an empty cluster restarts at a sample, likelier a far one.

    Far ones, because recordings have heaps of equal frames (silence) that a uniform draw would fill with codes.

    Returns:
        the vectors `[V, D]` and how many samples are nearest to each `[V]`.
    """
    if start_VD is None:
        start_VD = samples_SD[draw_indices(len(samples_SD), size, generator).to(samples_SD.device)]
    vectors_VD = start_VD
    for _ in range(iterations):
        codes_S = nearest_codes(samples_SD, vectors_VD)
        counts_V, sums_VD = cluster_sums(samples_SD, codes_S, size)
        means_VD = sums_VD / counts_V.clamp_min(1)[:, None]
        empty_P = (counts_V == 0).nonzero()[:, 0]
        if len(empty_P):
            distance_S = (samples_SD - vectors_VD[codes_S]).square().sum(dim=1).to(generator.device)
            far_P = torch.multinomial(distance_S + 1e-30, len(empty_P), replacement=True, generator=generator)
            means_VD[empty_P] = samples_SD[far_P.to(samples_SD.device)]
        vectors_VD = means_VD
    counts_V, _ = cluster_sums(samples_SD, nearest_codes(samples_SD, vectors_VD), size)
    return vectors_VD, counts_V


def draw_indices(total: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` of the indices 0..total-1 at random, each once before any comes twice."""
    order = torch.randperm(total, generator=generator, device=generator.device)
    return order.repeat(-(-count // total))[:count]


def perplexity(codes_KT: Tensor, codebook_size: int) -> Tensor:
    """exp(entropy) of each codebook's use, `[K]`, between 1 (collapsed) and `codebook_size`."""
    counts_KV = torch.stack([torch.bincount(codes, minlength=codebook_size) for codes in codes_KT])
    return usage_perplexity(counts_KV.float())


def usage_perplexity(usage_KV: Tensor) -> Tensor:
    """exp(entropy) of each row's shares, `[K]`."""
    shares_KV = usage_KV / usage_KV.sum(dim=1, keepdim=True)
    return torch.exp(torch.special.entr(shares_KV).sum(dim=1))


def alive_share(usage_KV: Tensor, threshold: float) -> Tensor:
    """Share of the codes of each codebook used at least `threshold` times the mean, `[K]`."""
    return (usage_KV >= threshold * usage_KV.mean(dim=1, keepdim=True)).float().mean(dim=1)


def is_distributed() -> bool:
    """True where several ranks train together."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum over ranks, in place."""
    if is_distributed():
        distributed.all_reduce(x)
    return x


def copy_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Broadcast rank 0's tensors in place: equal inputs alone do not give equal sums on a GPU."""
    if is_distributed():
        for tensor in tensors:
            distributed.broadcast(tensor, src=0)


def place_among_ranks(x_SD: Tensor) -> tuple[int, int]:
    """The index of this rank's first row among the rows of all ranks (rank 0's first), and the total."""
    if not is_distributed():
        return 0, len(x_SD)
    sizes = torch.zeros(distributed.get_world_size(), dtype=torch.long, device=x_SD.device)
    sizes[distributed.get_rank()] = len(x_SD)
    sum_over_ranks(sizes)
    return int(sizes[: distributed.get_rank()].sum()), int(sizes.sum())


def rows_of_all_ranks(x_SD: Tensor, picked_P: Tensor, start: int) -> Tensor:
    """The picked rows `[P, D]` of all ranks' rows, on every rank; nothing else travels."""
    local_P = picked_P.to(x_SD.device) - start
    mine_P = (local_P >= 0) & (local_P < len(x_SD))
    rows_PD = x_SD.new_zeros(len(local_P), x_SD.shape[1])
    rows_PD[mine_P] = x_SD[local_P[mine_P]]
    return sum_over_ranks(rows_PD)


def all_rows(x_SD: Tensor) -> Tensor:
    """The rows of all ranks, rank 0's first, on every rank."""
    if not is_distributed():
        return x_SD
    start, total = place_among_ranks(x_SD)
    return rows_of_all_ranks(x_SD, torch.arange(total), start)


def sample_of_all_ranks(latent_SD: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """At most `SAMPLES_PER_CODE` latents a code, drawn from all ranks, the same on each.

    Raises:
        ValueError: there are none.
    """
    start, total = place_among_ranks(latent_SD)
    if total == 0:
        raise ValueError("initialize needs latents, and got none: give at least one batch of audio")
    picked_P = draw_indices(total, min(total, SAMPLES_PER_CODE * size), generator)
    return rows_of_all_ranks(at_least_float32(latent_SD), picked_P, start)


class ResidualLevels(nn.Module, ABC):
    """Base of the residual quantizers: a latent is the sum of its levels' code vectors."""

    usage_KV: Tensor
    """Moving average of the number of vectors that chose each code."""

    @property
    @abstractmethod
    def vectors_KVD(self) -> Tensor:
        """The vector of every code."""

    def decode(self, codes_BKT: Tensor) -> Tensor:
        """Codes of the first K' levels to the latent `[B, T, D]`."""
        vectors_KVD = self.vectors_KVD
        latent_BTD = vectors_KVD[0][codes_BKT[:, 0]]
        for level in range(1, codes_BKT.shape[1]):
            latent_BTD = latent_BTD + vectors_KVD[level][codes_BKT[:, level]]
        return latent_BTD

    def alive_K(self, threshold: float = 0.05) -> Tensor:
        """Share of each codebook used at least `threshold` times the mean, by the EMA of use."""
        return alive_share(self.usage_KV, threshold)

    def ema_perplexity_K(self) -> Tensor:
        """Perplexity of each codebook by the EMA of use: 1 is collapsed, V is even use."""
        return usage_perplexity(self.usage_KV)
