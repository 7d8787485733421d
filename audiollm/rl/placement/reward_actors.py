"""Rewards by Ray actors: each loads some of the rewards, and scores whole batches by them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from audiollm.rl.placement.joining import Joined
from audiollm.rl.placement.pool import ActorPool
from audiollm.rl.rewards.batch import RewardBatch, RewardFunction, RewardValues, called_reward
from audiollm.rl.rewards.catalog import RewardTerm
from audiollm.rl.rewards.registry import load_rewards

MAX_CALLS = 32
"""Calls that an actor works on at a time: one that hangs does not hold up the others."""


class RewardHost:
    """The work of a reward actor."""

    def __init__(
        self, terms: Sequence[RewardTerm], count: int, folder: Path, rank: int, directory: str
    ) -> None:
        self._terms, self._count, self._directory = list(terms), count, directory
        self._folder, self._rank = folder, rank

    def set_up(self, place: int) -> None:
        """Load every `count`-th reward."""
        os.chdir(self._directory)
        self._functions = load_rewards(self._terms[place :: self._count], self._folder, self._rank)

    def score(self, name: str, batch: RewardBatch) -> Any:
        """Return what a reward returns for a batch."""
        return called_reward(self._functions[name], batch)


class PlacedReward:
    """A `RewardFunction` that an actor computes. It is declared async, so that rewards of all actors run together."""

    def __init__(self, pool: ActorPool, place: int, name: str) -> None:
        self._pool, self._place, self._name = pool, place, name

    async def __call__(self, batch: RewardBatch) -> RewardValues:
        """Score a batch. It blocks, in a thread of its own: see `RewardSuite`."""
        values: RewardValues = self._pool.answer(self._pool.ask(self._place, "score", self._name, batch))
        return values


def placed_rewards(
    joined: Joined, terms: Sequence[RewardTerm], folder: Path, rank: int
) -> dict[str, RewardFunction]:
    """Load the functions of all terms in this rank's actors, term by term in turns; return them by name.

    Args:
        folder, rank: as `load_rewards` has them.
    """
    count = joined.choice.shares["reward"].actors // joined.world
    arguments = (list(terms), count, folder, rank, str(Path.cwd()))
    pool = joined.pool("reward", RewardHost, *arguments, concurrency=MAX_CALLS)
    return {term.name: PlacedReward(pool, number % count, term.name) for number, term in enumerate(terms)}
