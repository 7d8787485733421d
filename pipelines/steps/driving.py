"""Workers, and the walks of a run through them: a worker builds steps at their first call, and answers item by item."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.progress import TaskID

from audiollm.audio.discovery import AudioError
from audiollm.errors import TransientError, error_line
from audiollm.files.set_aside import UNREADABLE
from audiollm.recipe.runner import Context
from pipelines.execution.engine import Call, Pool, Walk, Worker, WorkerBackend, run_walks
from pipelines.execution.ledger import Ledger, Outcome
from pipelines.execution.local_pool import InProcess, LocalProcesses
from pipelines.steps.chain import step_pools
from pipelines.steps.results import StepCosts
from pipelines.steps.step import BatchStep, Listener, Resources, SharedStep, Step, Value


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


PRELOADED_MODULES = (
    "pipelines.steps.driving",
    "audiollm.audio",
    "scipy.signal",
    "audiollm.commands.cli",
)
"""Modules that nearly every worker imports; the last is the main module of `audiollm`, which processes import anew."""


class WorkSettings(Protocol):
    """Settings of the machines that a pipeline runs on."""

    engine: Any
    ray_address: str | None
    gpus: float
    resources: dict[str, Resources]

    @property
    def num_workers(self) -> int: ...


@dataclass(frozen=True)
class StepRun:
    """Objects that all parts of a run share.

    Args:
        paced_by: the step whose calls are counted for the speed beside the progress bar.
    """

    config: WorkSettings
    context: Context
    steps: Mapping[str, Step]
    ledger: Ledger
    paced_by: str
    costs: StepCosts = field(default_factory=StepCosts)

    def walk(self, title: str, total: int, walks: Iterator[Walk]) -> None:
        """Walk all walks to their ends.

        Raises:
            EngineError: a step cannot be set up.
        """
        config = self.config
        pools = step_pools(self.steps, config.num_workers, config.gpus, config.resources)
        backend = self._backend(pools)
        with self.context.progress(title, total) as bar:
            rate = _Rate(bar, title)

            def on_answer(call: Call, outcome: Outcome, is_cached: bool) -> None:
                self.costs.add(call, outcome, is_cached)
                if not is_cached and call.step == self.paced_by:
                    rate.add_call(call)

            def counted(walk: Walk) -> Walk:
                """Pass a walk on, but add the parts that it finds to the work of the progress bar."""
                children = yield from walk
                bar.update(TaskID(0), advance=1, total=(bar.tasks[0].total or 0) + len(children))
                return [counted(child) for child in children]

            run_walks((counted(walk) for walk in walks), pools, backend, self.ledger, on_answer)

    def _backend(self, pools: Sequence[Pool]) -> WorkerBackend:
        config, worker = self.config, StepWorker(self.steps)
        if config.engine == "ray":
            from pipelines.execution.ray_pool import RayActors

            return RayActors(worker, pools, config.ray_address)
        if sum(pool.workers for pool in pools) < 2:
            return InProcess(worker)
        of_steps = {type(step).__module__ for step in worker.steps.values()}
        return LocalProcesses(worker, int(config.gpus), [*PRELOADED_MODULES, *sorted(of_steps)])


def call_each(
    name: str,
    function: Callable[[Any], dict[str, Any]],
    items: Sequence[Any],
    workers: int,
    ledger: Ledger,
    on_done: Callable[[], None] = lambda: None,
    *,
    batch_size: int = 1,
) -> list[Outcome]:
    """Call a function on every item, each in one of the workers of this machine; it finds by itself what is done.

    Args:
        function: pickled; an exception becomes the outcome's error.
        batch_size: items that a worker is sent at a time; several, where one takes milliseconds.
    """
    outcomes: dict[int, Outcome] = {}

    def walk(number: int, item: Any) -> Walk:
        outcomes[number] = yield Call(name, None, item)
        return []

    run_walks(
        (walk(number, item) for number, item in enumerate(items)),
        [Pool(name, (name,), max(1, min(workers, len(items))), batch_sizes={name: batch_size})],
        _local(FunctionWorker(function), workers),
        ledger,
        lambda call, outcome, is_cached: on_done(),
    )
    return [outcomes[number] for number in range(len(items))]


@dataclass
class _Rate:
    """The speed beside the progress bar: seconds of audio processed per second."""

    bar: Any
    title: str
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    def add_call(self, call: Call) -> None:
        self.seconds += call.size
        rate = self.seconds / max(time.monotonic() - self.began, 1e-3)
        self.bar.update(TaskID(0), description=f"{self.title} ({rate:.0f} x real time)")


def _local(worker: Worker, workers: int) -> WorkerBackend:
    """Make the local backend. With several workers, this process only directs, and does without their imports."""
    return InProcess(worker) if workers < 2 else LocalProcesses(worker, modules=PRELOADED_MODULES)
