"""Devices and threads of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

CPU_FACTS = Path("/proc/cpuinfo")


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


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread while single clips are processed: on so little work more threads are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
