"""Watches losses and gradients: what is not finite, or a sudden spike of the loss, names the step to leave out.

The loop then goes back to the last checkpoint and repeats the steps since, without that one: as every step is a
function of (seed, step), the run ends as if the step had never been tried, wherever the checkpoints were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from audiollm.files.atomic import read_jsonl, write_jsonl
from audiollm.recipe.ranks import ALONE, Ranks

SETTLE_STEPS = 50
"""Steps seen before a spike is called one."""
LOSS_EMA_DECAY = 0.98
"""Decay of the moving mean and variance of the loss: about the last 50 steps."""


class BadStep(NamedTuple):
    """A step (counted from 1, as in messages) that spoils the run, and why."""

    step: int
    kind: str
    """`not finite` or `loss spike`, as in `alarms.jsonl`."""
    text: str


class RunningLoss:
    """Moving mean and variance of the loss over the steps that were kept."""

    def __init__(self) -> None:
        self.count, self.mean, self.variance = 0, 0.0, 0.0

    def deviations(self, loss: float) -> float:
        """By how many standard deviations `loss` is above the mean; 0 until the run has settled."""
        if self.count < SETTLE_STEPS or self.variance == 0.0:
            return 0.0
        return (loss - self.mean) / math.sqrt(self.variance)

    def add(self, loss: float) -> None:
        self.count += 1
        share = max(1 - LOSS_EMA_DECAY, 1 / self.count)  # the first steps weigh the same
        gap = loss - self.mean
        self.mean += share * gap
        self.variance = (1 - share) * (self.variance + share * gap * gap)


class Guard:
    """Keeps the figures of the last steps until they are checked: a look at each would stall a GPU."""

    def __init__(self, spike_deviations: float, ranks: Ranks = ALONE) -> None:
        """`spike_deviations`: a loss so many standard deviations above its mean is a spike; 0: never."""
        self._limit, self._ranks = spike_deviations, ranks
        self._unchecked: list[tuple[int, Mapping[str, float | Tensor]]] = []
        self.loss = RunningLoss()

    def add(self, step: int, figures: Mapping[str, float | Tensor]) -> None:
        """The figures of a step: `loss`, `gradient_norm`, and those of other optimizers behind a slash."""
        self._unchecked.append((step, figures))

    def check(self) -> BadStep | None:
        """The first bad one of the steps since the last call, the same on all ranks; all must call it."""
        rank_bad_step = self._first_bad()
        # a loss may be finite here and not elsewhere: the earliest of all ranks' counts
        bad = [row for row in self._ranks.gather(rank_bad_step) if row is not None]
        self._unchecked.clear()
        return min(bad, key=lambda row: row.step) if bad else None

    def forget(self) -> None:
        """The steps not yet checked are taken back."""
        self._unchecked.clear()

    def state(self) -> dict[str, Any]:
        return dict(vars(self.loss))

    def restore(self, state: Mapping[str, Any]) -> None:
        self.loss = RunningLoss()
        vars(self.loss).update(state)

    def _first_bad(self) -> BadStep | None:
        losses = self._sum_losses()
        for (step, figures), loss in zip(self._unchecked, losses, strict=True):
            for key, value in figures.items():
                what, _, optimizer = key.partition("/")
                if what in ("loss", "gradient_norm") and not math.isfinite(value):
                    return BadStep(
                        step, "not finite", _describe(step, what, optimizer, float(value), figures)
                    )
            above = self.loss.deviations(loss)
            if self._limit and above > self._limit:
                text = (
                    f"the loss is {loss:.4g} at step {step}, {above:.0f} standard deviations above its mean"
                )
                return BadStep(step, "loss spike", f"{text} of {self.loss.mean:.4g}")
            self.loss.add(loss)
        return None

    def _sum_losses(self) -> list[float]:
        """The main loss of every unchecked step, summed over ranks."""
        rank_losses = [float(figures.get("loss", 0.0)) for _, figures in self._unchecked]
        return [sum(row) for row in zip(*self._ranks.gather(rank_losses), strict=True)]


@dataclass(frozen=True)
class LeftOut:
    """The steps whose data a run leaves out, kept in `left_out.jsonl` of the stage's folder."""

    path: Path

    def steps(self) -> dict[int, BadStep]:
        if not self.path.exists():
            return {}
        remedy = "restore that line, or remove it: its step is then tried again"
        rows = read_jsonl(self.path, remedy, {"step": int, "kind": str, "text": str})
        return {row["step"]: BadStep(row["step"], row["kind"], row["text"]) for row in rows}

    def add(self, bad: BadStep) -> None:
        rows = [*self.steps().values(), bad]
        write_jsonl(self.path, (row._asdict() for row in rows))


def _describe(
    step: int, what: str, optimizer: str, value: float, figures: Mapping[str, float | Tensor]
) -> str:
    whose = f" of the {optimizer}" if optimizer else ""
    listed = ", ".join(f"{key} {float(figure):.4g}" for key, figure in figures.items())
    return f"the {what.replace('_', ' ')}{whose} is {value} at step {step} ({listed})"
