"""Devices and threads of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.measured_choices import CHOICES, Ways
from audiollm.products import multiply, numbers

_BF16_ROWS, _BF16_FEATURES = 512, 768
"""Of the products by which bf16 is compared with float32."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; to a GPU from pinned memory without waiting for the work before it."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def default_device() -> torch.device:
    """The GPU where there is one (this process's own, in a distributed run)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_bf16_fast(device: torch.device) -> bool:
    """Whether products in bf16, with the casts of autocast, take less time than in float32; on a CPU as measured."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    key = f"bf16 {_BF16_ROWS}x{_BF16_FEATURES} threads {torch.get_num_threads()}"
    return CHOICES.choose(key, _precisions) == "bf16"


def _precisions() -> Ways:
    rows_RI, weight_OI = numbers(_BF16_ROWS, _BF16_FEATURES), numbers(_BF16_FEATURES, _BF16_FEATURES)
    half = torch.bfloat16
    return {
        "fp32": lambda: multiply(rows_RI, weight_OI),
        "bf16": lambda: functional.linear(rows_RI.to(half), weight_OI.to(half)).float(),
    }


@contextmanager
def at_least_threads(threads: int) -> Iterator[None]:
    """Let torch use so many threads, or what it uses already."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, threads))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread while single clips are processed: on so little work more threads are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
