"""A worker that says which process set it up; run as a program, what two processes of it answer."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from pipelines.engine import Pool
from pipelines.ledger import Outcome
from pipelines.local_pool import LocalProcesses


class Forked:
    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.set_up_in: int | None = None

    def set_up_shared(self) -> None:
        if self.fails:
            raise OSError("no such model")
        self.set_up_in = os.getpid()

    def process(self, step: str, items: Sequence[int]) -> list[Outcome]:
        return [Outcome({"set_up_in": self.set_up_in, "process": os.getpid()})] * len(items)


def main(fails: bool) -> None:
    """Two processes of one worker, then one of another kind."""
    answers = []
    for number, worker in ((2, Forked(fails)), (1, Forked(not fails))):
        processes = LocalProcesses(worker, modules=["forked_worker"])
        for each in [processes.start(Pool("pool", ("step",), number)) for _ in range(number)]:
            processes.send(each, "step", [0])
            answers += [outcome.value for answer in processes.wait() for outcome in answer.outcomes or []]
        processes.close()
    print(json.dumps({"driver": os.getpid(), "answers": answers}))
