"""The work of a worker process: set a step up at its first call, and answer calls item by item."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from audiollm.errors import error_line
from audiollm.files.set_aside import UNREADABLE
from pipelines.annotate.execution.shards import Shard, ShardConfig, make_shard
from pipelines.annotate.step import BatchStep, Given, Listener, Recording, Segment, SharedStep, Step, Value
from pipelines.execution.ledger import Outcome


class SegmentSpan(NamedTuple):
    """Part of a recording that is a segment; see `step.Segment`."""

    start_s: float
    end_s: float
    kind: Literal["speech", "sound"]
    speaker: str | None


class WorkItem(NamedTuple):
    """One item for a worker: where the sound is, the values that the step needs, and a segment's `span`."""

    path: str
    given: Given
    span: SegmentSpan | None
    values: Mapping[str, Value]


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

    def process(self, step: str, items: Sequence[WorkItem]) -> list[Outcome]:
        """See `Worker.process`. A batch that fails is done one by one, so that the error is that of its item alone."""
        chosen = self.steps[step]
        if step not in self._ready:
            chosen.setup()
            self._ready.add(step)
        if isinstance(chosen, BatchStep) and len(items) > 1:
            outcomes = self._measured(chosen.process_batch, items)
            if outcomes[0].error is None:
                return outcomes

        def one_by_one(heard: Sequence[Recording | Segment]) -> list[Value]:
            return [chosen.process(item) for item in heard]

        return [self._measured(one_by_one, [item])[0] for item in items]

    def _measured(
        self, work: Callable[[Sequence[Any]], list[Value]], items: Sequence[WorkItem]
    ) -> list[Outcome]:
        from audiollm.audio import AudioError

        began = time.process_time()
        values, error = [], ""
        try:
            values = work([self._heard(item) for item in items])
            if len(values) != len(items):
                raise ValueError(f"{len(values)} values for {len(items)} items")
            json.dumps(values, allow_nan=False)
        except AudioError as caught:
            error = f"{UNREADABLE}: {caught.reason}"
        except Exception as caught:
            error = error_line(caught)
        seconds = (time.process_time() - began) / len(items)
        if error:
            return [Outcome(error=error, seconds=seconds)] * len(items)
        return [Outcome(value, seconds=seconds) for value in values]

    def _heard(self, item: WorkItem) -> Recording | Segment:
        """Give the item a listener: successive steps on a recording decode it once."""
        if self._listener is None or self._listener.path != item.path:
            self._listener = Listener(item.path)
        if item.span is None:
            return Recording(item.path, item.given, item.values, self._listener)
        start_s, end_s, kind, speaker = item.span
        return Segment(item.path, start_s, end_s, kind, speaker, item.given, item.values, self._listener)


@dataclass(frozen=True)
class ShardWorker:
    """Makes shards; a `Worker` of `pipelines.execution.engine`."""

    folder: Path
    config: ShardConfig

    def process(self, step: str, items: Sequence[Shard]) -> list[Outcome]:
        """See `Worker.process`."""
        return [self._one(shard) for shard in items]

    def _one(self, shard: Shard) -> Outcome:
        began = time.process_time()
        try:
            made = make_shard(shard, self.folder, self.config)._asdict()
        except OSError as error:
            return Outcome(error=error_line(error), seconds=time.process_time() - began)
        return Outcome(made, seconds=time.process_time() - began)


@dataclass(frozen=True)
class ReportWorker:
    """Writes the report of a run's folder; a `Worker`."""

    def process(self, step: str, items: Sequence[Path]) -> list[Outcome]:
        """See `Worker.process`."""
        from pipelines.annotate.report import write_annotation_report

        try:
            return [Outcome({"page": str(write_annotation_report(folder))}) for folder in items]
        except Exception as error:  # what was measured is written already
            return [Outcome(error=error_line(error))] * len(items)
