"""Rows of several samples end to end: which sample a row belongs to, its neighbours, and values spread over rows.

Shapes: B samples, R rows of all samples, K neighbours with the row itself, C channels, U distinct conditions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.products import Linear, input_gradient, multiply, weight_gradient


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


class RowConv(nn.Module):
    """A convolution along the rows of each sample, zeros beyond its ends; the weights are those of `nn.Conv1d`."""

    def __init__(self, channels: int, out_channels: int, kernel_size: int, bias: bool = True) -> None:
        super().__init__()
        like = nn.Conv1d(channels, out_channels, kernel_size, bias=bias)
        self.weight, self.bias = like.weight, like.bias

    def forward(self, x_RC: Tensor, rows: SampleRows) -> Tensor:
        (out_RC,) = convolve_rows(x_RC, rows, self.weight)
        return out_RC if self.bias is None else out_RC + self.bias.to(out_RC.dtype)


class RowMLP(nn.Module):
    """SwiGLU with convolutions along the rows, or without (kernel size 1); the widths of the released model."""

    def __init__(self, width: int, hidden: int, kernel_size: int) -> None:
        super().__init__()
        hidden = 256 * -(-int(2 * hidden / 3) // 256)
        self.kernel_size = kernel_size

        def layer(channels: int, out: int) -> nn.Module:
            if kernel_size == 1:
                return Linear(channels, out, bias=False)
            return RowConv(channels, out, kernel_size, bias=False)

        self.w1, self.w2, self.w3 = layer(width, hidden), layer(hidden, width), layer(width, hidden)

    def forward(self, x_RC: Tensor, rows: SampleRows) -> Tensor:
        if self.kernel_size == 1:
            fed_RC: Tensor = self.w2(functional.silu(self.w1(x_RC)) * self.w3(x_RC))
            return fed_RC
        assert isinstance(self.w1, RowConv) and isinstance(self.w2, RowConv) and isinstance(self.w3, RowConv)
        gate_RH, value_RH = convolve_rows(x_RC, rows, self.w1.weight, self.w3.weight)
        weight_CHK, edges = self.w2.weight.to(gate_RH.dtype), _kernel_edges(rows, self.kernel_size)
        out_RC: Tensor = _GatedProduct.apply(gate_RH, value_RH, edges, weight_CHK)
        return out_RC


def convolve_rows(x_RC: Tensor, rows: SampleRows, *weights_OCK: Tensor) -> tuple[Tensor, ...]:
    """Convolutions of the same rows, `[R, O]` each, without bias; the kernels have one size.

    Each is a matrix product with the neighbours side by side, which are laid out once for all of them, and again in
    the backward pass in place of being kept.
    """
    if torch.is_autocast_enabled(x_RC.device.type):
        dtype = torch.get_autocast_dtype(x_RC.device.type)
        x_RC, weights_OCK = x_RC.to(dtype), tuple(weight.to(dtype) for weight in weights_OCK)
    edges = _kernel_edges(rows, weights_OCK[0].shape[2])
    out: tuple[Tensor, ...] = _RowProducts.apply(x_RC, edges, *weights_OCK)
    return out


class _RowProducts(torch.autograd.Function):
    """Products of each row's neighbours with kernels `[O, C, K]`; only the rows and the kernels themselves are kept."""

    @staticmethod
    def forward(ctx: Any, x_RC: Tensor, edges: tuple[Tensor, ...], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.edges = edges
        ctx.save_for_backward(x_RC, *weights)
        beside = _with_neighbours(x_RC, edges)
        return tuple(multiply(beside, _flatten_kernel(weight)) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RC, *weights = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_beside = input_gradient(grads[0], _flatten_kernel(weights[0]))
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                input_gradient(grad, _flatten_kernel(weight), total_RI=grad_beside)
            grad_x = _gather_gradient(grad_beside, ctx.edges)
            del grad_beside
        beside = _with_neighbours(x_RC, ctx.edges)
        return grad_x, None, *(_as_kernel(weight_gradient(grad, beside), weights[0]) for grad in grads)


class _GatedProduct(torch.autograd.Function):
    """The product of SwiGLU's rows with a kernel `[O, H, K]`; gate and value are kept, and not what is made of them."""

    @staticmethod
    def forward(
        ctx: Any, gate_RH: Tensor, value_RH: Tensor, edges: tuple[Tensor, ...], weight: Tensor
    ) -> Tensor:
        ctx.edges = edges
        ctx.save_for_backward(gate_RH, value_RH, weight)
        beside = _with_neighbours(functional.silu(gate_RH) * value_RH, edges)
        return multiply(beside, _flatten_kernel(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate_RH, value_RH, weight = ctx.saved_tensors
        open_RH = functional.silu(gate_RH)
        grad_weight = _as_kernel(
            weight_gradient(grad, _with_neighbours(open_RH * value_RH, ctx.edges)), weight
        )
        grad_RH = _gather_gradient(input_gradient(grad, _flatten_kernel(weight)), ctx.edges)
        share_RH = gate_RH.sigmoid()
        slope_RH = share_RH.add_(open_RH * (1 - share_RH))
        return slope_RH.mul_(value_RH).mul_(grad_RH), grad_RH.mul_(open_RH), None, grad_weight


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


def _kernel_edges(rows: SampleRows, kernel_size: int) -> tuple[Tensor, ...]:
    """For each place of a kernel, the rows that have no neighbour there."""
    return tuple(rows.edge(shift) for shift in range(-(kernel_size // 2), kernel_size // 2 + 1))


def _flatten_kernel(weight_OCK: Tensor) -> Tensor:
    """A kernel as a matrix, `[O, K * C]`."""
    return weight_OCK.transpose(1, 2).flatten(1)


def _as_kernel(grad_OX: Tensor, like_OCK: Tensor) -> Tensor:
    """The gradient of a kernel from that of its matrix."""
    return grad_OX.unflatten(1, (-1, like_OCK.shape[1])).transpose(1, 2)


def _with_neighbours(x_RC: Tensor, edges: tuple[Tensor, ...]) -> Tensor:
    """Each row with its neighbours of the same sample, `[R, K * C]`, zeros where there is none."""
    rows, channels = x_RC.shape
    out_RKC = x_RC.new_empty(rows, len(edges), channels)
    for place, edge in enumerate(edges):
        shift = place - len(edges) // 2
        here, there = _overlapping_rows(shift, rows)
        out_RKC[here, place] = x_RC[there]
        out_RKC[edge, place] = 0
    return out_RKC.flatten(1)


def _gather_gradient(grad: Tensor, edges: tuple[Tensor, ...]) -> Tensor:
    """The gradient of the rows from that of `_with_neighbours`; `grad` is written to."""
    grad_RKC = grad.unflatten(1, (len(edges), -1))
    middle = len(edges) // 2
    total_RC = grad_RKC[:, middle].clone()
    for place, edge in enumerate(edges):
        if place != middle:
            grad_RKC[edge, place] = 0
            here, there = _overlapping_rows(place - middle, len(grad))
            total_RC[there] += grad_RKC[here, place]
    return total_RC


def _overlapping_rows(shift: int, rows: int) -> tuple[slice, slice]:
    """The rows that have a row `shift` further on in the pack, and those rows."""
    if abs(shift) >= rows:
        return slice(0, 0), slice(0, 0)
    if shift >= 0:
        return slice(0, rows - shift), slice(shift, rows)
    return slice(-shift, rows), slice(0, rows + shift)
