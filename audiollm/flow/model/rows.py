"""Rows of several samples end to end: which sample a row belongs to, its neighbours, and values spread over rows.

Shapes: B samples, R rows of all samples, K neighbours with the row itself, C channels, U distinct conditions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SampleRows:
    """The rows of one modality, sample after sample; a sample in which the modality is absent has none."""

    lengths: tuple[int, ...]
    """Rows of each sample."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def equal(self) -> bool:
        """Whether all samples have the same number of rows, and at least one."""
        return len(set(self.lengths)) == 1 and self.lengths[0] > 0

    @cached_property
    def lengths_B(self) -> Tensor:
        return torch.tensor(self.lengths, device=self.device)

    @cached_property
    def sample_R(self) -> Tensor:
        """int64: the sample of each row."""
        numbers = torch.arange(len(self.lengths)).repeat_interleave(
            torch.tensor(self.lengths, dtype=torch.long)
        )
        return numbers.to(self.device)

    @cached_property
    def place_R(self) -> Tensor:
        """int64: the number of each row in its sample."""
        places = [torch.arange(length) for length in self.lengths]
        return (torch.cat(places) if places else torch.zeros(0, dtype=torch.long)).to(self.device)

    def edge(self, shift: int) -> Tensor:
        """int64: the rows r whose row r + `shift` is not of the same sample."""
        if shift not in self._edges:
            place_R = self.place_R + shift
            inside_R = (place_R >= 0) & (place_R < self.lengths_B[self.sample_R])
            self._edges[shift] = (~inside_R).nonzero()[:, 0]
        return self._edges[shift]

    @cached_property
    def _edges(self) -> dict[int, Tensor]:
        return {}

    def sums(self, values_RC: Tensor) -> Tensor:
        """The sum over the rows of each sample, `[B, C]`."""
        if self.equal:
            return values_RC.unflatten(0, (len(self.lengths), -1)).sum(dim=1)
        return values_RC.new_zeros(len(self.lengths), values_RC.shape[1]).index_add(
            0, self.sample_R, values_RC
        )

    def means(self, values_RC: Tensor) -> Tensor:
        """The mean over the rows of each sample, `[B, C]`; 0 for a sample without rows."""
        return self.sums(values_RC) / self.lengths_B.clamp_min(1)[:, None]

    def spread(self) -> Spread:
        """The spread of one value per sample over the rows."""
        return Spread(self, None)


@dataclass(frozen=True)
class Spread:
    """How U conditions lie over R rows: one per row, one per sample, or by index."""

    rows: SampleRows
    index_R: Tensor | None
    """int64: the condition of each row; None: the one of its sample."""
    is_per_row: bool = False
    """Whether there is one condition for every row, in their order."""

    def apply(self, x_RC: Tensor, shift_UC: Tensor, scale_UC: Tensor) -> Tensor:
        """`x * (1 + scale) + shift`."""
        if not self.is_per_row and self.index_R is None and self.rows.equal:
            x_BLC = x_RC.unflatten(0, (len(self.rows.lengths), -1))
            return torch.addcmul(shift_UC[:, None], x_BLC, 1 + scale_UC[:, None]).flatten(0, 1)
        return torch.addcmul(self._over_rows(shift_UC), x_RC, 1 + self._over_rows(scale_UC))

    def gate(self, x_RC: Tensor, added_RC: Tensor, gate_UC: Tensor) -> Tensor:
        """`x + added * gate`."""
        if not self.is_per_row and self.index_R is None and self.rows.equal:
            added_BLC = added_RC.unflatten(0, (len(self.rows.lengths), -1))
            x_BLC = x_RC.unflatten(0, (len(self.rows.lengths), -1))
            return torch.addcmul(x_BLC, added_BLC, gate_UC[:, None]).flatten(0, 1)
        return torch.addcmul(x_RC, added_RC, self._over_rows(gate_UC))

    def _over_rows(self, values_UC: Tensor) -> Tensor:
        if self.is_per_row:
            return values_UC
        return values_UC.index_select(0, self.rows.sample_R if self.index_R is None else self.index_R)


class _Permute(torch.autograd.Function):
    """Rows in another order. The gradient is gathered by the inverse order; `index_select` would scatter it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return x.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse_R,) = ctx.saved_tensors
        return grad.index_select(0, inverse_R), None, None


def permute_rows(x: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """`x[order_R]`, where `inverse_R` is the inverse permutation."""
    out: Tensor = _Permute.apply(x, order_R, inverse_R)
    return out


def rows_of(lengths: Sequence[int], device: torch.device) -> SampleRows:
    """The layout of rows of these lengths."""
    return SampleRows(tuple(int(length) for length in lengths), device)
