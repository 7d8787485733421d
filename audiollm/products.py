"""Products of rows with weights, in float32 on a CPU, by the library that is faster there: PyTorch's own, or oneDNN.

PyTorch sends float32 products to MKL. On some processors oneDNN takes half the time for the same numbers up to
rounding, on others as long or longer, and with few rows MKL is ahead. `measured_choices` decides, for each kind of
product, its shape and the number of threads. Everything else (GPUs, other dtypes, autocast, compiled or sharded
weights, small products, a PyTorch without the operator) goes the plain way.

`AUDIOLLM_PRODUCTS=plain` or `AUDIOLLM_PRODUCTS=onednn` decides for all of them without a measurement.

Shapes: R rows, I input features, O output features.
"""

from __future__ import annotations

import os
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from audiollm.measured_choices import CHOICES, Ways

Kind = Literal["forward", "input_gradient", "weight_gradient"]

ENVIRONMENT = "AUDIOLLM_PRODUCTS"
"""Environment variable that names the library of all products."""
MIN_MULTIPLY_ADDS = 2**22
"""Multiply-adds of a product below which a call costs as much as the work: those go the plain way."""
BLOCK = 2**22
"""Numbers of a result that is made beside the tensor into which it goes: a second one of its size takes memory."""
MAX_WEIGHT = 2**24
"""Numbers of a weight above which the plain way is taken: oneDNN orders a weight anew in every call."""
MEASURED_MULTIPLY_ADDS = 2**30
"""Multiply-adds of a product that is measured; larger ones are measured with fewer rows."""


