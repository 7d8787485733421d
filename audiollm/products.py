"""Products of rows with weights, in float32 on a CPU, by the library that is faster there: PyTorch's own, or oneDNN.

PyTorch sends float32 products to MKL. On some processors oneDNN takes half the time for the same numbers up to
rounding, on others as long or longer, and with few rows MKL is ahead. A measurement on the machine decides, for each
kind of product (forward, gradient of the input, gradient of the weight), shape and number of threads: some milliseconds
when a shape is first met. What was measured is kept in a file of the user's cache and with every checkpoint, so that a
training that goes on after a kill computes the same bits. Everything else (GPUs, other dtypes, autocast, compiled or
sharded weights, small products, a PyTorch without the operator) goes the plain way.

`AUDIOLLM_PRODUCTS=plain` or `AUDIOLLM_PRODUCTS=onednn` decides for all shapes without a measurement.

Shapes: R rows, I input features, O output features.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

Library = Literal["plain", "onednn", "onednn_transposed"]
"""PyTorch's own way; oneDNN; oneDNN with the transposed weight, or for a weight's gradient the transposed result, laid
out anew."""
Kind = Literal["forward", "input_gradient", "weight_gradient"]

ENVIRONMENT = "AUDIOLLM_PRODUCTS"
"""Environment variable that names the library of all products."""
MIN_MULTIPLY_ADDS = 2**22
"""Multiply-adds of a product below which a call costs as much as the work: those go the plain way."""
MEASURED_MULTIPLY_ADDS = 2**28
"""Multiply-adds of a product that is measured; larger ones are measured with fewer rows."""
MIN_GAIN = 1.05
"""How many times as fast as the plain way another has to be."""
REPEATS = 4
CPU_FACTS = Path("/proc/cpuinfo")
_CPU_KEYS = ("model name", "cpu family", "model", "stepping", "flags")


class ProductShape(NamedTuple):
    """What a library is chosen for."""

    kind: Kind
    rows: int
    """The power of two at or below the number of rows."""
    inputs: int
    outputs: int
    threads: int

    @property
    def key(self) -> str:
        return f"{self.kind} {self.rows}x{self.inputs}x{self.outputs} {self.threads}"


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
    rows = x.numel() // inputs if inputs else 0
    if not _is_eligible(x, weight_OI, rows):
        return functional.linear(x, weight_OI, bias_O)
    learns = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (x, weight_OI, bias_O)
    )
    if not learns:
        return multiply(x.reshape(-1, inputs), weight_OI, bias_O).view(*x.shape[:-1], outputs)
    kinds: tuple[Kind, ...] = ("forward", "input_gradient", "weight_gradient")
    if all(_library(kind, rows, weight_OI) == "plain" for kind in kinds):
        return functional.linear(x, weight_OI, bias_O)
    product: Tensor = _Linear.apply(x.reshape(-1, inputs), weight_OI, bias_O)
    return product.view(*x.shape[:-1], outputs)


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
    if library == "plain":
        return torch.mm(x_RI, weight_OI.T, out=out_RO)
    return out_RO.copy_(_forward(library, x_RI, weight_OI, None))


def input_gradient(grad_RO: Tensor, weight_OI: Tensor, total_RI: Tensor | None = None) -> Tensor:
    """`grad @ weight`, `[R, I]`, added to a total where one is given."""
    library = _library_of("input_gradient", grad_RO, weight_OI)
    if total_RI is None:
        return _input_gradient(library, grad_RO, weight_OI)
    if library == "plain" and total_RI.dtype == grad_RO.dtype:
        return total_RI.addmm_(grad_RO, weight_OI)
    return total_RI.add_(_input_gradient(library, grad_RO, weight_OI))


def weight_gradient(grad_RO: Tensor, x_RI: Tensor, total_OI: Tensor | None = None) -> Tensor:
    """`grad.T @ x`, `[O, I]`, added to a total where one is given."""
    library: Library = "plain"
    rows, outputs, inputs = len(x_RI), grad_RO.shape[1], x_RI.shape[1]
    if rows * outputs * inputs >= MIN_MULTIPLY_ADDS and _is_float32_on_cpu(grad_RO, x_RI):
        library = LIBRARIES.choose(_shape("weight_gradient", rows, inputs, outputs))
    if total_OI is None:
        return _weight_gradient(library, grad_RO, x_RI)
    if library == "plain" and total_OI.dtype == grad_RO.dtype:
        return total_OI.addmm_(grad_RO.T, x_RI)
    return total_OI.add_(_weight_gradient(library, grad_RO, x_RI))


class _Linear(torch.autograd.Function):
    """A product with bias; its input and weight are kept."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_RI, weight_OI)
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


