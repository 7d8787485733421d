"""How a training on fresh answers goes: figures of its steps, evaluations on held-out prompts, alarms.

Shapes: A answers, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from audiollm.errors import BadSample, StageError
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import Ranks
from audiollm.rl.online.progress import (
    REWARD_PREFIX,
    EntropyBounds,
    HeldOutChange,
    StartMeasure,
    changes_since_start,
    collapse,
    reward_means,
)
from audiollm.rl.online.prompts import PromptMaker
from audiollm.rl.online.refill import SamplesSteps, with_variance
from audiollm.rl.online.rollout_files import GreedyAnswerFiles
from audiollm.rl.online.rollout_step import RolloutStep
from audiollm.rl.online.settings import PolicyTrainingConfig
from audiollm.rl.online.weight_copies import SampledWeights

MAX_START_PROMPTS = 16
"""Prompts whose sampled answers tell whether the start is fit to begin, at most."""


class HeldOutEvaluations:
    """Answers held-out prompts with the weights of now, and compares the rewards with those of the start.

    Args:
        maker: samples and rewards answers from the weights of now, which `weights` brings to it.
        files: where the answers are written at every evaluation; None: nowhere, and nothing is compared.
    """

    def __init__(
        self,
        config: PolicyTrainingConfig,
        prompts: PromptMaker,
        maker: SamplesSteps,
        weights: SampledWeights | None,
        files: GreedyAnswerFiles | None,
        set_aside: SetAside,
        ranks: Ranks,
    ) -> None:
        self._config, self._prompts, self._maker, self._weights = config, prompts, maker, weights
        self._files, self._set_aside, self._ranks = files, set_aside, ranks
        self._learns_from_differences = config.learns_from_differences
        self._start_figures: Mapping[str, float] | None = None
        self._start_prompts: int | None = None
        self.start: StartMeasure | None = None
        """The measure of the model that the training begins from, once `begin` was called."""

    def begin(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Answer the held-out prompts with the model that the training begins from, as step 0, and measure its rewards.

        A resumed run has done so. Called on every rank, before the loop.

        Args:
            say: told of the start's rewards, and whether the policy is fit to begin.
        """
        if self._files is None:
            return
        if not self._files.has_begun:
            self._start_figures = self.evaluate(0)
            if self._config.keep_best and "reward" not in self._start_figures:
                raise StageError("no answer to a held-out prompt has a reward", self._set_aside.remedy(), 2)
        self.start = self._files.start
        if self.start is None:
            self.start = self._measured_start()
            self._files.write_start(self.start)
            say(self.start.text())
            if fault := self.start.fault(self._learns_from_differences):
                say(fault)

    @torch.no_grad()
    def _measured_start(self) -> StartMeasure:
        """Rewards of greedy and of sampled answers; without held-out prompts, to those of the first step."""
        prompts, _ = self._prompts.held_out_prompts(min(MAX_START_PROMPTS, self._config.eval_prompts))
        is_held_out = self._prompts.held_out > 0
        if not is_held_out:
            prompts, _ = self._prompts(0)
        self._fill()
        sampled = self._maker.sampled(prompts, 0)
        count = sum(self._ranks.gather(len(prompts)))
        greedy, greedy_count = self._start_figures, self._start_prompts
        if greedy is None or not is_held_out:
            greedy, greedy_count = step_means(self._maker.greedy(prompts, 0), self._ranks), count
        figures = step_figures(sampled, self._ranks)
        flat = figures.pop("groups_without_variance")
        return StartMeasure(
            reward_means(greedy), reward_means(figures), flat, count, is_held_out, greedy_count
        )

    @torch.no_grad()
    def evaluate(self, step: int) -> Mapping[str, float]:
        """Mean rewards of greedy answers to the held-out prompts, and their length."""
        if not step and self._start_figures is not None:
            return self._start_figures
        prompts, bad = self._prompts.held_out_prompts(self._config.eval_prompts)
        if not step:
            self._start_prompts = sum(self._ranks.gather(len(prompts)))
        self._fill()
        rollout_step = self._maker.greedy(prompts, step)
        self._set_aside.add([*bad, *rollout_step.bad])
        if self._files is not None:
            self._files.write(step, rollout_step)
        return step_means(rollout_step, self._ranks)

    def changes(self, step: int) -> list[HeldOutChange]:
        """Return the changes of the held-out rewards since the start, up to a step. Called on every rank."""
        if self._files is None:
            return []
        rows: list[dict[str, Any]] = self._ranks.of_first(self._files.rows_until(step))
        return changes_since_start(rows)

    def stop_reason(self, step: int, entropy: EntropyBounds) -> str | None:
        """Return why the policy counts as collapsed, if it does. Called on every rank."""
        return collapse(self.changes(step), self._config.patience, entropy)

    def alarms(self, figures: Mapping[str, float], step: int) -> Iterator[tuple[str, str]]:
        """Alarms of a start that is not fit, and of a policy that becomes worse than its start."""
        if self.start is not None and (fault := self.start.fault(self._learns_from_differences)):
            yield "unfit start", fault
        if "evaluation/reward" not in figures or self._files is None:
            return
        changes = changes_since_start(self._files.rows_until(step))
        if not changes:
            return
        last = changes[-1]
        if last.is_clearly_below:
            yield (
                "worse than the start",
                f"the held-out reward is {last.after:.3f}, {last.before:.3f} at the start: lower the learning rate, "
                "raise kl, or train the start for more steps",
            )
        if last.lost_format:
            yield (
                "format lost",
                f"{last.format_after:.0%} of the held-out answers are well formed, {last.format_before:.0%} at the "
                "start: lower the learning rate, raise kl, or give format more weight",
            )

    def _fill(self) -> None:
        if self._weights is not None:
            self._weights.fill()


