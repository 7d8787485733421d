"""What the cases of `gpu.py` share: their size, the time that is left, JSON lines, timing, memory, MFU."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from audiollm.devices import default_device
from audiollm.train.loop.monitor import PEAK_FLOPS

PEAK = PEAK_FLOPS["H100"]
"""Dense bf16 operations per second of H100 SXM and of H200, 989e12 by NVIDIA's data sheets."""
FRAME_RATE = 25
"""Audio frames per second of sound."""
MIN_OPTION_S = 6.0
"""Least time before the end of a case in which another option is still measured."""


@dataclass(frozen=True)
class Scale:
    """The size of a case's models, and the time of its process."""

    tiny: bool
    ends: float
    """When the case's process is ended, by `time.monotonic`."""

    @property
    def name(self) -> str:
        return "tiny" if self.tiny else "1b"

    @property
    def remaining_s(self) -> float:
        """Seconds to the end of the case's process."""
        return self.ends - time.monotonic()

    def seconds(self, most: float) -> float:
        """Seconds for a measurement: `most`, less near the end, and none at tiny size."""
        return 0.0 if self.tiny else max(0.0, min(most, self.remaining_s / 4))


def tell(
    case: str,
    unit: str,
    ours: float,
    peer: float | None = None,
    *,
    less: bool = False,
    plain: float | None = None,
    **more: Any,
) -> None:
    """Print a line; `ratio` is that of ours and the peer's figure, of an option that with it and without.

    Args:
        less: a smaller figure is the better one.
        plain: the figure without the option that the line is of.
        more: entries that are printed as they are; None: left out.
    """
    line: dict[str, Any] = {"bench": "gpu", "case": case, "ours": rounded(ours)}
    line["peer"] = None if peer is None else rounded(peer)
    base = peer if plain is None else plain
    line["ratio"] = None if base is None else rounded(base / ours if less else ours / base)
    if plain is not None:
        line["plain"] = rounded(plain)
    line |= {"unit": unit, **{key: value for key, value in more.items() if value is not None}}
    print(json.dumps(line), flush=True)


def leave_out(case: str, reason: str) -> None:
    """Print a line that says why a case or an option of it is not measured."""
    reason = " ".join(reason.split())
    print(json.dumps({"bench": "gpu", "case": case, "left_out": f"{reason:.300}"}), flush=True)


def try_option(scale: Scale, case: str, measure: Callable[[], Any]) -> None:
    """Measure an option, or a peer; print why not, where it cannot run here or the time is over."""
    if scale.remaining_s < MIN_OPTION_S:
        leave_out(case, f"no time: the case ends in {scale.remaining_s:.0f} s")
        return
    try:
        measure()
    except (Exception, SystemExit) as error:  # the figures before it stand without it
        leave_out(case, f"{type(error).__name__}: {error}")
    forget_peak()


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[int], Any], seconds: float, warm: int = 2, min_calls: int = 3) -> float:
    """Median seconds of `work`, which is given the number of its call, called until the time is over."""
    for number in range(warm):
        work(number)
    times: list[float] = []
    synchronize()
    began = time.perf_counter()
    for number in count(warm):
        started = time.perf_counter()
        work(number)
        synchronize()
        times.append(time.perf_counter() - started)
        if len(times) >= min_calls and time.perf_counter() - began > seconds:
            return statistics.median(times)
    raise AssertionError


def rate_of(work: Callable[[int], Any], seconds: float, warm: int, calls: int) -> float:
    """Mean seconds of `work` over calls that wait for the device only at their end.

    Args:
        warm: calls before those that count.
        calls: least number of calls; more until the time is over.
    """
    for number in range(warm):
        work(number)
    synchronize()
    began = time.perf_counter()
    for number in count(1):
        work(warm + number - 1)
        if number >= calls and time.perf_counter() - began > seconds:
            synchronize()
            return (time.perf_counter() - began) / number
    raise AssertionError


def peak_gb() -> float | None:
    """The most memory of tensors on the GPU since `forget_peak`, GB; None without a GPU."""
    return rounded(torch.cuda.max_memory_allocated() / 1e9) if torch.cuda.is_available() else None


def forget_peak() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def compile_backend(scale: Scale) -> str:
    """Return the backend of `torch.compile`: at tiny size none that writes kernels, whose compiler takes minutes."""
    return "eager" if scale.tiny else "inductor"


def compiled_graphs() -> int:
    """The graphs that `torch.compile` has made in this process: more than a few mean that shapes are met anew."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def mfu(operations: float, seconds: float) -> float:
    return rounded(operations / seconds / PEAK)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def device_name() -> str:
    device = default_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
