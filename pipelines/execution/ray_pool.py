"""Workers as actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from audiollm.cluster import Cluster, ClusterError, cause_of_death
from audiollm.errors import error_line
from pipelines.execution.engine import EngineError, Pool, Worker, WorkerReply
from pipelines.execution.ledger import Outcome


class _Host:
    """Worker inside a Ray actor."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def process(self, step: str, items: Sequence[Any]) -> list[Outcome]:
        return self._worker.process(step, items)


class RayActors:
    """One actor a worker; the engine counts deaths by call.

    Args:
        worker: given to every actor.
        pools: all that will be started.
        address: of a running cluster (`ray://…`, `auto`); None: one on this machine, which ends with the run.

    Raises:
        EngineError: no Ray, no cluster, or fewer CPUs and GPUs than the pools take.
    """

    def __init__(self, worker: Worker, pools: Sequence[Pool], address: str | None) -> None:
        try:
            self._cluster = Cluster(pools, address)
        except ClusterError as error:
            raise EngineError(f"engine: {error}") from None
        self._ray = self._cluster.ray
        self._numbers = count()
        self._actors: dict[int, Any] = {}
        self._at_work: dict[Any, int] = {}
        self._worker = self._ray.put(worker)

    def start(self, pool: Pool) -> int:
        number = next(self._numbers)
        self._actors[number] = self._cluster.start(_Host, pool, self._worker)
        return number

    def send(self, worker: int, step: str, items: Sequence[Any]) -> None:
        self._at_work[self._actors[worker].process.remote(step, list(items))] = worker

    def wait(self) -> list[WorkerReply]:
        ready, _ = self._ray.wait(list(self._at_work), num_returns=1)
        return [self._receive(reference) for reference in ready]

    def close(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors, self._at_work = {}, {}
        self._cluster.leave()

    def _receive(self, reference: Any) -> WorkerReply:
        number = self._at_work.pop(reference)
        try:
            return WorkerReply(number, self._ray.get(reference))
        except self._ray.exceptions.RayActorError as error:
            del self._actors[number]
            return WorkerReply(number, None, cause_of_death(error))
        except self._ray.exceptions.RayTaskError as error:
            raise EngineError(f"a step cannot be set up: {error_line(error.cause)}") from None
