"""The Ray cluster of a training: one for all ranks, checked before any model is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from audiollm.cluster import VISIBLE_GPUS, Cluster, ClusterError
from audiollm.errors import StageError
from audiollm.recipe.ranks import Ranks
from audiollm.rl.placement.pool import ActorPool
from audiollm.rl.placement.settings import PlacementChoice

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
