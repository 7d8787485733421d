"""Workers as actors of a Ray cluster. Every machine of it has this package installed and sees the same files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count
from typing import Any

from pipelines.execution.engine import EngineError, Pool, Worker, WorkerReply
from pipelines.execution.ledger import Outcome
from pipelines.execution.local_pool import ONE_THREAD, error_line

_INSTALL = "pip install 'audiollm[ray]'"


class _Host:
    """Worker inside a Ray actor."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def process(self, step: str, items: Sequence[Any]) -> list[Outcome]:
        return self._worker.process(step, items)


class RayActors:
    """One actor a worker. An actor that dies is not restarted by Ray: the engine counts deaths by call.

    Args:
        worker: given to every actor.
        pools: all that will be started.
        address: of a running cluster (`ray://…`, `auto`); None: one on this machine, which ends with the run.

    Raises:
        EngineError: no Ray, no cluster, or fewer CPUs and GPUs than the pools take, which would wait for ever.
    """

    def __init__(self, worker: Worker, pools: Sequence[Pool], address: str | None) -> None:
        # Ray looks at the memory of its machine and kills what it takes for too much: deaths are ours to count
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        try:
            import ray
        except ImportError:
            raise EngineError(f"engine: ray is not installed: {_INSTALL}") from None
        self._ray = ray
        self._numbers = count()
        self._actors: dict[int, Any] = {}
        self._at_work: dict[Any, int] = {}
        self._owns = not ray.is_initialized()
        try:
            if self._owns:
                own = {"num_cpus": _whole(pools)} if address is None else {}
                ray.init(address, logging_level="ERROR", log_to_driver=False, include_dashboard=False, **own)
        except Exception as error:  # of many kinds, by what is wrong with the cluster
            raise EngineError(f"engine: no Ray cluster at {address}: {error_line(error)}") from None
        self._check(pools)
        self._worker = ray.put(worker)
        self._host = ray.remote(_Host)

    def start(self, pool: Pool) -> int:
        number = next(self._numbers)
        self._actors[number] = self._host.options(
            num_cpus=pool.cpus,
            num_gpus=pool.gpus,
            max_restarts=0,
            runtime_env={"env_vars": ONE_THREAD},
        ).remote(self._worker)
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
        if self._owns:
            self._ray.shutdown()

    def _receive(self, reference: Any) -> WorkerReply:
        number = self._at_work.pop(reference)
        try:
            return WorkerReply(number, self._ray.get(reference))
        except self._ray.exceptions.RayActorError as error:
            del self._actors[number]
            return WorkerReply(number, None, _last_line(error))
        except self._ray.exceptions.RayTaskError as error:
            raise EngineError(f"a step cannot be set up: {error_line(error.cause)}") from None

    def _check(self, pools: Sequence[Pool]) -> None:
        has = self._ray.cluster_resources()
        for name, needed in (
            ("CPU", sum(pool.cpus * pool.workers for pool in pools)),
            ("GPU", sum(pool.gpus * pool.workers for pool in pools)),
        ):
            if needed > has.get(name, 0.0) + 1e-6:
                self.close()
                raise EngineError(
                    f"engine: the workers take {needed:g} {name}s and the cluster has {has.get(name, 0.0):g}: "
                    "lower workers, or give steps a smaller share in resources"
                )


def _last_line(error: Exception) -> str:
    """Return the last line of Ray's message about a death: the cause stands below the trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1][:300]


def _whole(pools: Sequence[Pool]) -> int:
    """CPUs of a cluster on this machine: what the workers take, so that none waits for another."""
    return max(1, -int(-sum(pool.cpus * pool.workers for pool in pools) // 1))
