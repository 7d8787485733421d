"""The fresh answers of a step: sampled from the weights of now, and rewarded.

Shapes: A answers of this rank, group after group; G prompts; F reward functions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from audiollm.audio.samples import Waveform
from audiollm.codec import Codec
from audiollm.errors import BadSample
from audiollm.families.rollout import Rollout, RolloutEngine, RolloutSettings
from audiollm.recipe.stages import required
from audiollm.rl.online.prompts import Prompt
from audiollm.rl.online.steps import StepReward, StepRewarder
from audiollm.rl.rewards.batch import RewardBatch, SampledAnswer
from audiollm.rl.rewards.scoring import GAVE_NONE, RewardScores, RewardSuite
from audiollm.rl.rollouts.process import ProcessRollouts

NO_REWARD = "no reward"
"""Kind of an answer that is set aside because a reward has no value for it."""


@dataclass(frozen=True)
class RolloutGroup:
    """A prompt and the policy's answers to it."""

    prompt: Prompt
    rollouts: list[Rollout]


class StepColumns(NamedTuple):
    """What is known of each answer of a step, answer after answer."""

    group_A: Tensor
    reward_A: Tensor
    kept_reward_AF: Tensor
    greedy_reward_G: Tensor | None
    truncated_A: Tensor
    behaviour: list[Tensor]
    """Log-probabilities of each answer's tokens, as they were sampled."""
    steps: list[list[StepReward]]


@dataclass(frozen=True)
class RolloutStep:
    """This rank's answers of a step with their rewards."""

    groups: list[RolloutGroup]
    scores: RewardScores
    """Of all answers, group after group."""
    greedy: RewardScores | None
    """Of the greedy answer to each prompt, where the advantage reads it."""
    bad: list[BadSample] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Time by phase."""
    steps: list[list[StepReward]] = field(default_factory=list)
    """Rewards of the steps of each answer, where the advantage reads them."""
    replaced: RolloutStep | None = None
    """Groups that other prompts took the place of: they are not trained on."""
    figures: dict[str, float] = field(default_factory=dict)
    """Figures of the whole step, the same on all ranks."""

    @property
    def sampled(self) -> RolloutStep:
        """All that was sampled: also the groups that were replaced."""
        return self if self.replaced is None else joined_steps([self, self.replaced])

    def columns(self) -> StepColumns:
        """All that the training reads of the answers."""
        behaviour = [
            required(rollout.tokens.logprob_A) for rollout in self.rollouts
        ]  # temperature is above 0
        return StepColumns(
            group_numbers(self),
            self.reward_A,
            self.kept_reward_AF,
            self.greedy_reward_G,
            self.truncated_A,
            behaviour,
            self.steps,
        )

    @property
    def rollouts(self) -> list[Rollout]:
        """All answers, group after group."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def reward_AF(self) -> Tensor:
        """float64: the rewards by function, NaN where there is none."""
        columns = [[nan if v is None else v for v in values] for values in self.scores.by_name.values()]
        return torch.tensor(columns, dtype=torch.float64).reshape(len(columns), -1).T

    @property
    def kept_reward_AF(self) -> Tensor:
        """`reward_AF`, NaN by every function for an answer that lacks one: it has a part in no baseline."""
        return self.reward_AF.masked_fill(self.reward_A.isnan()[:, None], nan)

    @property
    def reward_A(self) -> Tensor:
        """float64: the weighted sums, NaN where one of the rewards is missing."""
        return total_rewards(self.scores)

    @property
    def truncated_A(self) -> Tensor:
        """bool: answers that a limit cut."""
        return torch.tensor([rollout.truncated for rollout in self.rollouts], dtype=torch.bool)

    @property
    def greedy_reward_G(self) -> Tensor | None:
        """float64: the same of the greedy answers."""
        return None if self.greedy is None else total_rewards(self.greedy)