class ProductLibraries:
    """The library of each shape: as restored, as kept by an earlier process, or as measured now."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._chosen: dict[str, Library] = {}
        self._guard = threading.RLock()

    @property
    def path(self) -> Path:
        """The file that keeps what was measured on this machine, with this version of PyTorch."""
        if self._path is None:
            root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            self._path = Path(root) / "audiollm" / f"products-{machine_digest()}.json"
        return self._path

    def choose(self, shape: ProductShape) -> Library:
        """The library of a shape; it is measured when it is first met."""
        forced = os.environ.get(ENVIRONMENT)
        if forced in ("plain", "onednn"):
            return "plain" if forced == "plain" else "onednn"
        library = self._chosen.get(shape.key)
        if library is None:
            with self._guard:
                library = self._chosen.get(shape.key) or self._keep(shape)
        return library

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON values."""
        return {"machine": machine_digest(), "libraries": dict(sorted(self._chosen.items()))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as a run began; what was measured on another machine says nothing here."""
        if state.get("machine") == machine_digest():
            with self._guard:
                self._chosen.update(state["libraries"])

    def _keep(self, shape: ProductShape) -> Library:
        """Take what a process of this machine has measured, or measure, and keep it for all."""
        try:
            with _locked(self.path) as kept:
                if shape.key not in kept:
                    kept[shape.key] = measure_libraries(shape)
                self._chosen[shape.key] = kept[shape.key]
        except OSError:  # no place to write: each process measures for itself
            self._chosen[shape.key] = measure_libraries(shape)
        return self._chosen[shape.key]


LIBRARIES = ProductLibraries()
"""The libraries of this process."""


def measure_libraries(shape: ProductShape) -> Library:
    """The fastest library for a product of this shape, with the threads that PyTorch has now.

    The least time of several runs in turns counts: others may have met a busy neighbour.
    """
    rows = max(1, min(shape.rows, MEASURED_MULTIPLY_ADDS // (shape.inputs * shape.outputs)))
    with torch.inference_mode(False), torch.no_grad():
        x_RI, weight_OI = _numbers(rows, shape.inputs), _numbers(shape.outputs, shape.inputs)
        grad_RO = _numbers(rows, shape.outputs)
        runs: dict[Library, Callable[[], Tensor]] = {}
        for library in ("plain", "onednn", "onednn_transposed"):
            if shape.kind == "forward":
                runs[library] = partial(_forward, library, x_RI, weight_OI, None)
            elif shape.kind == "input_gradient":
                runs[library] = partial(_input_gradient, library, grad_RO, weight_OI)
            else:
                runs[library] = partial(_weight_gradient, library, grad_RO, x_RI)
        if shape.kind == "forward":
            del runs["onednn_transposed"]  # nothing to transpose
        seconds: dict[Library, float] = dict.fromkeys(runs, math.inf)
        for run in runs.values():
            run()
        for _ in range(REPEATS):
            for library, run in runs.items():
                started = time.perf_counter()
                run()
                seconds[library] = min(seconds[library], time.perf_counter() - started)
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[fastest] * MIN_GAIN < seconds["plain"] else "plain"


@cache
def machine_digest() -> str:
    """Names this kind of processor, PyTorch, and what chooses MKL's instructions."""
    cpu = CPU_FACTS.read_text().split("\n\n")[0] if CPU_FACTS.is_file() else ""
    facts = [line for line in cpu.splitlines() if line.split(":")[0].strip() in _CPU_KEYS]
    facts += [torch.__version__, torch.backends.cpu.get_cpu_capability()]
    facts += [
        f"{key}={value}"
        for key, value in sorted(os.environ.items())
        if key.startswith(("MKL_ENABLE", "ONEDNN_MAX"))
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


@cache
def has_onednn() -> bool:
    """Whether PyTorch has the operator, which is private to its compiler."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _is_float32_on_cpu(*tensors: Tensor) -> bool:
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


def _is_eligible(x: Tensor, weight_OI: Tensor, rows: int) -> bool:
    return rows * weight_OI.numel() >= MIN_MULTIPLY_ADDS and _is_float32_on_cpu(x, weight_OI)


def _library_of(kind: Kind, rows_RX: Tensor, weight_OI: Tensor) -> Library:
    if not _is_eligible(rows_RX, weight_OI, len(rows_RX)):
        return "plain"
    return _library(kind, len(rows_RX), weight_OI)


def _library(kind: Kind, rows: int, weight_OI: Tensor) -> Library:
    outputs, inputs = weight_OI.shape
    return LIBRARIES.choose(_shape(kind, rows, inputs, outputs))


def _shape(kind: Kind, rows: int, inputs: int, outputs: int) -> ProductShape:
    return ProductShape(kind, 1 << (rows.bit_length() - 1), inputs, outputs, torch.get_num_threads())


def _forward(library: Library, x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    if library == "plain":
        return functional.linear(x_RI, weight_OI, bias_O)
    return _multiply_by_onednn(x_RI, weight_OI, bias_O)


def _input_gradient(library: Library, grad_RO: Tensor, weight_OI: Tensor) -> Tensor:
    if library == "plain":
        return grad_RO @ weight_OI
    weight_IO = weight_OI.T
    return _multiply_by_onednn(
        grad_RO, weight_IO.contiguous() if library == "onednn_transposed" else weight_IO, None
    )


def _weight_gradient(library: Library, grad_RO: Tensor, x_RI: Tensor) -> Tensor:
    if library == "plain":
        return grad_RO.T @ x_RI
    if library == "onednn_transposed":
        return _multiply_by_onednn(x_RI.T, grad_RO.T, None).T.contiguous()
    return _multiply_by_onednn(grad_RO.T, x_RI.T, None)


def _multiply_by_onednn(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_RI, weight_OI, bias_O, "none", [], "")
    return product


def _numbers(rows: int, columns: int) -> Tensor:
    """A matrix for a measurement: no random numbers are drawn, of which a training would miss some."""
    return torch.linspace(-1, 1, rows * columns).view(rows, columns)


@contextmanager
def _locked(path: Path) -> Iterator[dict[str, Library]]:
    """What a file keeps, while no other process changes it; what the block adds is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        kept: dict[str, Library] = {}
        with suppress(ValueError):  # cut by a full disk: measured again
            kept.update(json.loads(text or "{}"))
        before = dict(kept)
        yield kept
        if kept != before:
            file.seek(0)
            file.truncate()
            json.dump(kept, file, indent=0, sort_keys=True)
