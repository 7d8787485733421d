"""Rewards and the reference in Ray actors: whole batches are scored by them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audiollm.devices import default_device
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policies import load_policy
from audiollm.rl.placement.pool import ActorCall, ActorPool, Joined
from audiollm.rl.rewards.batch import RewardBatch, RewardFunction, RewardValues, called_reward
from audiollm.rl.rewards.catalog import RewardTerm
from audiollm.rl.rewards.registry import load_rewards
from audiollm.train.loop.optim import autocast
from audiollm.train.settings import Precision


@dataclass(frozen=True)
class ReferenceModel:
    """The reference that actors load, and how its log-probabilities are computed."""

    folder: Path
    max_tokens: int
    temperature: float
    precision: Precision
    """Of matrix products, as in training."""
    directory: str
    """Working directory, in which relative paths are looked for."""


class ReferenceHost:
    """The work of a reference actor."""

    def __init__(self, model: ReferenceModel) -> None:
        self._model = model

    def set_up(self, place: int) -> None:
        """Load the reference."""
        os.chdir(self._model.directory)
        self._policy = load_policy(self._model.folder, max_tokens=self._model.max_tokens)
        self._policy.root.requires_grad_(False).eval().to(default_device())

    @torch.no_grad()
    def logprobs(self, batch: Any) -> Tensor:
        """Compute the log-probabilities `[T]` of a batch's answer tokens."""
        device = default_device()
        request = TokenRequest(reference=False, temperature=self._model.temperature)
        with autocast(self._model.precision, device):
            logprobs = self._policy.answer_logprobs(self._policy.root, batch.to(device), request)
        return logprobs.policy_T.cpu()


class ReferenceActors:
    """Computes log-probabilities under the reference; the batches of a rank are dealt to its actors in turns."""

    def __init__(self, joined: Joined, model: ReferenceModel) -> None:
        self._pool = joined.pool("reference", ReferenceHost, model)

    def ask(self, batches: Sequence[Any]) -> list[ActorCall]:
        """Send batches, on the CPU, without waiting for the results."""
        return [
            self._pool.ask(number % self._pool.count, "logprobs", batch)
            for number, batch in enumerate(batches)
        ]

    def answers(self, calls: Sequence[ActorCall]) -> list[Tensor]:
        """Wait for the log-probabilities `[T]` of each batch that was sent."""
        return [self._pool.answer(call) for call in calls]


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
