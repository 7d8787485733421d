"""Progress of long work: a bar on a terminal; in a log, where a bar would not be seen, a line every 30 seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_SECONDS = 30.0
"""Longest time without a line in a log."""
COLUMNS = (
    TextColumn("  {task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)


class ProgressLog:
    """Lines on the work at hand, at least one every `LINE_SECONDS`; none where the console is a terminal.

    Args:
        console: receives the lines.
        name: of the whole work, for the time in which no bar tells more.
    """

    def __init__(self, console: Console, name: str) -> None:
        self._console, self._name = console, name
        self._started = time.monotonic()
        self._lines: list[_TaskLine] = []
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ProgressLog:
        if not (self._console.is_terminal or self._console.quiet):
            self._thread = threading.Thread(target=self._write, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End the lines. A thread that outlived this could free a model while the interpreter shuts down."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def bar(
        self,
        description: str,
        total: float | None,
        columns: tuple[ProgressColumn, ...] = COLUMNS,
        unit: str = "",
        figures: Callable[[], str] = lambda: "",
        **fields: Any,
    ) -> Iterator[Progress]:
        """A bar with one task; call `.advance(task_id=0)` or `.update(0, completed=n)`.

        Args:
            total: None: not known.
            columns: of the bar.
            unit: what is counted, in the singular, for the line of a log.
            figures: a text for that line, such as the loss; called from another thread.
            fields: of the task; `completed`: what an earlier attempt did.
        """
        disable = not (self._console.is_terminal or self._console.is_jupyter)
        with Progress(*columns, console=self._console, transient=True, disable=disable) as progress:
            progress.add_task(description, total=total, **fields)
            self._lines.append(_TaskLine(progress, unit, figures))
            try:
                yield progress
            finally:
                self._lines.pop()

    def _write(self) -> None:
        while not self._end.wait(LINE_SECONDS):
            lines = self._lines[-1:]  # a copy: bars end at any moment
            text = (
                lines[0].text()
                if lines
                else f"{self._name}: {_duration(time.monotonic() - self._started)} so far"
            )
            self._console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress_bar(
    console: Console,
    description: str,
    total: float | None,
    columns: tuple[ProgressColumn, ...] = COLUMNS,
    **fields: Any,
) -> Iterator[Progress]:
    """`ProgressLog.bar` for work that is one bar."""
    with ProgressLog(console, description) as log, log.bar(description, total, columns, **fields) as progress:
        yield progress


class _TaskLine:
    """The line of a bar: what is done of how much, figures, the rate, and the time left."""

    def __init__(self, progress: Progress, unit: str, figures: Callable[[], str]) -> None:
        self._task, self._unit, self._figures = progress.tasks[0], unit, figures
        self._started, self._completed_before = time.monotonic(), self._task.completed

    def text(self) -> str:
        task, seconds = self._task, time.monotonic() - self._started
        total = "" if task.total is None else f" of {task.total:,.0f}"
        units = f" {self._unit}s" if self._unit else ""
        parts = [f"{task.description}: {task.completed:,.0f}{total}{units}", self._figures()]
        done = task.completed - self._completed_before
        if done > 0:
            parts.append(_rate(done / seconds, self._unit))
        else:
            parts.append(f"{_duration(seconds)} so far")
        if done > 0 and task.total is not None:
            parts.append(f"{_duration((task.total - task.completed) * seconds / done)} left")
        return ", ".join(piece for piece in parts if piece)


def _rate(per_second: float, unit: str) -> str:
    if per_second >= 1:
        return f"{per_second:.3g}{f' {unit}s' if unit else ''} per second"
    return f"{1 / per_second:.3g} s per {unit or 'piece'}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
