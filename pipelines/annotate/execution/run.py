"""A run of the steps over all recordings: walks, workers, and the progress bar."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import TaskID

from audiollm.errors import StageError
from audiollm.files.atomic import read_jsonl
from audiollm.recipe.runner import Context
from pipelines.annotate.execution.chain import Chain
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.execution.corpus import Verdicts, kept_rows
from pipelines.annotate.execution.rules import Thresholds
from pipelines.annotate.execution.shards import (
    Shard,
    ShardConfig,
    finish_shards,
    make_shard,
    parse_shard_record,
    plan_shards,
)
from pipelines.annotate.execution.walk import Walks
from pipelines.annotate.input.sources import RecordingSource
from pipelines.execution.engine import Walk
from pipelines.execution.ledger import Ledger
from pipelines.steps.driving import StepRun, call_each
from pipelines.steps.facts import StepCosts
from pipelines.steps.results import Spool


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

    @property
    def _steps(self) -> StepRun:
        return StepRun(self.config, self.context, self.chain.steps, self.ledger, "segments", self.costs)

    def annotate(self) -> None:
        """Take all recordings and their segments through all steps, into the spool; a repeated file is only named,
        so that no recording is in the training set and in the test set.

        Raises:
            EngineError: a step cannot be set up.
        """
        walks = Walks(self.chain, self.thresholds, self.spool)
        first: dict[object, str] = {}

        def begin() -> Iterator[Walk]:
            for number, source in enumerate(self.sources):
                same = first.setdefault((source.digest, source.metadata), source.name)
                if same != source.name:
                    self.spool.put_file(number, walks.repeated(source, same))
                else:
                    yield walks.recording(number, source)

        self._steps.walk("annotating", len(self.sources), begin())

    def sample(self, verdicts: Verdicts) -> None:
        """Measure the quality of a seeded sample of the kept segments, where no step measures it for all."""
        if not self.chain.sampled:
            return
        places = [place for place, row in kept_rows(self.spool, verdicts) if row["kind"] == "speech"]
        count = min(self.config.quality_sample, len(places))
        sampled_places = sorted(random.Random(self.config.seed).sample(places, count))
        walks = Walks(self.chain, self.thresholds, self.spool)
        ways = (walks.sampled(file, number, self.sources[file]) for file, number in sampled_places)
        self._steps.walk("measuring a sample", count, ways)


def write_shards(config: AnnotationConfig, context: Context, ledger: Ledger) -> None:
    """Write the kept segments as shards, each made by one of the workers.

    Raises:
        StageError: a shard that cannot be written.
    """
    folder, settings = context.folder / "shards", ShardConfig()
    planned = plan_shards(read_jsonl(context.folder / "segments.jsonl"), settings)
    make = partial(_make_shard_row, folder=folder, config=settings)
    with context.progress("writing shards", len(planned)) as bar:
        outcomes = call_each(
            "shard", make, planned, config.num_workers, ledger, lambda: bar.advance(TaskID(0))
        )
    records = []
    for shard, outcome in zip(planned, outcomes, strict=True):
        if outcome.value is None:
            raise StageError(f"annotate: {folder / shard.name}: {outcome.error}", "is the disk full?")
        records.append(parse_shard_record(outcome.value))
    finish_shards(folder, settings, records)


def request_report(config: AnnotationConfig, context: Context, ledger: Ledger) -> None:
    """Have one of the workers write `report.html`.

    Raises:
        StageError: it cannot be written.
    """
    (outcome,) = call_each("report", _made_report, [context.folder], config.num_workers, ledger)
    if outcome.value is None:
        page = context.folder / "report.html"
        remedy = "all other results are written: correct the problem and run again to make the report alone"
        raise StageError(f"annotate: {page}: {outcome.error}", remedy)


def _make_shard_row(shard: Shard, folder: Path, config: ShardConfig) -> dict[str, Any]:
    return make_shard(shard, folder, config)._asdict()


def _made_report(folder: Path) -> dict[str, Any]:
    from pipelines.annotate.report import write_annotation_report

    return {"page": str(write_annotation_report(folder))}
