"""A run of walks with a progress bar, on workers of this machine or of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.progress import TaskID

from audiollm.recipe.runner import Context
from pipelines.execution.engine import Call, Outcome, Pool, Walk, Worker, WorkerBackend, run_walks
from pipelines.execution.ledger import Ledger
from pipelines.execution.local_pool import InProcess, LocalProcesses
from pipelines.steps.chain import step_pools
from pipelines.steps.facts import StepCosts
from pipelines.steps.step import Resources, Step
from pipelines.steps.worker import FunctionWorker, StepWorker

PRELOADED_MODULES = (
    "pipelines.steps.worker",
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
) -> list[Outcome]:
    """Call a function on every item, each in one of the workers of this machine; it finds by itself what is done.

    Args:
        function: pickled; an exception becomes the outcome's error.
    """
    outcomes: dict[int, Outcome] = {}

    def walk(number: int, item: Any) -> Walk:
        outcomes[number] = yield Call(name, None, item)
        return []

    run_walks(
        (walk(number, item) for number, item in enumerate(items)),
        [Pool(name, (name,), max(1, min(workers, len(items))))],
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
