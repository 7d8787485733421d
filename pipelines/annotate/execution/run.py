"""A run of the steps over all recordings: walks, workers, and the progress bar."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.progress import TaskID

from audiollm.errors import StageError
from audiollm.files.atomic import read_jsonl
from audiollm.recipe.runner import Context
from pipelines.annotate.execution import chain as chains
from pipelines.annotate.execution.chain import Chain
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.execution.corpus import Verdicts, kept_rows
from pipelines.annotate.execution.facts import StepCosts
from pipelines.annotate.execution.rules import Thresholds
from pipelines.annotate.execution.shards import (
    Made,
    Shard,
    ShardConfig,
    finish_shards,
    made_from,
    plan_shards,
)
from pipelines.annotate.execution.spool import Spool
from pipelines.annotate.execution.walk import Walks
from pipelines.annotate.execution.worker import ReportWorker, ShardWorker, StepWorker
from pipelines.annotate.input.sources import RecordingSource
from pipelines.execution.engine import Call, Outcome, Pool, Walk, Worker, WorkerBackend, run_walks
from pipelines.execution.ledger import Ledger
from pipelines.execution.local_pool import InProcess, LocalProcesses

PRELOADED_MODULES = (
    "pipelines.annotate.execution.worker",
    "audiollm.audio",
    "scipy.signal",
    "audiollm.commands.cli",
)
"""Modules that nearly every worker imports; the last is the main module of `audiollm`, which processes import anew."""


@dataclass(frozen=True)
class Run:
    """Objects that all parts of a run share."""

    config: AnnotationConfig
    context: Context
    chain: Chain
    thresholds: Thresholds
    sources: Sequence[RecordingSource]
    ledger: Ledger
    spool: Spool
    costs: StepCosts = field(default_factory=StepCosts)

    def annotate(self) -> None:
        """Take all recordings and their segments through all steps, into the spool; a repeated file is only named.

        Raises:
            EngineError: a step cannot be set up.
        """
        walks = Walks(self.chain, self.thresholds, self.spool)
        first: dict[object, str] = {}

        def begin() -> Iterator[Walk]:
            for number, source in enumerate(self.sources):
                same = first.setdefault((source.digest, source.given, source.split), source.name)
                if same != source.name:
                    self.spool.put_file(number, walks.repeated(source, same))
                else:
                    yield walks.recording(number, source)

        self._walk("annotating", len(self.sources), begin())

    def sample(self, verdicts: Verdicts) -> None:
        """Measure the quality of a seeded sample of the kept segments, where no step measures it for all."""
        if not self.chain.sampled:
            return
        places = [place for place, row in kept_rows(self.spool, verdicts) if row["kind"] == "speech"]
        count = min(self.config.quality_sample, len(places))
        chosen = sorted(random.Random(self.config.seed).sample(places, count))
        walks = Walks(self.chain, self.thresholds, self.spool)
        ways = (walks.sampled(file, number, self.sources[file]) for file, number in chosen)
        self._walk("measuring a sample", count, ways)

    def _walk(self, title: str, total: int, walks: Iterator[Walk]) -> None:
        config = self.config
        workers = config.num_workers
        pools = chains.pools(self.chain, workers, config.gpus, config.resources)
        backend = _backend(config, StepWorker(self.chain.steps), pools)
        with self.context.progress(title, total) as bar:
            rate = _Rate(bar, title)

            def on_answer(call: Call, outcome: Outcome, known: bool) -> None:
                self.costs.add(call, outcome, known)
                if not known:
                    rate.heard(call)

            def counted(walk: Walk) -> Walk:
                """Pass a walk on, but add the segments that it finds to the work of the progress bar."""
                children = yield from walk
                bar.update(TaskID(0), advance=1, total=(bar.tasks[0].total or 0) + len(children))
                return [counted(child) for child in children]

            run_walks((counted(walk) for walk in walks), pools, backend, self.ledger, on_answer)


def write_shards(config: AnnotationConfig, context: Context, ledger: Ledger) -> None:
    """Write the kept segments as shards, each made by one of the workers.

    Raises:
        StageError: a shard that cannot be written.
    """
    folder, settings = context.folder / "shards", ShardConfig()
    planned = plan_shards(read_jsonl(context.folder / "segments.jsonl"), settings)
    made: dict[str, Made] = {}

    def walk(shard: Shard) -> Walk:
        outcome = yield Call("shard", None, shard)
        if outcome.value is None:
            raise StageError(f"annotate: {folder / shard.name}: {outcome.error}", "is the disk full?")
        made[shard.name] = made_from(outcome.value)
        return []

    workers = config.num_workers
    with context.progress("writing shards", len(planned)) as bar:
        run_walks(
            (walk(shard) for shard in planned),
            [Pool("shards", ("shard",), min(workers, len(planned)))],
            _local(ShardWorker(folder, settings), workers),
            ledger,
            lambda call, outcome, known: bar.advance(TaskID(0)),
        )
    finish_shards(folder, settings, [made[shard.name] for shard in planned])


def request_report(config: AnnotationConfig, context: Context, ledger: Ledger) -> None:
    """Have one of the workers write `report.html`.

    Raises:
        StageError: it cannot be written.
    """

    def walk() -> Walk:
        outcome = yield Call("report", None, context.folder)
        if outcome.value is None:
            page = context.folder / "report.html"
            remedy = (
                "all other results are written: correct the problem and run again to make the report alone"
            )
            raise StageError(f"annotate: {page}: {outcome.error}", remedy)
        return []

    run_walks([walk()], [Pool("report", ("report",), 1)], _local(ReportWorker(), config.num_workers), ledger)


@dataclass
class _Rate:
    """The speed beside the progress bar: seconds of audio processed per second."""

    bar: Any
    title: str
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    def heard(self, call: Call) -> None:
        if call.step == "segments":
            self.seconds += call.size
            rate = self.seconds / max(time.monotonic() - self.began, 1e-3)
            self.bar.update(TaskID(0), description=f"{self.title} ({rate:.0f} x real time)")


def _local(worker: Worker, workers: int) -> WorkerBackend:
    """Make the local backend. With several workers, this process only directs, and does without their imports."""
    return InProcess(worker) if workers < 2 else LocalProcesses(worker, modules=PRELOADED_MODULES)


def _backend(config: AnnotationConfig, worker: StepWorker, pools: Sequence[Pool]) -> WorkerBackend:
    if config.engine == "ray":
        from pipelines.execution.ray_pool import RayActors

        return RayActors(worker, pools, config.ray_address)
    if sum(pool.workers for pool in pools) < 2:
        return InProcess(worker)
    of_steps = {type(step).__module__ for step in worker.steps.values()}
    return LocalProcesses(worker, int(config.gpus), [*PRELOADED_MODULES, *sorted(of_steps)])