def step_alarms(
    config: PolicyTrainingConfig, figures: Mapping[str, float], failed: BadSample | None
) -> Iterator[tuple[str, str]]:
    """Alarms of rewards that fail, steps that teach nothing, and answers sampled from another distribution.

    Args:
        figures: of a step.
        failed: the first reward that failed.
    """
    if failed is not None:
        yield (
            "failed reward",
            f"{failed}; such answers are left out, and named in set_aside.jsonl (on_error: stop ends the run instead)",
        )
    are_equal = figures.get("groups_without_variance", 0.0) >= 1.0
    if config.learns_from_differences and are_equal and (failed is None or "reward" in figures):
        yield (
            "no variance",
            "in every group all answers have the same reward, so the step changes nothing: take harder or easier "
            "prompts, a higher temperature, or larger groups",
        )
    if figures.get("skipped", 0.0):
        yield (
            "skipped",
            "a step had nothing to train on, and was skipped: no answer has a reward and is kept, or the rewards "
            f"of every group are equal; {config.max_skipped_steps} such steps in a row end the run",
        )
    if figures.get("mismatch_kl", 0.0) > 0.01 and not config.ahead:
        yield (
            "mismatch",
            f"answers are sampled from another distribution than the one that is trained (KL "
            f"{figures['mismatch_kl']:.3f} a token): set `precision: fp32`, or `correction`",
        )
    if figures.get("truncated", 0.0) > 0.5:
        yield "truncated", "more than half of the answers are cut by a limit: raise max_answer_tokens"


def step_figures(rollout_step: RolloutStep, ranks: Ranks) -> dict[str, float]:
    """Means of a step over the answers of all ranks, and the share of groups without variance. Called on every rank."""
    figures = step_means(rollout_step, ranks)
    flat = sum(ranks.gather(float((~with_variance(rollout_step)).sum())))
    groups = sum(ranks.gather(len(rollout_step.groups)))
    return {**figures, "groups_without_variance": flat / max(1.0, groups)}


def step_means(rollout_step: RolloutStep, ranks: Ranks) -> dict[str, float]:
    """Means over the answers of all ranks, missing values left out. Called on every rank."""
    every = [row for rank_rows in ranks.gather(_figure_rows(rollout_step)) for row in rank_rows]
    means = {}
    for key in dict.fromkeys(key for row in every for key in row):
        values = [row[key] for row in every if row[key] == row[key]]
        if values:
            means[key] = sum(values) / len(values)
    return means


def _figure_rows(rollout_step: RolloutStep) -> list[dict[str, float]]:
    rows = []
    reward_AF, scores = rollout_step.reward_AF.tolist(), rollout_step.scores
    reported_A: Sequence[float] = scores.reported_A
    for place, rollout in enumerate(rollout_step.rollouts):
        rewards = zip(scores.by_name, reward_AF[place], strict=True)
        row = {f"{REWARD_PREFIX}{name}": value for name, value in rewards}
        reward = reported_A[place] if scores.kept_A[place] else math.nan
        row |= {"reward": reward, "truncated": float(rollout.truncated)}
        rows.append({**row, "answer_length": float(rollout.tokens.num_actions)})
    return rows
