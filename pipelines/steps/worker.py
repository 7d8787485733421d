"""Workers: they build steps at their first call, and answer calls item by item."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from audiollm.audio.discovery import AudioError
from audiollm.errors import TransientError, error_line
from audiollm.files.set_aside import UNREADABLE
from pipelines.execution.ledger import Outcome
from pipelines.steps.step import BatchStep, Listener, SharedStep, Step, Value


class StepItem(Protocol):
    """One item for a worker, pickled: where the sound is, and all that its step needs."""

    @property
    def path(self) -> str: ...

    def opened(self, listener: Listener) -> Any:
        """The item as steps measure it; the listener reads the sound at `path`."""


@dataclass
class StepWorker:
    """All steps of a run, by name; a `Worker` of `pipelines.execution.engine`."""

    steps: Mapping[str, Step]
    _ready: set[str] = field(default_factory=set, repr=False)
    _listener: Listener | None = field(default=None, repr=False)

    def set_up_shared(self) -> None:
        """See `SharedSetup.set_up_shared`."""
        for name, step in self.steps.items():
            if isinstance(step, SharedStep) and step.shared:
                step.setup()
                self._ready.add(name)

    def process(self, step: str, items: Sequence[StepItem]) -> list[Outcome]:
        """See `Worker.process`. A batch that fails is done one by one, so that the error is that of its item alone."""
        selected_step = self.steps[step]
        if step not in self._ready:
            selected_step.setup()
            self._ready.add(step)
        # the check of a protocol's members takes 0.1 ms: not for single items
        if len(items) > 1 and isinstance(selected_step, BatchStep):
            outcomes = self._measured(selected_step.process_batch, items)
            if outcomes[0].error is None:
                return outcomes

        def one_by_one(batch: Sequence[Any]) -> list[Value]:
            return [selected_step.process(item) for item in batch]

        return [self._measured(one_by_one, [item])[0] for item in items]

    def _measured(
        self, work: Callable[[Sequence[Any]], list[Value]], items: Sequence[StepItem]
    ) -> list[Outcome]:
        began = time.process_time()
        values, error, halts = [], "", False
        try:
            values = work([self._open_item(item) for item in items])
            if len(values) != len(items):
                raise ValueError(f"{len(values)} values for {len(items)} items")
            json.dumps(values, allow_nan=False)
        except AudioError as caught:
            error = f"{UNREADABLE}: {caught.reason}"
        except TransientError as caught:
            error, halts = str(caught), True
        except Exception as caught:
            error = error_line(caught)
        seconds = (time.process_time() - began) / len(items)
        if error:
            return [Outcome(error=error, seconds=seconds, halts=halts)] * len(items)
        return [Outcome(value, seconds=seconds) for value in values]

    def _open_item(self, item: StepItem) -> Any:
        """Give the item a listener: successive steps on a recording decode it once."""
        if self._listener is None or self._listener.path != item.path:
            self._listener = Listener(item.path)
        return item.opened(self._listener)


@dataclass(frozen=True)
class FunctionWorker:
    """Answers every call with the value of one function; a `Worker`. An exception costs its item alone."""

    function: Callable[[Any], Value]

    def process(self, step: str, items: Sequence[Any]) -> list[Outcome]:
        """See `Worker.process`."""
        return [self._process_item(item) for item in items]

    def _process_item(self, item: Any) -> Outcome:
        began = time.process_time()
        try:
            value = self.function(item)
        except Exception as error:
            return Outcome(error=error_line(error), seconds=time.process_time() - began)
        return Outcome(value, seconds=time.process_time() - began)
