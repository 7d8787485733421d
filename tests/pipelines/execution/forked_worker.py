"""Workers that say which process set them up, and what processes of them answer; imported by a program of a test."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from pipelines.annotate.step import Recording, RecordingMetadata, WorkItem
from pipelines.execution.engine import Pool, Worker
from pipelines.execution.ledger import Outcome
from pipelines.execution.local_pool import LocalProcesses
from pipelines.steps.driving import StepWorker
from pipelines.steps.step import Resources

ITEM = WorkItem("a.wav", RecordingMetadata(), None, {})


class Forked:
    """A worker of its own kind; what it shares may fail."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.set_up_in: int | None = None

    def set_up_shared(self) -> None:
        if self.fails:
            raise OSError("no such model")
        self.set_up_in = os.getpid()

    def process(self, step: str, items: Sequence[WorkItem]) -> list[Outcome]:
        return [Outcome({"set_up_in": self.set_up_in, "process": os.getpid()})] * len(items)


class Where:
    """A step of the annotation that may be shared."""

    name, level, needs, version, resources = "where", "recording", (), 1, Resources()
    shared = True

    def missing(self) -> None:
        return None

    def setup(self) -> None:
        self.set_up_in = os.getpid()

    def process(self, item: Recording) -> dict[str, Any]:
        return {"set_up_in": self.set_up_in, "process": os.getpid()}


def main(kind: str, *modules: str) -> None:
    """Two processes of a worker, then one of another, which the process that they are forked from does not know."""
    kinds: dict[str, Worker] = {
        "own": Forked(fails=False),
        "failing": Forked(fails=True),
        "annotation": StepWorker({"where": Where()}),
    }
    answers = []
    for number, worker in ((2, kinds[kind]), (1, kinds["own" if kind == "failing" else "failing"])):
        processes = LocalProcesses(worker, modules=["forked_worker", *modules])
        for each in [processes.start(Pool("pool", ("where",), number)) for _ in range(number)]:
            processes.send(each, "where", [ITEM])
            answers += [outcome.value for answer in processes.wait() for outcome in answer.outcomes or []]
        processes.close()
    print(json.dumps({"driver": os.getpid(), "answers": answers}))
