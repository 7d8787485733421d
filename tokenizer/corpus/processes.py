"""Work on samples in several processes, each with a codec of its own; results come in the samples' order."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, TypeVar

import torch

from audiollm.errors import StageError
from audiollm.processes import interrupts_held_back

Task = TypeVar("Task")
Result = TypeVar("Result")
AHEAD = 4
"""Tasks of a worker that are begun before the oldest is waited for."""


def work_in_processes(
    tasks: Iterable[tuple[int, Task]],
    work: Callable[[Task], Result],
    workers: int,
    start: Callable[[], None],
) -> Iterator[tuple[int, Result]]:
    """The number and the result of each task, in order.

    Args:
        tasks: numbered; `work` gets the second part.
        work: a function of a module, called in the workers.
        workers: number of processes; each computes with one thread.
        start: called once in each worker before any work.

    Raises:
        StageError: a worker has died.
    """
    # spawned: the fork of a process with torch's threads can hang
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, partial(_start_worker, start))
    ahead: deque[tuple[int, Future[Result]]] = deque()
    try:
        for number, task in tasks:
            with interrupts_held_back():
                ahead.append((number, pool.submit(work, task)))
            if len(ahead) >= AHEAD * workers:
                first, future = ahead.popleft()
                yield first, future.result()
        for first, future in ahead:
            yield first, future.result()
    except BrokenProcessPool as error:
        remedy = "if memory ran out, take fewer workers; the same command goes on"
        raise StageError("a worker process has died", remedy) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(start: Callable[[], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the main process that stops the pool
    torch.set_num_threads(1)
    start()
