"""A Ray cluster: joined, checked for room, left. All machines have this package installed and see the same files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from audiollm.errors import error_line
from audiollm.processes import ONE_THREAD

INSTALL = "pip install 'audiollm[ray]'"
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

    Raises:
        ClusterError: see there; workers for which there is no room would wait for ever.
    """

    def __init__(self, workers: Sequence[Workers], address: str | None) -> None:
        # Ray looks at the memory of its machine and kills what it takes for too much: deaths are ours to count
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        try:
            import ray
        except ImportError:
            raise ClusterError(f"ray is not installed: {INSTALL}") from None
        self.ray = ray
        """The library, for `get`, `put` and `wait`."""
        self._owns = not ray.is_initialized()
        try:
            if self._owns:
                own = {"num_cpus": _whole(workers)} if address is None else {}
                ray.init(address, logging_level="ERROR", log_to_driver=False, include_dashboard=False, **own)
        except Exception as error:  # of many kinds, by what is wrong with the cluster
            raise ClusterError(f"no Ray cluster at {address}: {error_line(error)}") from None
        self._check(workers)

    def start(self, kind: type, share: Workers, *arguments: Any) -> Any:
        """Start an actor of a class with the resources of one of these workers; returns Ray's handle."""
        actor = self.ray.remote(kind)
        options = {"num_cpus": share.cpus, "num_gpus": share.gpus, "max_restarts": 0}
        return actor.options(**options, runtime_env={"env_vars": ONE_THREAD}).remote(*arguments)

    def leave(self) -> None:
        """End the cluster, where it was begun here; actors are killed by their owner."""
        if self._owns:
            self.ray.shutdown()

    def _check(self, workers: Sequence[Workers]) -> None:
        has = self.ray.cluster_resources()
        for name, needed in (
            ("CPU", sum(each.cpus * each.workers for each in workers)),
            ("GPU", sum(each.gpus * each.workers for each in workers)),
        ):
            if needed > has.get(name, 0.0) + RESOURCE_ROUNDING:
                self.leave()
                raise ClusterError(
                    f"the workers take {needed:g} {name}s and the cluster has {has.get(name, 0.0):g}: "
                    "lower workers, or give each a smaller share"
                )


def cause_of_death(error: Exception) -> str:
    """Return the last line of Ray's message about a death: the cause stands below the trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1][:300]


def _whole(workers: Sequence[Workers]) -> int:
    """CPUs of a cluster on this machine: what the workers take, so that none waits for another."""
    return max(1, -int(-sum(each.cpus * each.workers for each in workers) // 1))
