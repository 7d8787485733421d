"""Sums over a whole step, and the whitening that they give. The training adds the sums of all packs and ranks.

Shapes: N values of a call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of values: mean and deviation of the step once they are added over all ranks."""

    sums: Tensor
    """float64 `[3]`: count, sum, sum of squares. An all-reduce by sum gives those of all ranks."""

    @classmethod
    def of(cls, values_N: Tensor) -> Moments:
        """Return the moments of the values of one call."""
        values_N = values_N.detach().double()
        count = values_N.new_tensor(float(values_N.numel()))
        return cls(torch.stack([count, values_N.sum(), values_N.square().sum()]))

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of both sets of values."""
        return Moments(self.sums + other.sums)

    @property
    def mean(self) -> Tensor:
        """Scalar float64; 0 without values."""
        return self.sums[1] / self.sums[0].clamp(min=1)

    @property
    def deviation(self) -> Tensor:
        """Standard deviation with Bessel's correction, scalar float64; 0 with fewer than two values."""
        count = self.sums[0]
        squares = self.sums[2] - count * self.mean.square()
        is_rounding = (
            squares <= 1e-13 * self.sums[2]
        )  # values that are all equal, up to the rounding of their sums
        squares = torch.where(is_rounding, 0.0, squares)
        return (squares / (count - 1).clamp(min=1)).sqrt()


def whitened(values_N: Tensor, moments: Moments, epsilon: float) -> Tensor:
    """Return `(x - mean) / (deviation + epsilon)`, with the moments of the whole step; 0 where all are equal."""
    deviation = moments.deviation
    scaled_N = (values_N.double() - moments.mean) / (deviation + epsilon)
    return torch.where(deviation > 0, scaled_N, 0.0).to(values_N)
