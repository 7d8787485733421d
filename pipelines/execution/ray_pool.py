"""Workers as actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from audiollm.cluster import ActorTeam, Cluster, ClusterError, TeamMember
from audiollm.errors import error_line
from pipelines.execution.engine import EngineError, Pool, Worker, WorkerReply
from pipelines.execution.ledger import Outcome


class _Host(TeamMember):
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
        self._team = ActorTeam(self._cluster, _Host)
        self._worker = self._cluster.ray.put(worker)

    def start(self, pool: Pool) -> int:
        return self._team.start(pool, self._worker)

    def is_ready(self, worker: int) -> bool:
        return self._team.is_ready(worker)

    def send(self, worker: int, step: str, items: Sequence[Any]) -> None:
        self._team.send(worker, step, list(items))

    def wait(self) -> list[WorkerReply]:
        try:
            replies = self._team.replies()
        except ClusterError as error:
            raise EngineError(f"engine: {error}") from None
        except self._cluster.ray.exceptions.RayTaskError as error:
            raise EngineError(f"a step cannot be set up: {error_line(error.cause)}") from None
        return [
            WorkerReply(reply.number, reply.value or [], is_machine_lost=reply.is_machine_lost)
            if reply.death is None
            else WorkerReply(reply.number, None, reply.death, reply.is_machine_lost)
            for reply in replies
        ]

    def close(self) -> None:
        self._team.close()
        self._cluster.leave()
