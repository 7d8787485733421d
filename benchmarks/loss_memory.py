"""Peak memory and time of the loss and its backward pass: in chunks, against the logits as a whole.

    python benchmarks/loss_memory.py [--rows 2048] [--hidden 256]

Cases: `text`, a vocabulary of 128,256; `audio`, 8 codebooks of 1,026. Each side of a case runs in a process of its
own; its memory is the peak resident size less what it held before the loss (inputs and weight). The loss and the
gradients of both sides are compared: a relative difference above 1e-5 ends the benchmark with exit code 1. Time is
CPU-seconds of one thread. Linux only.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import torch
from measure import bench_parser, in_own_process, print_row, status_mb
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from audiollm.families.dual_ffn.losses import linear_cross_entropy

CASES = {"text": (1, 128_256), "audio": (8, 1026)}
"""Codebooks, and the words or codes of each."""
TOLERANCE = 1e-5
"""Relative difference of the loss, and of each gradient's norm."""


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rows", type=int, default=2048, help="positions with a target")
    parser.add_argument("--hidden", type=int, default=256)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for case in CASES:
            compare(case, arguments.rows, arguments.hidden, Path(name))


def compare(case: str, rows: int, hidden: int, folder: Path) -> None:
    """Measure and print one case."""
    results = {}
    for side in ("chunked", "dense"):
        results[side] = in_own_process(run, case, side, rows, hidden, folder / f"{case}-{side}")
    for place, (what, unit) in enumerate((("memory", "MB at the peak"), ("time", "CPU-s"))):
        ours, peer = results["chunked"][place], results["dense"][place]
        print_row("loss_memory", f"{case}, {rows} rows, {what}", ours, peer, unit, digits=2)
    gradients = [load_file(folder / f"{case}-{side}") for side in results]
    differences = {
        key: float((gradients[0][key] - gradients[1][key]).norm() / gradients[1][key].norm())
        for key in gradients[0]
    }
    print(json.dumps({"case": case, "relative difference": differences}), flush=True)
    if wrong := [key for key, value in differences.items() if not value <= TOLERANCE]:  # NaN is wrong too
        raise SystemExit(f"{case}: the two sides differ by more than {TOLERANCE:g} in {', '.join(wrong)}")


def run(case: str, side: str, rows: int, hidden: int, file: Path) -> tuple[float, float]:
    """MB above what was held before, and CPU-seconds; the loss and its gradients go into `file`."""
    torch.set_num_threads(1)
    hidden_XC, weight_VC, targets_XK, weights_XK = problem(*CASES[case], rows, hidden)
    warm_up(side)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    held, started = status_mb("VmRSS"), time.process_time()
    loss = SIDES[side](hidden_XC, weight_VC, targets_XK, weights_XK)
    loss.backward()
    seconds = time.process_time() - started
    peak = status_mb("VmHWM") - held
    assert hidden_XC.grad is not None and weight_VC.grad is not None
    save_file({"loss": loss.detach(), "hidden": hidden_XC.grad, "weight": weight_VC.grad}, file)
    return peak, seconds


def problem(books: int, vocabulary: int, rows: int, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_XC = torch.randn(rows, hidden, generator=generator).requires_grad_()
    weight_VC = torch.randn(books * vocabulary, hidden, generator=generator).mul_(0.02).requires_grad_()
    targets_XK = torch.randint(vocabulary, (rows, books), generator=generator)
    return hidden_XC, weight_VC, targets_XK, torch.full((rows, books), 1 / (rows * books))


def warm_up(side: str) -> None:
    """Run once, so that one-time allocations do not count as the loss's memory."""
    SIDES[side](*problem(2, 8, 4, 8)).backward()


def chunked(hidden_XC: Tensor, weight_VC: Tensor, targets_XK: Tensor, weights_XK: Tensor) -> Tensor:
    return linear_cross_entropy(hidden_XC, weight_VC, targets_XK, weights_XK).total


def dense(hidden_XC: Tensor, weight_VC: Tensor, targets_XK: Tensor, weights_XK: Tensor) -> Tensor:
    logits = functional.linear(hidden_XC, weight_VC).unflatten(1, (targets_XK.shape[1], -1))
    losses = functional.cross_entropy(logits.flatten(0, 1), targets_XK.flatten(), reduction="none")
    return (losses * weights_XK.flatten()).sum()


SIDES = {"chunked": chunked, "dense": dense}


if __name__ == "__main__":
    main()
