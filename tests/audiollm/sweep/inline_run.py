"""A run of a sweep in the process of the tests."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from audiollm.errors import ConfigError, StageError
from audiollm.sweep.trial_process import RunOrder, run_order
from audiollm.sweep.workers import RunEnd


class InlineRun:
    """A run in the process of the tests, in place of `RunProcess`: its stages take milliseconds, a process a second."""

    def __init__(self, order: RunOrder, *_: Any) -> None:
        self._end = RunEnd()
        try:
            run_order(order, Console(quiet=True))
        except (ConfigError, StageError) as error:
            self._end = RunEnd(str(error))

    def poll(self) -> RunEnd:
        return self._end

    wait = poll

    def kill(self) -> None:
        pass
