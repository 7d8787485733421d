"""Convolutions along the rows of each sample, and SwiGLU with them.

A convolution is a matrix product with the neighbours of each row side by side, or in float32 on a CPU, where samples
have one number of rows, oneDNN's own convolution of the rows as they lie: the faster of the two
(`measured_choices`). So is the gradient of a kernel: one product with all neighbours, or one for each of its places.

Shapes: R rows of all samples, K neighbours with the row itself, C channels, O output channels, H hidden channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.flow.model.rows import SampleRows, rows_of
from audiollm.measured_choices import CHOICES, Ways
from audiollm.products import (
    MEASURED_MULTIPLY_ADDS,
    MIN_MULTIPLY_ADDS,
    Linear,
    forced_library,
    input_gradient,
    is_accelerated,
    multiply,
    numbers,
    rounded_rows,
    weight_gradient,
)


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
        out_RC: Tensor = _GatedConvolution.apply(gate_RH, value_RH, rows, self.w2.weight.to(gate_RH.dtype))
        return out_RC


def convolve_rows(x_RC: Tensor, rows: SampleRows, *weights_OCK: Tensor) -> tuple[Tensor, ...]:
    """Convolutions of the same rows, `[R, O]` each, without bias; the kernels have one size."""
    if torch.is_autocast_enabled(x_RC.device.type):
        dtype = torch.get_autocast_dtype(x_RC.device.type)
        x_RC, weights_OCK = x_RC.to(dtype), tuple(weight.to(dtype) for weight in weights_OCK)
    out: tuple[Tensor, ...] = _RowConvolutions.apply(x_RC, rows, *weights_OCK)
    return out


class _RowConvolutions(torch.autograd.Function):
    """Convolutions of the same rows by kernels `[O, C, K]`; only the rows and the kernels themselves are kept."""

    @staticmethod
    def forward(ctx: Any, x_RC: Tensor, rows: SampleRows, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.rows = rows
        ctx.save_for_backward(x_RC, *weights)
        return _convolve_rows(x_RC, rows, *weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RC, *weights = ctx.saved_tensors
        grad_x = _gradient_of_rows(ctx.rows, grads, weights) if ctx.needs_input_grad[0] else None
        return grad_x, None, *_gradients_of_kernels(x_RC, ctx.rows, grads, weights)


class _GatedConvolution(torch.autograd.Function):
    """The convolution of SwiGLU's rows by a kernel `[O, H, K]`; gate and value are kept, not what is made of them."""

    @staticmethod
    def forward(ctx: Any, gate_RH: Tensor, value_RH: Tensor, rows: SampleRows, weight: Tensor) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(gate_RH, value_RH, weight)
        (out_RO,) = _convolve_rows(functional.silu(gate_RH).mul_(value_RH), rows, weight)
        return out_RO

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate_RH, value_RH, weight = ctx.saved_tensors
        open_RH = functional.silu(gate_RH)
        (grad_weight,) = _gradients_of_kernels(open_RH * value_RH, ctx.rows, [grad], [weight])
        grad_RH = _gradient_of_rows(ctx.rows, [grad], [weight])
        grad_gate_RH = torch.ops.aten.silu_backward(grad_RH * value_RH, gate_RH)
        return grad_gate_RH, grad_RH.mul_(open_RH), None, grad_weight


def _convolve_rows(x_RC: Tensor, rows: SampleRows, *weights: Tensor) -> tuple[Tensor, ...]:
    if _chosen_way("forward", rows, weights[0], x_RC) == "convolution":
        return tuple(_convolve_samples(x_RC, rows, weight) for weight in weights)
    return _multiply_neighbours(x_RC, rows, weights)


