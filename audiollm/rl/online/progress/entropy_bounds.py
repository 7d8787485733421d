"""The entropy of a policy at its floor or its ceiling: answers that are all the same, or random."""

from __future__ import annotations

import math

import torch
from torch import nn

ENTROPY_RISE, MIN_ENTROPY_RISE = 3.0, 0.5
"""Factor on the first step's entropy, and nats above it, beyond which the entropy is at its ceiling."""
ENTROPY_FALL = 0.02
"""Factor on the first step's entropy below which the entropy is at its floor."""


class EntropyBounds(nn.Module):
    """The entropy of the sampled tokens against that of the first step. A module of buffers: checkpoints have it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.tensor(math.nan, dtype=torch.float64))
        self.register_buffer("last", torch.tensor(math.nan, dtype=torch.float64))
        self.register_buffer("in_a_row", torch.zeros((), dtype=torch.int64))

    def add(self, entropy: float) -> None:
        """Take notice of a step's mean entropy per token, in nats."""
        if entropy != entropy:
            return
        first, last, row = (self.get_buffer(name) for name in ("first", "last", "in_a_row"))
        if bool(first.isnan()):
            first.fill_(entropy)
        last.fill_(entropy)
        row.copy_(row + 1 if self.bound else torch.zeros_like(row))

    @property
    def steps_at_bound(self) -> int:
        """Steps in a row, up to the last one, at the floor or at the ceiling."""
        return int(self.get_buffer("in_a_row"))

    @property
    def bound(self) -> str | None:
        """`floor` or `ceiling`, where the last step's entropy is there."""
        first, last = (float(self.get_buffer(name)) for name in ("first", "last"))
        if last > max(ENTROPY_RISE * first, first + MIN_ENTROPY_RISE):
            return "ceiling"
        return "floor" if last < ENTROPY_FALL * first else None

    def alarm(self) -> str | None:
        """Return a sentence where the entropy is at a bound."""
        bound, (first, last) = self.bound, (float(self.get_buffer(name)) for name in ("first", "last"))
        if bound is None:
            return None
        values = f"{last:.3g} nats a token, {first:.3g} at the first step"
        if bound == "floor":
            return f"at its floor ({values}): all answers to a prompt become the same; raise entropy_weight or kl"
        return f"at its ceiling ({values}): answers become random; lower the learning rate, or raise kl"
