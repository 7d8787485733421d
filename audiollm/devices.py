"""Devices and threads of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def default_device() -> torch.device:
    """The GPU where there is one (this process's own, in a distributed run)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread while single clips are processed: on so little work more threads are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
