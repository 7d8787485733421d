"""Devices and threads of this process."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

CPU_FACTS = Path("/proc/cpuinfo")
CORE_TFLOPS = 0.073
"""Products in float32, in 10^12 operations per second, of the core that stages' `core_seconds` were measured on (AMD
EPYC with AVX2)."""
TRAINING_SHARE = 0.63
"""Share of that rate which trainings of size tiny reach on one core."""
_PRODUCT_SIZE = {"cpu": 512, "cuda": 4096}


def default_device() -> torch.device:
    """The GPU where there is one (this process's own, in a distributed run)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@cache
def is_amd_cpu() -> bool:
    """Whether the CPU is AMD's; False where the system does not tell."""
    return CPU_FACTS.is_file() and "AuthenticAMD" in CPU_FACTS.read_text()


def is_bf16_fast(device: torch.device) -> bool:
    """Whether products in bf16 take less time than in float32.

    On CPUs: by matrix units (AMX), and by AVX512_BF16 on AMD's, where a training step takes half the time. Without AMX,
    Intel's take 1.6 times as long as in float32 (products of 768 to 2,048 rows, one thread, torch 2.14).
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    if torch.cpu._is_amx_tile_supported():
        return True
    return bool(torch.cpu._is_avx512_bf16_supported()) and is_amd_cpu()


def product_tflops(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Rate of matrix products, on the CPU with one thread, in 10^12 operations per second.

    The fastest product counts: others may have met a busy neighbour.
    """
    size = _PRODUCT_SIZE[device.type]
    a_SS, b_SS = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    fastest, ends = math.inf, time.monotonic() + seconds
    with one_thread():
        while fastest == math.inf or time.monotonic() < ends:
            started = time.perf_counter()
            torch.mm(a_SS, b_SS)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            fastest = min(fastest, time.perf_counter() - started)
    return 2 * size**3 / fastest / 1e12


def measured_speed() -> tuple[float, float]:
    """Measure this machine for `plan`, with a second of matrix products.

    Returns:
        Training throughput at size tiny on the default device, in 10^12 operations per second; on a CPU with all
        threads of torch, which multiply the rate of one thread by the square root of their number (two threads:
        1.2 to 1.6 times, measured).
        Speed of one core relative to the core of `CORE_TFLOPS`, by which `core_seconds` are divided.
    """
    device, cpu = default_device(), torch.device("cpu")
    core = product_tflops(cpu, torch.float32)
    dtype = torch.bfloat16 if is_bf16_fast(device) else torch.float32
    threads = torch.get_num_threads() if device == cpu else 1
    return TRAINING_SHARE * product_tflops(device, dtype) * math.sqrt(threads), core / CORE_TFLOPS


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread while single clips are processed: on so little work more threads are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
