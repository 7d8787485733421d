"""Finite scalar quantization (FSQ, Mentzer et al., arXiv 2309.15505) in residual levels.

A code is a point of a fixed grid, so no codebook is learned and no code can die; what is learned are the
projections of each level from the latent to the grid's few channels and back.

Shapes: B batch, D latent dimension, C channels of the grid, T frames, S vectors, K codebooks, V codebook size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tokenizer.quantizers.codebooks import (
    Quantized,
    ResidualLevels,
    copy_from_rank_0,
    level_counts,
    sample_of_all_ranks,
    spread_over_frames,
    sum_over_ranks,
)

MARGIN = 1e-3
"""The paper's epsilon: the outermost values stay inside the last cell."""
FEWEST_STEPS, MOST_STEPS = 3, 8
"""Values of a channel; the paper uses 3 to 8."""


class FiniteScalarQuantizer(ResidualLevels):
    """K levels, each rounding a projection of what the ones before left over; a `Quantizer`.

    Straight-through gradients train the projections and pass through them to the latent; the commitment
    trains them too, so that each level really takes away what is left.
    """

    def __init__(self, num_codebooks: int, codebook_size: int, dim: int, decay: float = 0.98) -> None:
        super().__init__()
        steps = grid_steps(codebook_size)
        if dim < len(steps):
            raise ValueError(
                f"fsq with {codebook_size} codes needs a latent of {len(steps)} or more, not {dim}"
            )
        self.num_codebooks, self.codebook_size, self.latent_dim = num_codebooks, codebook_size, dim
        self.decay, self.steps = decay, steps
        self.inward = nn.ModuleList(nn.Linear(dim, len(steps)) for _ in range(num_codebooks))
        self.outward = nn.ModuleList(nn.Linear(len(steps), dim) for _ in range(num_codebooks))
        self.register_buffer("usage_KV", torch.ones(num_codebooks, codebook_size))

    @property
    def vectors_KVD(self) -> Tensor:
        codes_V = torch.arange(self.codebook_size, device=self.usage_KV.device)
        grid_VC = grid_values(codes_V, self.steps).to(self.usage_KV.dtype)
        return torch.stack([outward(grid_VC) for outward in self.outward])

    @property
    def codebook_tensors(self) -> list[list[Tensor]]:
        return [[*outward.parameters()] for outward in self.outward]

    def forward(
        self, latent_BTD: Tensor, num_codebooks: int | Tensor | None = None, mask_BT: Tensor | None = None
    ) -> Quantized:
        """See `Quantizer`; in training mode the EMA of use is updated."""
        batch, frames, dim = latent_BTD.shape
        counts_B, levels = level_counts(num_codebooks, batch, self.num_codebooks)
        counts_S, real_S = spread_over_frames(counts_B, mask_BT, latent_BTD)
        residual_SD = latent_BTD.to(self.usage_KV.dtype).reshape(-1, dim)
        total_SD = torch.zeros_like(residual_SD)
        distance, pairs, codes = residual_SD.new_zeros(()), residual_SD.new_zeros(()), []
        chosen_KV = torch.zeros_like(self.usage_KV)
        # all levels in training: a parameter without a gradient would stop DistributedDataParallel
        for level in range(self.num_codebooks if self.training else levels):
            code_SD, codes_S = self._level(level, residual_SD)
            used_S = level < counts_S
            counted_S = (used_S & real_S).to(residual_SD.dtype)
            residual_SD = residual_SD - code_SD
            distance = distance + (residual_SD.square().mean(dim=1) * counted_S).sum()
            pairs = pairs + counted_S.sum()
            chosen_KV[level].index_add_(0, codes_S, counted_S)
            total_SD = total_SD + code_SD * used_S[:, None]
            codes.append(codes_S.reshape(batch, frames))
        if self.training:
            self._update(chosen_KV)
            pairs = sum_over_ranks(pairs)
        codes_BKT = torch.stack(codes[:levels], dim=1)
        return Quantized(total_SD.reshape(batch, frames, dim), codes_BKT, distance / pairs.clamp_min(1))

    @torch.no_grad()
    def encode(self, pieces_BTD: Sequence[Tensor], num_codebooks: int | None = None) -> list[Tensor]:
        """Codes `[B, K, T]` of latents, every piece with arithmetic of its own shape; nothing is updated."""
        return [self._codes(piece_BTD, num_codebooks or self.num_codebooks) for piece_BTD in pieces_BTD]

    def _codes(self, latent_BTD: Tensor, levels: int) -> Tensor:
        residual_SD = latent_BTD.to(self.usage_KV.dtype).flatten(0, 1)
        codes = []
        for level in range(levels):
            code_SD, codes_S = self._level(level, residual_SD)
            residual_SD = residual_SD - code_SD
            codes.append(codes_S.unflatten(0, latent_BTD.shape[:2]))
        return torch.stack(codes, dim=1)

    @torch.no_grad()
    def initialize(self, latent_SD: Tensor, generator: torch.Generator) -> None:
        """Each level starts at the main axes of what is left, scaled to the grid, and its least-squares way back."""
        residual_SD = sample_of_all_ranks(latent_SD, self.codebook_size, generator).to(self.usage_KV.dtype)
        for level in range(self.num_codebooks):
            weight_CD, bias_C = _main_axes(residual_SD, self.steps)
            self.inward[level].load_state_dict({"weight": weight_CD, "bias": bias_C})
            values_SC, codes_S = round_to_grid(self.inward[level](residual_SD), self.steps)
            weight_DC, bias_D = _least_squares(values_SC, residual_SD)
            self.outward[level].load_state_dict({"weight": weight_DC, "bias": bias_D})
            counts_V = torch.bincount(codes_S, minlength=self.codebook_size).to(self.usage_KV.dtype)
            self.usage_KV[level] = counts_V / counts_V.mean()
            residual_SD = residual_SD - self.outward[level](values_SC)
        copy_from_rank_0([*self.parameters(), self.usage_KV])

    def refit(self, latent_SD: Tensor, generator: torch.Generator) -> None:
        """Nothing to do: the grid is fixed, and its projections are averaged with the encoder's weights."""

    def revive(
        self,
        latent_BTD: Tensor,
        generator: torch.Generator,
        threshold: float = 0.05,
        mask_BT: Tensor | None = None,
    ) -> int:
        """Always 0: a grid point has no vector of its own that could be moved, or could die."""
        return 0

    def _level(self, level: int, residual_SD: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(residual_SD.device.type, enabled=False):
            values_SC, codes_S = round_to_grid(self.inward[level](residual_SD), self.steps)
            return self.outward[level](values_SC), codes_S

    @torch.no_grad()
    def _update(self, chosen_KV: Tensor) -> None:
        sum_over_ranks(chosen_KV)
        weight_K1 = (1 - self.decay) * (chosen_KV.sum(dim=1, keepdim=True) > 0).to(chosen_KV.dtype)
        self.usage_KV.lerp_(chosen_KV, weight_K1)


def grid_steps(codebook_size: int) -> tuple[int, ...]:
    """Values of each channel, 3 to 8, whose product is `codebook_size`; as many channels of 4 or more as can be.

    1024 is (4, 4, 4, 4, 4), 1000 is (8, 5, 5, 5) as in the paper.

    Raises:
        ValueError: there is no such product; the message names the nearest sizes that are one.
    """
    steps = _grid(codebook_size)
    if not steps:
        lower = next((size for size in range(codebook_size - 1, 2, -1) if _grid(size)), FEWEST_STEPS)
        upper = next(
            size for size in range(max(codebook_size, 2) + 1, 2 * max(codebook_size, 4)) if _grid(size)
        )
        raise ValueError(
            f"fsq has no grid of {codebook_size} codes (a product of numbers from {FEWEST_STEPS} to "
            f"{MOST_STEPS}): use a codebook_size of {lower} or {upper}"
        )
    return steps


def bound(z_SC: Tensor, steps: tuple[int, ...]) -> Tensor:
    """The paper's f: each channel squeezed by tanh, so that rounding gives as many whole numbers as it has steps.

    An even number of steps has no middle one: there the range is moved down by a half, and the argument so
    that 0 stays near 0 (by tan, as the paper's listing has it; atanh would be exact and is within 1e-3).
    """
    half_C, offset_C, shift_C = (z_SC.new_tensor(row) for row in _compute_grid_shape(steps))
    return torch.tanh(z_SC + shift_C) * half_C - offset_C


def round_to_grid(z_SC: Tensor, steps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The nearest grid values `[S, C]` in [-1, 1], with straight-through gradients, and their codes `[S]`."""
    bounded_SC = bound(z_SC, steps)
    whole_SC = bounded_SC.detach().round()
    middle_C = torch.tensor([count // 2 for count in steps], device=z_SC.device)
    codes_S = ((whole_SC.long() + middle_C) * _place_values(steps, z_SC.device)).sum(dim=-1)
    return (whole_SC + (bounded_SC - bounded_SC.detach())) / middle_C, codes_S


def grid_values(codes_S: Tensor, steps: tuple[int, ...]) -> Tensor:
    """Grid values `[S, C]` of codes: the inverse of `round_to_grid`."""
    counts_C = torch.tensor(steps, device=codes_S.device)
    digits_SC = codes_S[:, None] // _place_values(steps, codes_S.device) % counts_C
    middle_C = counts_C // 2
    return (digits_SC - middle_C) / middle_C


def _grid(size: int, max_factor: int = MOST_STEPS) -> tuple[int, ...] | None:
    """Factors of `size`, falling, at most `max_factor`: those with the fewest 3s, then the most channels."""
    if size == 1:
        return ()
    options = []
    for count in range(min(max_factor, size), FEWEST_STEPS - 1, -1):
        factors = _grid(size // count, count) if size % count == 0 else None
        if factors is not None:
            options.append((count, *factors))
    return min(options, key=lambda steps: (steps.count(3), -len(steps)), default=None)


def _compute_grid_shape(steps: tuple[int, ...]) -> tuple[list[float], list[float], list[float]]:
    half = [(count - 1) * (1 - MARGIN) / 2 for count in steps]
    offset = [0.0 if count % 2 else 0.5 for count in steps]
    return half, offset, [math.tan(o / h) for o, h in zip(offset, half, strict=True)]


def _place_values(steps: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([math.prod(steps[:i]) for i in range(len(steps))], device=device)


def _main_axes(x_SD: Tensor, steps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The projection on the principal axes, each of standard deviation 1 around the middle of its range."""
    mean_D = x_SD.mean(dim=0)
    centred_SD = x_SD - mean_D
    variance_D, axes_DD = torch.linalg.eigh(centred_SD.T @ centred_SD / len(x_SD))
    largest = range(len(variance_D) - 1, len(variance_D) - 1 - len(steps), -1)
    deviation_C = variance_D[list(largest)].clamp_min(1e-10).sqrt()
    weight_CD = axes_DD.T[list(largest)] / deviation_C[:, None]
    return weight_CD, -(weight_CD @ mean_D) - x_SD.new_tensor(_compute_grid_shape(steps)[2])


def _least_squares(values_SC: Tensor, x_SD: Tensor) -> tuple[Tensor, Tensor]:
    """Weight `[D, C]` and bias `[D]` that rebuild x from grid values best."""
    ones_S1 = torch.ones_like(values_SC[:, :1])
    inputs = torch.cat([values_SC, ones_S1], dim=1)
    # a touch of ridge: a channel that never changes would leave the system without a solution
    gram = inputs.T @ inputs / len(x_SD) + 1e-6 * torch.eye(inputs.shape[1]).to(x_SD)
    solution = torch.linalg.solve(gram, inputs.T @ x_SD / len(x_SD))
    return solution[:-1].T, solution[-1]