class RolloutMaker:
    """Samples and rewards.

    Args:
        engine: samples from the weights of the time of the call.
        rewards: of each answer.
        group_size: answers to each prompt.
        needs_greedy: whether greedy answers are rewarded, too (ReMax).
        codec: decodes speech for rewards that hear it; None: none does.
        steps: finds the rewards of steps; None: the advantage does not read them.
    """

    def __init__(
        self,
        engine: RolloutEngine[Any],
        rewards: RewardSuite,
        settings: RolloutSettings,
        group_size: int,
        needs_greedy: bool,
        codec: Codec | None = None,
        steps: StepRewarder | None = None,
    ) -> None:
        self._engine, self._rewards, self._settings, self._codec = engine, rewards, settings, codec
        self._steps = steps
        self._group_size, self._needs_greedy = group_size, needs_greedy

    def __call__(self, prompts: Sequence[Prompt], step: int) -> RolloutStep:
        """Sample and reward a group for each prompt."""
        started = time.monotonic()
        settings = self._at(step, self._settings.temperature)
        groups, bad = sample_groups(self._engine, prompts, range(self._group_size), settings)
        greedy: list[RolloutGroup] = []
        if self._needs_greedy:
            greedy, _ = sample_groups(
                self._engine, [group.prompt for group in groups], [0], self._at(step, 0.0)
            )
        sampled = time.monotonic()
        scores = self._rewards.score(sampled_answers(groups, self._codec))
        baseline = self._rewards.score(sampled_answers(greedy, self._codec)) if self._needs_greedy else None
        seconds = {"rollout": sampled - started, "reward": time.monotonic() - sampled}
        rollout_step = RolloutStep(groups, scores, baseline, [*bad, *missing_rewards(scores)], seconds)
        return (
            rollout_step
            if self._steps is None
            else replace(rollout_step, steps=self._steps(rollout_step.rollouts, scores))
        )

    def sampled(self, prompts: Sequence[Prompt], step: int) -> RolloutStep:
        """See `SamplesSteps.sampled`."""
        return self(prompts, step)

    def start(self, prompts: Sequence[Prompt], step: int) -> None:
        """Ask an engine that works beside this process for the answers of a step; `__call__` takes them."""
        assert isinstance(self._engine, ProcessRollouts)
        prompted = [prompt.prompted for prompt in prompts]
        group = list(range(self._group_size))
        self._engine.start(prompted, [group] * len(prompts), self._at(step, self._settings.temperature))
        if self._needs_greedy:
            self._engine.start(prompted, [[0]] * len(prompts), self._at(step, 0.0))

    def greedy(self, prompts: Sequence[Prompt], step: int) -> RolloutStep:
        """Answer each prompt once, greedily, and reward the answers."""
        groups, bad = sample_groups(self._engine, prompts, [0], self._at(step, 0.0))
        scores = self._rewards.score(sampled_answers(groups, self._codec))
        return RolloutStep(groups, scores, None, [*bad, *missing_rewards(scores)])

    def _at(self, step: int, temperature: float) -> RolloutSettings:
        return replace(self._settings, step=step, temperature=temperature)


def sample_groups(
    engine: RolloutEngine[Any], prompts: Sequence[Prompt], numbers: Sequence[int], settings: RolloutSettings
) -> tuple[list[RolloutGroup], list[BadSample]]:
    """Sample all groups together; where the model refuses a prompt, one by one, and that prompt is left out.

    Args:
        numbers: of the answers to each prompt.
    """
    try:
        rollouts = engine.sample([prompt.prompted for prompt in prompts], [numbers] * len(prompts), settings)
        return [RolloutGroup(*pair) for pair in zip(prompts, rollouts, strict=True)], []
    except BadSample:
        pass
    groups: list[RolloutGroup] = []
    bad: list[BadSample] = []
    for prompt in prompts:
        try:
            (answers,) = engine.sample([prompt.prompted], [numbers], settings)
            groups.append(RolloutGroup(prompt, answers))
        except BadSample as error:
            bad.append(error.with_traceback(None))
    return groups, bad


def sampled_answers(groups: Sequence[RolloutGroup], codec: Codec | None) -> RewardBatch:
    """What reward functions are given, group after group."""
    return RewardBatch(
        [
            SampledAnswer(
                group.prompt.sample,
                rollout.text,
                int(rollout.tokens.is_action_N.sum()) + sum(codes.shape[1] for codes in rollout.tokens.codes),
                rollout.truncated,
                codes_KT := (torch.cat(rollout.tokens.codes, 1) if rollout.tokens.codes else None),
                None if codes_KT is None or codec is None else decode_speech(codes_KT, codec),
                rollout.number,
                group.prompt.question,
            )
            for group in groups
            for rollout in group.rollouts
        ]
    )


