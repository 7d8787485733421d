"""The Ray cluster of a training, and the actors of a rank: started, given work, replaced when they die.

There is one cluster for all ranks, checked before any model is loaded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from audiollm.cluster import VISIBLE_GPUS, Cluster, ClusterError, cause_of_death
from audiollm.errors import BadSample, ConfigError, StageError, error_line
from audiollm.recipe.ranks import Ranks
from audiollm.rl.placement.settings import ActorShare, PlacementChoice

MAX_DEATHS = 3
"""Deaths of actors at the same work that end the run."""


@dataclass(frozen=True)
class ActorCall:
    """A call that was sent to an actor."""

    place: int
    method: str
    arguments: tuple[Any, ...]
    actor: Any
    reference: Any


class ActorPool:
    """Equal actors of a class with a method `set_up(place)`, which gets the actor's number, may take long, and raise.

    An actor that dies is replaced and set up, and its calls are sent again. An actor's calls are worked on in order.

    Args:
        role: for messages: `rollout`, `reward`, `reference`.
        count: actors of this rank.
        kind, arguments: class of the actors, and what it is made with.
        tell: is told of deaths.
        concurrency: most calls that an actor works on at a time.
    """

    def __init__(
        self,
        cluster: Cluster,
        role: str,
        share: ActorShare,
        count: int,
        kind: type,
        arguments: Sequence[Any],
        tell: Callable[[str], None],
        concurrency: int = 1,
    ) -> None:
        self._cluster, self._share, self._kind, self._arguments = cluster, share, kind, list(arguments)
        self._role, self._tell, self._concurrency = role, tell, concurrency
        self._lock = threading.Lock()
        self.prepare: Callable[[int], object] = lambda place: None
        """Called with the number of a replaced actor, before it works again."""
        self._actors = [self._start() for _ in range(count)]
        ready = [actor.set_up.remote(place) for place, actor in enumerate(self._actors)]
        for reference in ready:
            try:
                self.result_of(reference)
            except self.died as error:
                raise StageError(
                    f"a {self._role} actor died while it was set up: {cause_of_death(error)}"
                ) from None

    @property
    def count(self) -> int:
        """Number of actors."""
        return len(self._actors)

    @property
    def ray(self) -> Any:
        """The library."""
        return self._cluster.ray

    @property
    def died(self) -> Any:
        """The type of Ray's errors about actors that died or cannot be reached."""
        return self.ray.exceptions.RayActorError

    def actor(self, place: int) -> Any:
        """Return Ray's handle of an actor."""
        return self._actors[place]

    def ask(self, place: int, method: str, *arguments: Any) -> ActorCall:
        """Call a method of an actor, without waiting for the result."""
        actor = self._actors[place]
        return ActorCall(place, method, arguments, actor, getattr(actor, method).remote(*arguments))

    def answer(self, call: ActorCall) -> Any:
        """Wait for the result of a call.

        Raises:
            StageError: actors died at it `MAX_DEATHS` times.
            Exception: what the method raised.
        """
        cause = ""
        for _ in range(MAX_DEATHS):
            try:
                return self.result_of(call.reference)
            except self.died as error:
                cause = cause_of_death(error)
            with self._lock:
                if self._actors[call.place] is call.actor:
                    self.replace(call.place, cause)
            call = self.ask(call.place, call.method, *call.arguments)
        raise StageError(
            f"{self._role} actors died {MAX_DEATHS} times at the same work: {cause}",
            "give each more memory, or a larger share of a GPU",
        )

    def result_of(self, reference: Any) -> Any:
        """Wait for a result; raises what the method raised."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, BadSample | ConfigError | StageError):
                raise cause from None
            raise StageError(f"a {self._role} actor failed: {error_line(cause)}") from error

    def replace(self, place: int, cause: str) -> None:
        """Start another actor in the place of one that died."""
        self._tell(f"a {self._role} actor died ({cause}); it is replaced")
        self._kill(self._actors[place])
        self._actors[place] = self._start()
        with suppress(self.died):  # whoever asks it next finds it dead, too
            self.result_of(self._actors[place].set_up.remote(place))
            self.prepare(place)

    def close(self) -> None:
        """End all actors."""
        for actor in self._actors:
            self._kill(actor)

    def _start(self) -> Any:
        return self._cluster.start(
            self._kind,
            self._share,
            *self._arguments,
            threads=self._share.threads,
            concurrency=self._concurrency,
        )

    def _kill(self, actor: Any) -> None:
        with suppress(Exception):  # it is dead already
            self.ray.kill(actor)


AUTH_MODE = "RAY_AUTH_MODE"
"""The variable that tells whether Ray asks for a token, which its first process sets."""


@dataclass
class Joined:
    """A rank's part of a cluster: the actors that it starts are its own."""

    cluster: Cluster
    choice: PlacementChoice
    world: int
    tell: Callable[[str], None]
    pools: list[ActorPool] = field(default_factory=list)

    def pool(self, role: str, kind: type, *arguments: Any, concurrency: int = 1) -> ActorPool:
        """Start this rank's actors of a role, and wait until they are set up."""
        share = self.choice.shares[role]
        count = share.actors // self.world
        pool = ActorPool(self.cluster, role, share, count, kind, arguments, self.tell, concurrency)
        self.pools.append(pool)
        self.tell(f"{share.actors} {role} actors, each with {share.cpus:g} CPUs and {share.gpus:g} GPUs")
        return pool

    def leave(self) -> None:
        """End this rank's actors, and leave the cluster."""
        for pool in self.pools:
            pool.close()
        self.cluster.leave()


