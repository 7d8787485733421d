"""What benchmarks share: options with `--full`, JSON lines, sides in turns, memory and CPU time of processes.

By default every benchmark ends within 4 minutes of a quiet machine of two cores; `--full` has the sizes with which the
figures of RESULTS.md were measured.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

PR_SET_CHILD_SUBREAPER = 36
"""Linux's prctl option by which a process adopts its orphaned descendants."""

Result = TypeVar("Result")


def bench_parser(description: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark, whose options `parse_options` reads."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parse_options(parser: argparse.ArgumentParser, **full: Any) -> argparse.Namespace:
    """Read the command line.

    Args:
        full: values with `--full`, in place of the defaults of options that the command line does not give.
    """
    sizes = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in full.items())
    parser.add_argument("--full", action="store_true", help=f"takes more than 4 minutes: {sizes}")
    if parser.parse_known_args()[0].full:
        parser.set_defaults(**full)
    return parser.parse_args()


def print_row(
    bench: str,
    case: str,
    ours: float,
    peer: float | None,
    unit: str,
    *,
    more_is_better: bool = False,
    ratio: float | None = None,
    digits: int = 4,
    **more: Any,
) -> None:
    """Print a JSON line, with the number of times that ours is better where there is a peer.

    Args:
        ratio: in place of that of ours and peer.
        more: entries that are printed as they are.
    """
    better, worse = (ours, peer) if more_is_better else (peer, ours)
    if ratio is None and better is not None and worse:
        ratio = better / worse
    line = {"bench": bench, "case": case, "ours": round(ours, digits), "peer": peer and round(peer, digits)}
    line |= {"ratio": None if ratio is None else round(ratio, 3), "unit": unit}
    print(json.dumps({**line, **more}), flush=True)


def in_turns(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """CPU-seconds of each side, which take turns in one process; the first round is thrown away."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, work in sides.items():
            began = time.process_time()
            work()
            if turn:
                seconds[name].append(time.process_time() - began)
    return seconds


def in_own_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """The result of a function in a fresh process, whose memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def status_mb(field: str) -> float:
    """A memory figure of this process alone, `VmRSS` or `VmHWM` (getrusage would count its parent), in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def peak_mb_of(work: Callable[[], Any]) -> float:
    """Peak resident memory while it works, in MB above what was held before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    held = status_mb("VmRSS")
    work()
    return status_mb("VmHWM") - held


def adopt_descendants() -> None:
    """Count the CPU time of processes whose parents end before they do."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def cpu_seconds() -> float:
    """CPU-seconds of this process and of its descendants that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)
