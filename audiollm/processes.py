"""Processes that end with the one that made them, however that ends. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

_PR_SET_PDEATHSIG = 1

ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)
"""Environment of a worker beside others, with one thread."""
_M_MMAP_THRESHOLD = -3
_OWN_MAPPING_BYTES = 2**20
"""Bytes from which on a tensor's memory is a mapping, which goes back to the machine when the tensor does."""


def return_tensors_at_once() -> None:
    """Let freed tensors go back to the machine at once.

    glibc keeps those of less than 32 MB for what comes next, in pieces that fit little: steps of a LoRA training of a
    talker of 73 M parameters took 2.9 GB with them, and 1.5 GB without, in the same CPU time. Mappings cost as much
    however little is computed on them: a talker of 6.7 M took a third more CPU time.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)


def return_free_memory() -> None:
    """Give what this process has freed and keeps for later back to the machine."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def interrupts_held_back(by_multiprocessing: bool = True) -> Iterator[None]:
    """Start child processes inside: they inherit that Ctrl-C, which reaches the whole group, is not for them.

    It is this process that ends them. One that ignores the signal once it runs would still print a traceback when it
    came while it loaded its modules.

    Args:
        by_multiprocessing: multiprocessing starts them. Its resource tracker has to be there first: it would let the
            signal through again when it starts.
    """
    if by_multiprocessing:
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Called first thing in a worker: it is killed when its parent ends, even in the midst of native code.

    The kernel sees to it where it can (Linux): a signal at the end of the process that this one was forked from, which
    for a fork server ends with the command. A thread waits for the command itself; alone it would come late, since it
    needs the interpreter's lock, which native code may hold for seconds.
    """
    forked_from = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != forked_from:  # it ended before the kernel was told
        os._exit(1)
    if multiprocessing.parent_process() is not None:
        threading.Thread(target=_wait_for_end_of_parent, daemon=True).start()


def _wait_for_end_of_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
