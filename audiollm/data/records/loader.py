"""Loading of training steps ahead of time in worker processes, whose number changes neither order nor content.

A step is a pure function of its number, so the loader keeps no state: a resumed run asks for its next step.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
import torch.utils.data

from audiollm.processes import end_with_parent, interrupts_held_back

T = TypeVar("T")


class Loader(Generic[T]):
    """`loader[step]` is `make(step)`, made ahead of time as long as steps are asked for one after the other.

    Any other step (a run that goes on, a trial, a roll-back) is taken too: what is under way is dropped, and the
    reading ahead goes on from there.

    Args:
        make: what to do in a worker. It has to survive pickling where there are workers (no lambda). Tensors come
            back through shared memory and cost a file descriptor each: give few and large ones.
        workers: processes; 0 makes each step here, when it is asked for.
        ahead: steps made before they are asked for, at least one a worker.
        pinned: each step is handed over in pinned memory, by its `pin_memory`. Needs a GPU.

    Raises:
        ValueError: a negative number.
    """

    def __init__(
        self, make: Callable[[int], T], workers: int = 0, ahead: int = 4, pinned: bool = False
    ) -> None:
        if workers < 0 or ahead < 0:
            raise ValueError(f"workers and ahead must be >= 0, not {workers} and {ahead}")
        self._make = make
        self._steps = _StepsFrom()
        self._pinned = pinned
        self._loader = _start_loader(make, self._steps, workers, ahead, pinned) if workers else None
        self._iterator: Iterator[T] | None = None
        self._next = -1

    def __getitem__(self, step: int) -> T:
        """`make(step)`.

        Raises:
            Exception: what `make` raised; from a worker, of the same type where it can be built from a text, else a
                RuntimeError, with the worker's traceback in its text.
        """
        if self._loader is None:
            here: Any = self._make(step)
            return here.pin_memory() if self._pinned else here
        if step != self._next or self._iterator is None:
            self._steps.start = step
            with interrupts_held_back():
                self._iterator = iter(self._loader)
        self._next = -1  # an error leaves no one knows where
        result = next(self._iterator)
        self._next = step + 1
        return result

    def close(self) -> None:
        """End the workers; they start anew when a step is asked for."""
        self._iterator, self._next = None, -1
        if self._loader is not None:
            self._loader._iterator = None  # torch has no public way to end them


# Private


class _Steps(torch.utils.data.Dataset[T]):
    """`make` as torch's DataLoader wants it."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make

    def __getitem__(self, step: int) -> T:
        return self._make(step)


class _StepsFrom(torch.utils.data.Sampler[int]):
    """Consecutive steps without end."""

    def __init__(self) -> None:
        self.start = 0

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.start)


def _start_loader(
    make: Callable[[int], T], steps: _StepsFrom, workers: int, ahead: int, pinned: bool
) -> torch.utils.data.DataLoader[T]:
    # not fork: that of a process with threads can hang. The server loads the modules once, for all workers.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "audiollm.fork_server",
            "audiollm.data.records.loader",
            "audiollm.audio",
            "audiollm.data.records.shards",
            make.__module__,
        ]
    )
    return torch.utils.data.DataLoader(
        _Steps(make),
        sampler=steps,
        batch_size=None,
        collate_fn=_return_item,
        num_workers=workers,
        prefetch_factor=max(1, -(-ahead // workers)),
        persistent_workers=True,
        pin_memory=pinned,
        multiprocessing_context=context,
        worker_init_fn=_end_with_parent,
        generator=torch.Generator(),  # else it draws from the global one, and dropout after it is another
    )


def _end_with_parent(worker: int) -> None:
    """Torch looks after its parent between steps alone: handing one over that nobody takes, a worker would stay."""
    end_with_parent()


def _return_item(item: T) -> T:
    return item