@contextmanager
def joined_cluster(
    choice: PlacementChoice | None, ranks: Ranks, tell: Callable[[str], None]
) -> Iterator[Joined | None]:
    """Join the cluster that a placement needs, and leave it at the end; None where it needs none. Called on every rank.

    The first rank joins before the others, which learn the address from it: a cluster on this machine is begun once.

    Raises:
        StageError: no Ray, no cluster, one that is too small, or actors that cannot be dealt evenly to the ranks.
    """
    if choice is None or not choice.shares:
        yield None
        return
    for role, share in choice.shares.items():
        if share.actors % ranks.world:
            raise StageError(
                f"placement.{role}.actors: {share.actors} actors cannot be dealt evenly to {ranks.world} ranks",
                f"take a multiple of {ranks.world}",
                2,
            )
    joined = Joined(_join_cluster(choice, ranks), choice, ranks.world, tell)
    try:
        yield joined
    except BaseException:  # the other ranks may never come: nothing is waited for
        joined.leave()
        raise
    ranks.barrier()
    if not ranks.first:
        joined.leave()
    ranks.barrier()  # the first rank's cluster ends last
    if ranks.first:
        joined.leave()


def _join_cluster(choice: PlacementChoice, ranks: Ranks) -> Cluster:
    cluster, error, address = None, "", choice.address
    for is_turn in (ranks.first, not ranks.first):
        if is_turn and not error:
            try:
                gpus = offered_gpus(ranks) if address is None else None
                cluster = Cluster(list(choice.shares.values()), address, gpus)
                address = cluster.address
            except ClusterError as refused:
                error = str(refused)
        if ranks.world == 1:
            break
        errors = ranks.gather(error)
        error = next(filter(None, errors), "")
        address, mode = ranks.of_first((address, os.environ.get(AUTH_MODE)))
        if mode is not None:  # Ray protects a cluster that it begins; the token lies in the user's home
            os.environ.setdefault(AUTH_MODE, mode)
    if error or cluster is None:
        if cluster is not None:
            cluster.leave()
        raise StageError(f"placement: {error}", "see audiollm/rl/placement/README.md", 2)
    return cluster


def offered_gpus(ranks: Ranks) -> list[str]:
    """Return the GPUs of this machine that actors may use: those without a training rank; all where none is left."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get(VISIBLE_GPUS)
    visible = named.split(",")[:count] if named else [str(number) for number in range(count)]
    return free_gpus(visible, int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world)))


def free_gpus(visible: Sequence[str], trained_on: int) -> list[str]:
    """Return the GPUs behind those of the training ranks, which take the first; all where none is left."""
    return list(visible[trained_on:] or visible)
