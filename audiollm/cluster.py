"""A Ray cluster: joined, checked for room, left. All machines have this package installed and see the same files."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from audiollm.errors import error_line
from audiollm.processes import ONE_THREAD

INSTALL = "pip install 'audiollm[ray]'"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""The variable that tells which GPUs a process sees."""
CONNECTION_TIMEOUT_S = 10.0
NO_MACHINE_TIMEOUT_S = 600.0
"""How long a team waits for a first machine: one that is started for it takes minutes."""
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


class TeamMember:
    """Base of the classes of a team's actors, which answer by a method `process`."""

    def machine(self) -> str:
        """The id of the machine that the actor is on."""
        import ray

        node: str = ray.get_runtime_context().get_node_id()
        return node


@dataclass(frozen=True)
class TeamReply:
    """News of an actor: it is ready for calls (neither value nor cause), has answered, or has died.

    Args:
        death: the cause.
        is_machine_lost: whether it died with its machine, so that no call is to blame.
    """

    number: int
    value: Any = None
    death: str | None = None
    is_machine_lost: bool = False


class ActorTeam:
    """Actors that answer a call at a time, on machines that may die and may join.

    An actor for which no machine has room is ready later, or never: calls are sent to those that are ready, so that
    none waits for a machine. Some 15 s pass until Ray takes a machine that is silent for dead.

    Args:
        kind: a subclass of `TeamMember`.
    """

    def __init__(self, cluster: Cluster, kind: type[TeamMember]) -> None:
        self._cluster, self._kind, self._ray = cluster, kind, cluster.ray
        self._numbers = count()
        self._actors: dict[int, Any] = {}
        self._machines: dict[int, str] = {}
        self._waited_for: dict[Any, int] = {}
        """Actor by the reference to its next reply."""

    def start(self, share: Workers, *arguments: Any) -> int:
        """Begin an actor; it may be sent to when `replies` has said that it is ready."""
        number = next(self._numbers)
        self._actors[number] = self._cluster.start(self._kind, share, *arguments)
        self._waited_for[self._actors[number].machine.remote()] = number
        return number

    def is_ready(self, number: int) -> bool:
        """Whether an actor may be sent to."""
        return number in self._machines

    def send(self, number: int, *arguments: Any) -> None:
        """Have an idle actor process these arguments."""
        self._waited_for[self._actors[number].process.remote(*arguments)] = number

    def replies(self) -> list[TeamReply]:
        """Wait for news of an actor.

        Raises:
            ClusterError: no machine has room for any actor, for minutes.
            RayTaskError: an actor's method has raised an error.
        """
        has_work = any(number in self._machines for number in self._waited_for.values())
        timeout = None if has_work else NO_MACHINE_TIMEOUT_S
        ready, _ = self._ray.wait(list(self._waited_for), num_returns=1, timeout=timeout)
        if not ready:
            raise ClusterError(
                f"no machine of the cluster had room for a worker in {NO_MACHINE_TIMEOUT_S:.0f} s: start machines, "
                "and run again to go on"
            )
        return [self._receive(reference) for reference in ready]

    def close(self) -> None:
        """End all actors."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors, self._machines, self._waited_for = {}, {}, {}

    def _receive(self, reference: Any) -> TeamReply:
        number, exceptions = self._waited_for.pop(reference), self._ray.exceptions
        try:
            value = self._ray.get(reference)
        except exceptions.ObjectLostError as error:  # it had answered, and its machine died with the answer
            self._ray.kill(self._actors[number])
            return self._bury(number, error, is_machine_lost=True)
        except (exceptions.RayActorError, exceptions.RuntimeEnvSetupError) as error:
            return self._bury(number, error, self._is_machine_lost(number, error))
        if number in self._machines:
            return TeamReply(number, value)
        self._machines[number] = value
        return TeamReply(number)

    def _bury(self, number: int, error: Exception, is_machine_lost: bool) -> TeamReply:
        self._machines.pop(number, None)
        del self._actors[number]
        return TeamReply(number, None, cause_of_death(error), is_machine_lost)

    def _is_machine_lost(self, number: int, error: Exception) -> bool:
        live_ids = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        machine = self._machines.get(number)
        return "its node has died" in str(error) if machine is None else machine not in live_ids


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
