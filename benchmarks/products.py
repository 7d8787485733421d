"""Products of rows with weights in float32 on a CPU: GFLOP/s of PyTorch's own way (MKL), of oneDNN, and what is chosen.

    python benchmarks/products.py [--threads 1] [--full]

A line for each shape and each of the three products of a training step. `ours` is the way that `audiollm.products`
takes after its measurement, `peer` PyTorch's own. With `MKL_ENABLE_INSTRUCTIONS=AVX2` MKL is slow as on other
processors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from measure import bench_parser, parse_options, print_row
from torch import Tensor

from audiollm import products
from audiollm.measured_choices import MeasuredChoices

SHAPES = [(8, 512, 512), (64, 512, 2048), (1024, 256, 1024), (1024, 512, 2048), (2048, 1024, 1024)]
"""Rows, inputs, outputs."""
FULL_SHAPES = [(1, 512, 512), (16, 512, 2048), (256, 512, 2048), (2048, 1024, 4096), (512, 576, 49152)]
SECONDS = 0.3
"""Of each measurement, in turns with the other way."""


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    options = parse_options(parser)
    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as folder:
        products.CHOICES = MeasuredChoices(Path(folder) / "fastest.json")
        for rows, inputs, outputs in SHAPES + (FULL_SHAPES if options.full else []):
            compare(rows, inputs, outputs)


def compare(rows: int, inputs: int, outputs: int) -> None:
    """Print the lines of a shape."""
    x_RI, weight_OI, grad_RO = (
        torch.randn(*shape) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    cases: dict[products.Kind, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "forward": (
            partial(products.multiply, x_RI, weight_OI),
            partial(torch.nn.functional.linear, x_RI, weight_OI),
        ),
        "input_gradient": (partial(products.input_gradient, grad_RO, weight_OI), lambda: grad_RO @ weight_OI),
        "weight_gradient": (partial(products.weight_gradient, grad_RO, x_RI), lambda: grad_RO.T @ x_RI),
    }
    for kind, (ours, peer) in cases.items():
        torch.testing.assert_close(ours(), peer(), rtol=1e-4, atol=1e-2)
        seconds = fastest_seconds(ours, peer)
        ours_rate, peer_rate = (2e-9 * rows * inputs * outputs / value for value in seconds)
        chosen = products.chosen_library(kind, rows, inputs, outputs)
        case = f"{kind} {rows} x {inputs} x {outputs}"
        print_row(
            "products", case, ours_rate, peer_rate, "GFLOP/s", more_is_better=True, digits=1, chosen=chosen
        )


def fastest_seconds(*ways: Callable[[], Tensor]) -> list[float]:
    """The least time of a call of each way, in turns."""
    fastest, ends = [float("inf")] * len(ways), time.monotonic() + SECONDS * len(ways)
    while time.monotonic() < ends:
        for index, way in enumerate(ways):
            started = time.perf_counter()
            way()
            fastest[index] = min(fastest[index], time.perf_counter() - started)
    return fastest


if __name__ == "__main__":
    main()
