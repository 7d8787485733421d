"""The reference in Ray actors: its log-probabilities are computed while the ranks compute those of the policy.

Shapes: T answer tokens of a batch.
"""

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
from audiollm.rl.placement.joining import Joined
from audiollm.rl.placement.pool import ActorCall
from audiollm.train.loop.optim import autocast
from audiollm.train.options import Precision


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
