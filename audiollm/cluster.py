"""A Ray cluster: joined, checked for room, left. All machines have this package installed and see the same files."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from audiollm.errors import error_line
from audiollm.processes import ONE_THREAD

INSTALL = "pip install 'audiollm[ray]'"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""The variable that tells which GPUs a process sees."""
CONNECTION_TIMEOUT_S = 10.0
RESOURCE_ROUNDING = 1e-6
"""A rounding error of resources, which Ray counts in parts of 1/10,000."""


class ClusterError(Exception):
    """No Ray, no cluster, or a cluster that is too small; the message names the remedy."""


class Workers(Protocol):
    """Some equal workers."""

    @property
    def workers(self) -> int:
        """How many there are."""

    @property
    def cpus(self) -> float:
        """CPUs of each."""

    @property
    def gpus(self) -> float:
        """GPUs of each, or the share of one."""


class Cluster:
    """Actors with one thread each. An actor that dies is not restarted by Ray: its owner decides.

    Args:
        workers: all that will be started.
        address: of a running cluster (`ray://…`, `auto`); None: one on this machine, which ends with this object.
        gpus: ids of the GPUs that a cluster begun here has; None: all of this machine.

    Raises:
        ClusterError: see there; workers for which there is no room would wait for ever.
    """

    def __init__(
        self, workers: Sequence[Workers], address: str | None, gpus: Sequence[str] | None = None
    ) -> None:
        # Ray looks at the memory of its machine and kills what it takes for too much: deaths are ours to count
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        # Ray's own choice is 15: beside training ranks, or anything else that computes, its workers would hardly run
        os.environ.setdefault("RAY_worker_niceness", "0")
        try:
            import ray
        except ImportError:
            raise ClusterError(f"ray is not installed: {INSTALL}") from None
        self.ray = ray
        """The library, for `get`, `put` and `wait`."""
        self._owns = not ray.is_initialized()
        try:
            if self._owns:
                _check_reachable(address)
                init_options: dict[str, Any] = {"num_cpus": _count_cpus(workers)} if address is None else {}
                if address is None and gpus is not None:
                    init_options["num_gpus"] = len(gpus)
                with _visible(gpus if address is None else None):
                    ray.init(
                        address,
                        logging_level="ERROR",
                        log_to_driver=False,
                        include_dashboard=False,
                        **init_options,
                    )
        except Exception as error:  # of many kinds, by what is wrong with the cluster
            what = "no Ray cluster could be begun" if address is None else f"no Ray cluster at {address}"
            raise ClusterError(f"{what}: {error_line(error)}") from None
        self._check(workers)

    @property
    def address(self) -> str:
        """The address by which other processes join the same cluster."""
        address: str = self.ray.get_runtime_context().gcs_address
        return address

    def start(
        self, kind: type, share: Workers, *arguments: Any, threads: int = 1, concurrency: int = 1
    ) -> Any:
        """Start an actor of a class with the resources of one of these workers; returns Ray's handle.

        Args:
            threads: of the libraries that the actor computes with.
            concurrency: most calls that the actor works on at a time.
        """
        actor = self.ray.remote(kind)
        options = {"num_cpus": share.cpus, "num_gpus": share.gpus, "max_restarts": 0}
        if concurrency > 1:
            options["max_concurrency"] = concurrency
        variables = dict.fromkeys(ONE_THREAD, str(threads))
        return actor.options(**options, runtime_env={"env_vars": variables}).remote(*arguments)

    def leave(self) -> None:
        """End the cluster, where it was begun here; actors are killed by their owner."""
        if self._owns:
            self.ray.shutdown()

    def _check(self, workers: Sequence[Workers]) -> None:
        has = self.ray.cluster_resources()
        for name, needed in (
            ("CPU", sum(group.cpus * group.workers for group in workers)),
            ("GPU", sum(group.gpus * group.workers for group in workers)),
        ):
            if needed > has.get(name, 0.0) + RESOURCE_ROUNDING:
                self.leave()
                raise ClusterError(
                    f"the workers take {needed:g} {name}s and the cluster has {has.get(name, 0.0):g}: "
                    "lower workers, or give each a smaller share"
                )
        machines = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        for group in workers:
            if not any(_has_room(machine, group) for machine in machines):
                self.leave()
                raise ClusterError(
                    f"a worker takes {group.cpus:g} CPUs and {group.gpus:g} GPUs, and no single machine of the cluster "
                    "has as many: give each a smaller share"
                )


def cause_of_death(error: Exception) -> str:
    """Return the last line of Ray's message about a death: the cause stands below the trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1][:300]


def _check_reachable(address: str | None) -> None:
    """Raises: OSError: nothing listens at the host and port of an address. Ray would try again for many minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), CONNECTION_TIMEOUT_S).close()


def _has_room(machine: Mapping[str, float], worker: Workers) -> bool:
    """Whether one worker fits on an idle machine."""
    return all(
        needed <= machine.get(name, 0.0) + RESOURCE_ROUNDING
        for name, needed in (("CPU", worker.cpus), ("GPU", worker.gpus))
    )


@contextmanager
def _visible(gpus: Sequence[str] | None) -> Iterator[None]:
    """Within, processes that are started see these GPUs alone; None: all."""
    before = os.environ.get(VISIBLE_GPUS)
    if gpus is not None:
        os.environ[VISIBLE_GPUS] = ",".join(gpus)
    try:
        yield
    finally:
        if before is not None:
            os.environ[VISIBLE_GPUS] = before
        elif gpus is not None:
            del os.environ[VISIBLE_GPUS]


def _count_cpus(workers: Sequence[Workers]) -> int:
    """CPUs of a cluster on this machine: what the workers take, so that none waits for another."""
    return max(1, -int(-sum(group.cpus * group.workers for group in workers) // 1))
