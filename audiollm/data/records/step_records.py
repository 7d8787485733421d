"""The records of each step of a training: the usable ones, found by one look at each, drawn by the step's number.

A step is a pure function of its number: nothing here has a state. Shapes: N records of a source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from audiollm.data.records.mixture import Mixture, StepDraws, evenly
from audiollm.data.records.sample import Sample
from audiollm.data.records.source import LoadedSample, Source
from audiollm.errors import BadSample
from audiollm.files.set_aside import SetAside

WINDOW_RUNS = 64
"""Runs of 64 records that are shuffled together; a smaller source is shuffled as a whole."""
MAX_HELD_OUT = 256
"""Held-out records of each source that an evaluation looks at, at most, evenly picked."""

RecordPlace = tuple[int, int]
"""A source's number, and that of a record in it."""


@dataclass(frozen=True)
class UsableRecords:
    """Numbers of the records of each source that are trained on, and of those that are held out."""

    train: list[NDArray[np.int64]]
    """int64 `[N]` each."""
    held_out: list[NDArray[np.int64]]
    """int64 `[N]` each: records whose metadata say `split: test`."""
    num_bad: int
    """Records that cannot be used."""

    @property
    def num_trained(self) -> int:
        """Records that are trained on."""
        return sum(map(len, self.train))

    @property
    def num_held_out(self) -> int:
        """Records that are held out."""
        return sum(map(len, self.held_out))

    def held_out_places(self) -> list[RecordPlace]:
        """The held-out records that evaluations look at."""
        return [
            (place, int(used[number]))
            for place, used in enumerate(self.held_out)
            for number in evenly(len(used), MAX_HELD_OUT)
        ]


def find_usable(
    sources: Sequence[Source],
    check: Callable[[Sample, str], object],
    set_aside: SetAside,
    advance: Callable[[], None] = lambda: None,
) -> UsableRecords:
    """Read every record once, without its sound.

    Args:
        check: raises `BadSample` for a record, read at a place, that cannot be used.

    Raises:
        BadSample: the first bad one, where `set_aside` is strict.
    """
    train: list[list[int]] = [[] for _ in sources]
    held_out: list[list[int]] = [[] for _ in sources]
    num_bad = 0
    for number, source in enumerate(sources):
        set_aside.add(source.bad)
        num_bad += len(source.bad)
        for index in range(len(source)):
            advance()
            try:
                sample = source[index].sample
                check(sample, name_of(sources, (number, index)))
            except BadSample as bad:
                set_aside.add([bad.with_traceback(None)])
                num_bad += 1
                continue
            (held_out if sample.is_held_out else train)[number].append(index)
    numbers = [[np.array(indices, np.int64) for indices in split] for split in (train, held_out)]
    return UsableRecords(train=numbers[0], held_out=numbers[1], num_bad=num_bad)


def first_records(sources: Sequence[Source], usable: UsableRecords, count: int) -> Iterator[LoadedSample]:
    """Read up to so many records of each source that are trained on."""
    for source, indices in zip(sources, usable.train, strict=True):
        for index in indices[:count]:
            with suppress(BadSample):
                yield source[int(index)]


class StepPlaces:
    """`places(step)` are the records of a step, over all ranks.

    Raises:
        ValueError: weights that the sources cannot have.
    """

    def __init__(self, usable: UsableRecords, draws: StepDraws) -> None:
        self._train, self._batch_size = usable.train, draws.batch_size
        sizes = [len(indices) for indices in usable.train]
        self._mixture = Mixture(sizes, draws.weights, draws.seed, window_runs=WINDOW_RUNS)

    def __call__(self, step: int) -> list[RecordPlace]:
        first = step * self._batch_size
        items = self._mixture.items(first, first + self._batch_size)
        return [(item.source, int(self._train[item.source][item.index])) for item in items]


def name_of(sources: Sequence[Source], place: RecordPlace) -> str:
    """Where a record was read, for errors."""
    number, index = place
    return f"{sources[number].name} [{index}]"
