"""Whether a training on fresh answers goes well: held-out rewards against the start's, entropy, skipped steps.

Verdicts on rewards are read from what the evaluations have written, so a resumed run comes to the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

from audiollm.errors import StageError
from audiollm.files.atomic import read_record, write_json

START_FILE = "start.json"
MIN_SAMPLED_SHARE = 0.1
"""Share of sampled answers that are well formed, or right, below which a policy is not fit to begin."""
MAX_FLAT_SHARE = 0.9
"""Share of groups whose answers all have the same reward, above which there is hardly anything to learn from."""
FORMAT = "format"
"""The reward whose fall is an alarm of its own."""
REWARD_PREFIX = "reward/"
"""Begins the names of the rewards among the figures of a step."""
SHARE_REWARDS = {FORMAT: "well formed", "accuracy": "right"}
"""Rewards of 0 or 1 that a policy must earn now and then from the first step on, and what they call an answer."""
FORMAT_LOSS = 0.5
"""Share of the start's format below which the format is lost."""
CLEAR_ERRORS = 2.0
"""Standard errors by which a held-out reward is clearly below the start's."""
ENTROPY_STEPS = 20
"""Steps in a row at a bound of the entropy after which a policy that gained nothing has collapsed."""


@dataclass(frozen=True)
class StartMeasure:
    """Rewards of the policy that a training begins from."""

    greedy: Mapping[str, float]
    """Mean by the reward's name over greedy answers to the held-out prompts, `reward` for the weighted sum."""
    sampled: Mapping[str, float]
    """Mean by reward over answers that are sampled as in training, `reward` for the weighted sum."""
    groups_without_variance: float
    """Share of the sampled groups whose answers all have the same reward."""
    prompts: int
    is_held_out: bool
    """Whether the prompts are held out; a training without held-out prompts is measured on its first ones."""
    greedy_prompts: int | None = None
    """Number of prompts that were answered greedily, where that is another than `prompts`, which were sampled."""

    def write(self, folder: Path) -> None:
        """Write `start.json`."""
        write_json(folder / START_FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> StartMeasure | None:
        """Read `start.json`, if it is there."""
        path = folder / START_FILE
        if not path.exists():
            return None
        return cls(**read_record(path, "remove it: the start is then measured again"))

    def text(self) -> str:
        """Return the figures in one line, for the log."""
        names = [name for name in self.sampled if name == "reward" or name in SHARE_REWARDS]
        figures = ", ".join(
            f"{name} {_format_reward(self.greedy, name)} greedy / {_format_reward(self.sampled, name)} sampled"
            for name in sorted(names, key=lambda name: name != "reward")
        )
        counts = f"{self.prompts} {self.origin} prompts"
        if self.greedy_prompts not in (None, self.prompts):
            counts = f"{self.greedy_prompts} {self.origin} prompts, {self.prompts} of them sampled"
        return f"the start on {counts}: {figures}"

    @property
    def origin(self) -> str:
        """Where the prompts are from."""
        return "held-out" if self.is_held_out else "training"

    def fault(self, learns_from_differences: bool) -> str | None:
        """Return why the policy is not fit to begin, and what to do; None where it is.

        Args:
            learns_from_differences: whether a group whose answers have equal rewards teaches nothing.
        """
        for name, meaning in SHARE_REWARDS.items():
            share = self.sampled.get(name, math.nan)
            if share < MIN_SAMPLED_SHARE:
                greedy = self.greedy.get(name, math.nan)
                also = f" (greedy: {greedy:.0%})" if greedy == greedy else ""
                return (
                    f"the policy is not fit to begin: {share:.1%} of its sampled answers to {self.prompts} "
                    f"{self.origin} prompts are {meaning}{also}, so rewards teach it next to nothing: take prompts of "
                    "the kind that it was trained on, train the start for more steps, or sample at a lower temperature"
                )
        if learns_from_differences and self.groups_without_variance > MAX_FLAT_SHARE:
            return (
                f"the policy is not fit to begin: in {self.groups_without_variance:.0%} of the groups all answers have "
                "the same reward, so nothing can be learned from them: take prompts that it answers right now and "
                "then, larger groups, or a higher temperature"
            )
        return None


def reward_means(figures: Mapping[str, float]) -> dict[str, float]:
    """The mean rewards among the figures of a step, by the rewards' names, and `reward` for the weighted sum."""
    return {
        name.removeprefix(REWARD_PREFIX): value
        for name, value in figures.items()
        if name == "reward" or name.startswith(REWARD_PREFIX)
    }


@dataclass(frozen=True)
class HeldOutChange:
    """The change of the held-out rewards from the start to an evaluation, prompt by prompt."""

    step: int
    before: float
    """Mean reward of the start."""
    after: float
    error: float
    """Standard error of the mean change; 0 with one prompt."""
    format_before: float
    """Mean of the reward `format`; NaN where there is none."""
    format_after: float

    @property
    def mean(self) -> float:
        """The mean change of the reward."""
        return self.after - self.before

    @property
    def is_below(self) -> bool:
        """Whether the reward is more than a standard error below the start's."""
        return self.mean < 0 and self.mean + self.error < 0

    @property
    def is_clearly_below(self) -> bool:
        """Whether the reward is below the start's by more than the noise of its prompts."""
        return self.mean < 0 and self.mean + CLEAR_ERRORS * self.error < 0

    @property
    def lost_format(self) -> bool:
        """Whether answers that were well formed are so no longer."""
        return self.format_before >= 0.5 and self.format_after < FORMAT_LOSS * self.format_before


def changes_since_start(rows: Sequence[Mapping[str, Any]]) -> list[HeldOutChange]:
    """Return the changes at every evaluation after the start, in order.

    Args:
        rows: of `answers.jsonl`, step 0 first; answers without a reward are left out.
    """
    by_step: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("reward") is not None:
            by_step.setdefault(row["step"], {})[str(row["id"])] = row
    start = by_step.pop(0, {})
    changes = []
    for step, answers in sorted(by_step.items()):
        pairs = [(start[id], row) for id, row in answers.items() if id in start]
        if pairs:
            changes.append(_change(step, pairs))
    return changes


def _change(step: int, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> HeldOutChange:
    differences = [after["reward"] - before["reward"] for before, after in pairs]
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return HeldOutChange(
        step,
        fmean(before["reward"] for before, _ in pairs),
        fmean(after["reward"] for _, after in pairs),
        error,
        *(_mean_format([pair[side] for pair in pairs]) for side in (0, 1)),
    )


def _mean_format(rows: Sequence[Mapping[str, Any]]) -> float:
    values = [row.get("rewards", {}).get(FORMAT) for row in rows]
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else math.nan


def collapse(changes: Sequence[HeldOutChange], patience: int, entropy: EntropyBounds) -> str | None:
    """Return why a policy counts as collapsed, or None.

    Args:
        changes: at the evaluations so far.
        patience: evaluations in a row below the start, or without its format, that are a collapse; 0: none are.
    """
    if not patience or not changes:
        return None
    last, recent = changes[-1], changes[-patience:]
    values = f"{last.before:.3f} at the start, {last.after:.3f} now"
    if len(recent) == patience:
        if all(change.is_below for change in recent):
            return f"the held-out reward is below the start's at {patience} evaluations in a row ({values})"
        if all(change.lost_format for change in recent):
            shares = f"{last.format_before:.0%} at the start, {last.format_after:.0%} now"
            return f"the format is lost at {patience} evaluations in a row ({shares})"
    bound = entropy.bound
    if bound is not None and entropy.steps_at_bound >= ENTROPY_STEPS and last.mean <= 0:
        steps = entropy.steps_at_bound
        return f"the entropy is at its {bound} for {steps} steps, and the reward gained nothing ({values})"
    return None


def training_outcome(
    changes: Sequence[HeldOutChange], best_step: int | None, stopped: str | None
) -> dict[str, Any]:
    """Return the figures of a stage on the model that it hands over, with `warnings` where there is reason for any.

    Args:
        changes: at all evaluations.
        best_step: step of the weights that are handed over; None: those of the last step.
        stopped: why the training ended before its last step.
    """
    warnings = [] if stopped is None else [f"the training was stopped: {stopped}"]
    change = changes[-1] if changes else None
    if best_step is not None:
        change = next((change for change in changes if change.step == best_step), None)
    if best_step == 0 and changes:
        change = replace(changes[0], step=0, after=changes[0].before, error=0.0)
    if best_step == 0:
        warnings.append(
            "no evaluation beat the start: the model handed over is the one that the training began from"
        )
    elif change is not None and change.mean < 0:  # also within the noise: it is no better
        warnings.append(
            f"the model handed over is worse than its start: held-out reward {change.after:.3f}, {change.before:.3f} "
            "at the start; keep_best: true hands over the best instead"
        )
    figures: dict[str, Any] = {}
    if change is not None:
        figures = {
            "start_reward": round(change.before, 6),
            "reward_change": round(change.mean, 6),
            "reward_change_error": round(change.error, 6),
        }
    return {**figures, **({"warnings": warnings} if warnings else {})}


def _format_reward(means: Mapping[str, float], name: str) -> str:
    return f"{means[name]:.3f}" if name in means else "none"


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


class SkippedSteps(nn.Module):
    """Counts the skipped steps in a row. A module of a buffer: the count is in every checkpoint.

    Args:
        most: number of skipped steps in a row that ends the run.
    """

    def __init__(self, max_skipped: int) -> None:
        super().__init__()
        self._max_skipped = max_skipped
        self._num_answers = 0
        self.register_buffer("in_a_row", torch.zeros((), dtype=torch.int64))

    def count(self, is_skipped: bool, num_answers: int) -> None:
        """Take notice of a step.

        Args:
            num_answers: answers that were sampled in it, with a reward or without.

        Raises:
            StageError: it is one skipped step too many.
        """
        row = self.get_buffer("in_a_row")
        row.copy_(row + 1 if is_skipped else torch.zeros_like(row))
        self._num_answers = self._num_answers + num_answers if is_skipped else 0
        if int(row) >= self._max_skipped and not self._num_answers:
            raise StageError(
                f"in {self._max_skipped} steps in a row no prompt of this process was answered: all were set aside",
                "set_aside.jsonl in the stage's folder has the reason of each",
            )
        if int(row) >= self._max_skipped:
            raise StageError(
                f"{self._max_skipped} steps in a row had nothing to train on: no answer with a reward, or equal "
                "rewards in every group",
                "see rollouts/ and set_aside.jsonl; take other prompts or rewards, a higher temperature, refill, or "
                "raise max_skipped_steps",
            )