@torch.inference_mode()
def decode_speech(codes_KT: Tensor, codec: Codec) -> Waveform:
    """Decode speech; no frames give no samples."""
    samples_CN = codec.decode(codes_KT) if codes_KT.shape[1] else torch.zeros(1, 0)
    return Waveform(samples_CN.float().cpu().clamp(-1, 1), codec.sample_rate)


def total_rewards(scores: RewardScores) -> Tensor:
    """float64: weighted sums of the rewards, NaN where one is missing."""
    totals = [total if is_kept else nan for total, is_kept in zip(scores.total_A, scores.kept_A, strict=True)]
    return torch.tensor(totals, dtype=torch.float64)


def missing_rewards(scores: RewardScores) -> list[BadSample]:
    """Return rewards without a value, as they are set aside."""
    return [
        BadSample(
            f"reward {problem.reward}",
            problem.sample,
            f"answer {problem.number}: {problem.reason}",
            NO_REWARD,
        )
        for problem in scores.problems
    ]


def failed_reward(bad: Sequence[BadSample]) -> BadSample | None:
    """The first reward that failed: it raised, hung, or returned no number. One that gave None did not fail."""
    missing = (sample for sample in bad if sample.kind == NO_REWARD)
    return next((sample for sample in missing if not sample.reason.endswith(GAVE_NONE)), None)


def selected_groups(rollout_step: RolloutStep, is_selected: Sequence[bool]) -> RolloutStep:
    """Return the step with some of its groups alone, without its bad samples, seconds and figures."""
    groups = zip(rollout_step.groups, is_selected, strict=True)
    return selected_answers(rollout_step, [selected for group, selected in groups for _ in group.rollouts])


def selected_answers(rollout_step: RolloutStep, is_selected: Sequence[bool]) -> RolloutStep:
    """Return the step with some of its answers alone, without its bad samples, seconds and figures.

    Groups that are left without an answer are not in it.
    """
    remaining = iter(is_selected)
    groups = [
        RolloutGroup(group.prompt, [rollout for rollout in group.rollouts if next(remaining)])
        for group in rollout_step.groups
    ]
    has_any = [bool(group.rollouts) for group in groups]
    return RolloutStep(
        list(compress(groups, has_any)),
        _selected_scores(rollout_step.scores, is_selected),
        None if rollout_step.greedy is None else _selected_scores(rollout_step.greedy, has_any),
        steps=list(compress(rollout_step.steps, is_selected)),
    )


def joined_steps(steps: Sequence[RolloutStep]) -> RolloutStep:
    """Put groups together, in order; seconds are added. What the first has replaced, and its figures, are left out."""
    greedy = [rollout_step.greedy for rollout_step in steps if rollout_step.greedy is not None]
    seconds: dict[str, float] = {}
    for rollout_step in steps:
        for phase, spent in rollout_step.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
    return RolloutStep(
        [group for rollout_step in steps for group in rollout_step.groups],
        _joined_scores([rollout_step.scores for rollout_step in steps]),
        _joined_scores(greedy) if greedy else None,
        [bad for rollout_step in steps for bad in rollout_step.bad],
        seconds,
        [answer_steps for rollout_step in steps for answer_steps in rollout_step.steps],
    )


def _selected_scores(scores: RewardScores, is_selected: Sequence[bool]) -> RewardScores:
    return RewardScores(
        list(compress(scores.total_A, is_selected)),
        list(compress(scores.kept_A, is_selected)),
        {name: list(compress(values, is_selected)) for name, values in scores.by_name.items()},
        steps_by_name={
            name: list(compress(step_scores, is_selected))
            for name, step_scores in scores.steps_by_name.items()
        },
        raw_A=None if scores.raw_A is None else list(compress(scores.raw_A, is_selected)),
    )


def _joined_scores(every: Sequence[RewardScores]) -> RewardScores:
    return RewardScores(
        [value for scores in every for value in scores.total_A],
        [is_kept for scores in every for is_kept in scores.kept_A],
        {name: [value for scores in every for value in scores.by_name[name]] for name in every[0].by_name},
        [problem for scores in every for problem in scores.problems],
        raw_A=[value for scores in every for value in scores.reported_A]
        if every[0].raw_A is not None
        else None,
    )


def group_numbers(rollout_step: RolloutStep) -> Tensor:
    """int64 `[A]`: the group of each answer."""
    sizes = torch.tensor([len(group.rollouts) for group in rollout_step.groups], dtype=torch.long)
    return torch.arange(len(rollout_step.groups)).repeat_interleave(sizes)