class Linear(nn.Linear):
    """`nn.Linear` whose product and gradients run by the library that is faster on this machine."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def accelerate_products(model: nn.Module) -> None:
    """Make every plain `nn.Linear` of a model a `Linear`, in place: parameters and their names stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`functional.linear`, `x @ weight.T + bias` over the last dimension of x, by the faster library."""
    outputs, inputs = weight_OI.shape
    rows = x.numel() // max(inputs, 1)
    if not _pays(rows, inputs, outputs) or not is_accelerated(x, weight_OI):
        return functional.linear(x, weight_OI, bias_O)
    learns = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (x, weight_OI, bias_O)
    )
    kinds: list[Kind] = ["forward"]
    if learns and x.requires_grad:
        kinds.append("input_gradient")
    if learns and weight_OI.requires_grad:
        kinds.append("weight_gradient")
    if all(chosen_library(kind, rows, inputs, outputs) == "plain" for kind in kinds):
        return functional.linear(x, weight_OI, bias_O)
    x_RI = x.reshape(-1, inputs)
    out_RO: Tensor = _Linear.apply(x_RI, weight_OI, bias_O) if learns else multiply(x_RI, weight_OI, bias_O)
    return out_RO.view(*x.shape[:-1], outputs)


def multiply(
    x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, out_RO: Tensor | None = None
) -> Tensor:
    """`x @ weight.T + bias`, `[R, O]`, for the forward pass of a function that computes its own gradient.

    Args:
        out_RO: is overwritten by the product; there is no bias then.
    """
    library = _library_of("forward", x_RI, weight_OI)
    if out_RO is None:
        return _forward(library, x_RI, weight_OI, bias_O)
    if library == "plain" or out_RO.numel() > BLOCK:
        return torch.mm(x_RI, weight_OI.T, out=out_RO)
    return out_RO.copy_(_forward(library, x_RI, weight_OI, None))


def input_gradient(grad_RO: Tensor, weight_OI: Tensor, total_RI: Tensor | None = None) -> Tensor:
    """`grad @ weight`, `[R, I]`, added to a total where one is given."""
    library = _library_of("input_gradient", grad_RO, weight_OI)
    if total_RI is None:
        return _input_gradient(library, grad_RO, weight_OI)
    if (library == "plain" or total_RI.numel() > BLOCK) and total_RI.dtype == grad_RO.dtype:
        return total_RI.addmm_(grad_RO, weight_OI)
    return total_RI.add_(_input_gradient(library, grad_RO, weight_OI))


def weight_gradient(grad_RO: Tensor, x_RI: Tensor, total_OI: Tensor | None = None) -> Tensor:
    """`grad.T @ x`, `[O, I]`, added to a total where one is given."""
    (rows, inputs), outputs, library = x_RI.shape, grad_RO.shape[1], "plain"
    if _pays(rows, inputs, outputs) and is_accelerated(grad_RO, x_RI):
        library = chosen_library("weight_gradient", rows, inputs, outputs)
    if total_OI is None:
        return _weight_gradient(library, grad_RO, x_RI)
    if library == "plain" and total_OI.dtype == grad_RO.dtype:
        return total_OI.addmm_(grad_RO.T, x_RI)
    outputs_at_once = max(1, BLOCK // max(inputs, 1))
    for first in range(0, outputs, outputs_at_once):
        block = slice(first, first + outputs_at_once)
        total_OI[block] += _weight_gradient(library, grad_RO[:, block], x_RI)
    return total_OI


class _Linear(torch.autograd.Function):
    """A product with bias; kept is its input where the weight is trained, and the weight where the input needs it."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        for_input, for_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x_RI if for_weight else None, weight_OI if for_input else None)
        return multiply(x_RI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_RI, weight_OI = ctx.saved_tensors
        for_input, for_weight, for_bias = ctx.needs_input_grad
        return (
            input_gradient(grad_RO, weight_OI) if for_input else None,
            weight_gradient(grad_RO, x_RI) if for_weight else None,
            grad_RO.sum(0) if for_bias else None,
        )


def is_accelerated(*tensors: Tensor) -> bool:
    """Whether products of these tensors may run by oneDNN: plain float32 tensors on a CPU, outside of autocast."""
    return (
        all(
            type(tensor) in (Tensor, nn.Parameter)
            and tensor.device.type == "cpu"
            and tensor.dtype == torch.float32
            for tensor in tensors
        )
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and has_onednn()
    )


@cache
def has_onednn() -> bool:
    """Whether PyTorch has the operator, which is private to its compiler."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _pays(rows: int, inputs: int, outputs: int) -> bool:
    return rows * inputs * outputs >= MIN_MULTIPLY_ADDS and inputs * outputs <= MAX_WEIGHT


def rounded_rows(rows: int) -> int:
    """The power of two at or below a number of rows: what is measured for it holds up to twice as many."""
    return 1 << (rows.bit_length() - 1)


def forced_library() -> str | None:
    """The library that the environment names for all products, or None.

    Raises:
        ValueError: it names another.
    """
    name = os.environ.get(ENVIRONMENT)
    if name and name not in ("plain", "onednn"):
        raise ValueError(f"{ENVIRONMENT} is plain, onednn or not set, and not {name!r}")
    return name or None


def _library_of(kind: Kind, rows_RX: Tensor, weight_OI: Tensor) -> str:
    outputs, inputs = weight_OI.shape
    if not _pays(len(rows_RX), inputs, outputs) or not is_accelerated(rows_RX, weight_OI):
        return "plain"
    return chosen_library(kind, len(rows_RX), inputs, outputs)


def chosen_library(kind: Kind, rows: int, inputs: int, outputs: int) -> str:
    """The library of a float32 product on this machine, whatever its size, with the threads that PyTorch has now.

    Returns:
        `plain`; `onednn`; or `onednn_transposed`, which lays out anew the transposed weight (gradient of the input)
        or the transposed result (gradient of the weight).
    """
    rows = rounded_rows(rows)
    key = f"{kind} {rows}x{inputs}x{outputs} threads {torch.get_num_threads()}"
    return forced_library() or CHOICES.choose(key, partial(_ways_to_multiply, kind, rows, inputs, outputs))


def _ways_to_multiply(kind: Kind, rows: int, inputs: int, outputs: int) -> Ways:
    rows = max(1, min(rows, MEASURED_MULTIPLY_ADDS // (inputs * outputs)))
    x_RI, weight_OI, grad_RO = numbers(rows, inputs), numbers(outputs, inputs), numbers(rows, outputs)
    if kind == "forward":
        return {name: partial(_forward, name, x_RI, weight_OI, None) for name in ("plain", "onednn")}
    libraries = ("plain", "onednn", "onednn_transposed")
    if kind == "input_gradient":
        return {name: partial(_input_gradient, name, grad_RO, weight_OI) for name in libraries}
    return {name: partial(_weight_gradient, name, grad_RO, x_RI) for name in libraries}


def numbers(*shape: int) -> Tensor:
    """A tensor for a measurement: no random numbers are drawn, of which a training would miss some."""
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)


def _forward(library: str, x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    if library == "plain":
        return functional.linear(x_RI, weight_OI, bias_O)
    return _multiply_by_onednn(x_RI, weight_OI, bias_O)


def _input_gradient(library: str, grad_RO: Tensor, weight_OI: Tensor) -> Tensor:
    if library == "plain":
        return grad_RO @ weight_OI
    weight_IO = weight_OI.T
    return _multiply_by_onednn(
        grad_RO, weight_IO.contiguous() if library == "onednn_transposed" else weight_IO, None
    )


def _weight_gradient(library: str, grad_RO: Tensor, x_RI: Tensor) -> Tensor:
    if library == "plain":
        return grad_RO.T @ x_RI
    if library == "onednn_transposed":
        return _multiply_by_onednn(x_RI.T, grad_RO.T, None).T.contiguous()
    return _multiply_by_onednn(grad_RO.T, x_RI.T, None)


def _multiply_by_onednn(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    weight_OI = without_gaps(weight_OI)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_RI, weight_OI, bias_O, "none", [], "")
    return product


def without_gaps(weight_OI: Tensor) -> Tensor:
    """The weight itself where it or its transpose is contiguous, else a copy: with a part of a larger tensor as weight
    oneDNN takes its reference loops, which are some thousand times slower."""
    if weight_OI.is_contiguous() or weight_OI.T.is_contiguous():
        return weight_OI
    return weight_OI.contiguous()