def _gradient_of_rows(rows: SampleRows, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    if _chosen_way("input_gradient", rows, weights[0], *grads) == "convolution":
        total, *more = (
            _convolve_gradient(grad, rows, weight) for grad, weight in zip(grads, weights, strict=True)
        )
        for grad_RC in more:
            total += grad_RC
        return total
    return _gather_products(rows, grads, weights)


def _gradients_of_kernels(
    x_RC: Tensor, rows: SampleRows, grads: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    if _chosen_way("weight_gradient", rows, weights[0], x_RC, *grads) == "places":
        return tuple(_multiply_places(x_RC, rows, grad, weights[0].shape[2]) for grad in grads)
    beside = _with_neighbours(x_RC, _kernel_edges(rows, weights[0].shape[2]))
    return tuple(_as_kernel(weight_gradient(grad, beside), weights[0]) for grad in grads)


def _chosen_way(kind: str, rows: SampleRows, weight_OCK: Tensor, *tensors: Tensor) -> str:
    """`neighbours`: products with all neighbours side by side; `convolution`; or for the gradient of a kernel `places`.

    Small convolutions, and those of samples of several lengths, go by the first.
    """
    outputs, channels, size = weight_OCK.shape
    alternative = "places" if kind == "weight_gradient" else "convolution"
    small = rows.total * weight_OCK.numel() < MIN_MULTIPLY_ADDS
    if size == 1 or small or not (rows.equal or alternative == "places") or not is_accelerated(*tensors):
        return "neighbours"
    if (forced := forced_library()) is not None:
        return "neighbours" if forced == "plain" else alternative
    samples = len(rows.lengths) if rows.equal else 1
    length = rounded_rows(rows.total // samples)
    key = f"rows {kind} {samples}x{length}x{channels}x{outputs}x{size} threads {torch.get_num_threads()}"
    return CHOICES.choose(key, partial(_ways_to_convolve, kind, samples, length, weight_OCK.shape))


def _ways_to_convolve(kind: str, samples: int, length: int, kernel: Sequence[int]) -> Ways:
    outputs, channels, size = kernel
    samples = max(1, min(samples, MEASURED_MULTIPLY_ADDS // (length * outputs * channels * size)))
    rows, weight = rows_of([length] * samples, torch.device("cpu")), numbers(outputs, channels, size)
    x_RC, grad_RO = numbers(rows.total, channels), numbers(rows.total, outputs)
    if kind == "forward":
        return {
            "neighbours": partial(_multiply_neighbours, x_RC, rows, [weight]),
            "convolution": partial(_convolve_samples, x_RC, rows, weight),
        }
    if kind == "input_gradient":
        return {
            "neighbours": partial(_gather_products, rows, [grad_RO], [weight]),
            "convolution": partial(_convolve_gradient, grad_RO, rows, weight),
        }
    edges = _kernel_edges(rows, size)
    return {
        "neighbours": lambda: _as_kernel(weight_gradient(grad_RO, _with_neighbours(x_RC, edges)), weight),
        "places": partial(_multiply_places, x_RC, rows, grad_RO, size),
    }


def _convolve_samples(x_RC: Tensor, rows: SampleRows, weight_OCK: Tensor) -> Tensor:
    """oneDNN's convolution of samples of one length: the channels of a row lie side by side, as it wants them."""
    out_BO1L: Tensor = torch.mkldnn_convolution(
        _as_images(x_RC, rows),
        _as_image_kernel(weight_OCK),
        None,
        [0, weight_OCK.shape[2] // 2],
        [1, 1],
        [1, 1],
        1,
    )
    return out_BO1L.permute(0, 2, 3, 1).reshape(rows.total, -1)


def _convolve_gradient(grad_RO: Tensor, rows: SampleRows, weight_OCK: Tensor) -> Tensor:
    """The gradient of the rows of `_convolve_samples`."""
    like = grad_RO.new_empty(rows.total, weight_OCK.shape[1])
    grad_BC1L, _, _ = torch.ops.aten.convolution_backward(
        _as_images(grad_RO, rows), _as_images(like, rows), _as_image_kernel(weight_OCK), None,
        [1, 1], [0, weight_OCK.shape[2] // 2], [1, 1], False, [0, 0], 1, [True, False, False],
    )  # fmt: skip
    return grad_BC1L.permute(0, 2, 3, 1).reshape(rows.total, -1)


def _as_images(x_RC: Tensor, rows: SampleRows) -> Tensor:
    """`[B, C, 1, L]` in the layout `channels_last`, without a copy."""
    return x_RC.view(len(rows.lengths), 1, -1, x_RC.shape[1]).permute(0, 3, 1, 2)


def _as_image_kernel(weight_OCK: Tensor) -> Tensor:
    return weight_OCK.unsqueeze(2).contiguous(memory_format=torch.channels_last)


def _multiply_neighbours(x_RC: Tensor, rows: SampleRows, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    beside = _with_neighbours(x_RC, _kernel_edges(rows, weights[0].shape[2]))
    return tuple(multiply(beside, _flatten_kernel(weight)) for weight in weights)


def _gather_products(rows: SampleRows, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    grad_beside = input_gradient(grads[0], _flatten_kernel(weights[0]))
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        input_gradient(grad, _flatten_kernel(weight), total_RI=grad_beside)
    return _gather_gradient(grad_beside, _kernel_edges(rows, weights[0].shape[2]))


def _multiply_places(x_RC: Tensor, rows: SampleRows, grad_RO: Tensor, size: int) -> Tensor:
    """The gradient of a kernel by a product for each of its places, less what crosses from sample to sample."""
    places = []
    for place, edge in enumerate(_kernel_edges(rows, size)):
        shift = place - size // 2
        here, there = _overlapping_rows(shift, rows.total)
        grad_OC = weight_gradient(grad_RO[here], x_RC[there])
        crossing = edge[(edge + shift >= 0) & (edge + shift < rows.total)]
        if len(crossing):
            grad_OC.addmm_(grad_RO[crossing].T, x_RC[crossing + shift], alpha=-1)
        places.append(grad_OC)
    return torch.stack(places, dim=2)


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
