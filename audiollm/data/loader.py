"""What a step trains on, made ahead of time in other processes; order and content do not depend on their number.

A step is a pure function of its number, so there is no state to keep: a run that goes on asks for its next step.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch.utils.data

from audiollm.data.sample import BadSample
from audiollm.files import write_text

T = TypeVar("T")


# Ahead of time


class Loader(Generic[T]):
    """`loader[step]` is `make(step)`, made ahead of time as long as steps are asked for one after the other.

    Any other step (a run that goes on, a trial, a roll-back) is taken too: what is under way is dropped, and the
    reading ahead goes on from there.

    Args:
        make: what to do in a worker. It has to survive pickling where there are workers (no lambda). Tensors come
            back through shared memory and cost a file descriptor each: give few and large ones.
        workers: processes; 0 makes each step here, when it is asked for.
        ahead: steps made before they are asked for, at least one a worker.

    Raises:
        ValueError: a negative number.
    """

    def __init__(self, make: Callable[[int], T], workers: int = 0, ahead: int = 4) -> None:
        if workers < 0 or ahead < 0:
            raise ValueError(f"workers and ahead must be 0 or more, not {workers} and {ahead}")
        self._make = make
        self._steps = _StepsFrom()
        self._loader = _start(make, self._steps, workers, ahead) if workers else None
        self._iterator: Iterator[T] | None = None
        self._next = -1

    def __getitem__(self, step: int) -> T:
        """`make(step)`.

        Raises:
            Exception: what `make` raised; from a worker, of the same type where it can be built from a text, else a
                RuntimeError, with the worker's traceback in its text.
        """
        if self._loader is None:
            return self._make(step)
        if step != self._next or self._iterator is None:
            self._steps.start = step
            self._iterator = iter(self._loader)
        self._next = -1  # an error leaves no one knows where
        made = next(self._iterator)
        self._next = step + 1
        return made

    def close(self) -> None:
        """End the workers; they start anew when a step is asked for."""
        self._iterator, self._next = None, -1
        if self._loader is not None:
            self._loader._iterator = None  # torch has no public way to end them


# Bad samples


class SetAside:
    """`set_aside.jsonl`: each bad sample once, over all passes and attempts of a run.

    Args:
        path: the file; rows of earlier attempts are kept.
        strict: raise at the first one instead.
    """

    def __init__(self, path: Path, strict: bool = False) -> None:
        self._path, self._strict = path, strict
        self.counts: Counter[str] = Counter()
        """Bad samples by kind."""
        self._seen: set[tuple[str, str, str]] = set()
        rows = list(_whole_rows(path))
        for row in rows:
            self._count(row)
        if path.exists():  # a last line that a kill cut short would spoil the next one
            write_text(path, "".join(_line(row) for row in rows))

    def add(self, bad: Iterable[BadSample]) -> None:
        """Write down those that are not there yet.

        Raises:
            BadSample: the first one, where `strict` is set; it is written down all the same.
        """
        for sample in bad:
            if self._count(sample.row()):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(_line(sample.row()))
            if self._strict:
                raise sample

    def _count(self, row: dict[str, str]) -> bool:
        key = (row["place"], row["id"], row["kind"])
        if key in self._seen:
            return False
        self._seen.add(key)
        self.counts[row["kind"]] += 1
        return True


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


def _start(
    make: Callable[[int], T], steps: _StepsFrom, workers: int, ahead: int
) -> torch.utils.data.DataLoader[T]:
    # not fork: that of a process with threads can hang. The server loads the modules once, for all workers.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["audiollm.data.loader", "audiollm.audio", "audiollm.data.shards"])
    return torch.utils.data.DataLoader(
        _Steps(make),
        sampler=steps,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=workers,
        prefetch_factor=max(1, -(-ahead // workers)),
        persistent_workers=True,
        multiprocessing_context=context,
    )


def _as_it_is(made: T) -> T:
    return made


def _whole_rows(path: Path) -> Iterator[dict[str, str]]:
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
        try:
            row: dict[str, Any] = json.loads(line)
            yield {key: str(row[key]) for key in ("place", "id", "reason", "kind")}
        except (json.JSONDecodeError, KeyError, TypeError):
            continue


def _line(row: dict[str, str]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
