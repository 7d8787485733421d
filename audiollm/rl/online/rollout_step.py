"""The fresh answers of a step: sampled from the weights of now, and rewarded.

Shapes: A answers of this rank, group after group; G prompts; F reward functions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from math import nan
from typing import Any

import torch
from torch import Tensor

from audiollm.audio.samples import Waveform
from audiollm.codec import Codec
from audiollm.errors import BadSample
from audiollm.families.rollout import Rollout, RolloutEngine, RolloutSettings
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

    @property
    def rollouts(self) -> list[Rollout]:
        """All answers, group after group."""
        return [each for group in self.groups for each in group.rollouts]

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
        groups, bad = self._sampled(prompts, range(self._group_size), settings)
        greedy: list[RolloutGroup] = []
        if self._needs_greedy:
            greedy, _ = self._sampled([group.prompt for group in groups], [0], self._at(step, 0.0))
        sampled = time.monotonic()
        scores = self._rewards.score(sampled_answers(groups, self._codec))
        baseline = self._rewards.score(sampled_answers(greedy, self._codec)) if self._needs_greedy else None
        seconds = {"rollout": sampled - started, "reward": time.monotonic() - sampled}
        made = RolloutStep(groups, scores, baseline, [*bad, *missing_rewards(scores)], seconds)
        return made if self._steps is None else replace(made, steps=self._steps(made.rollouts, scores))

    def sampled(self, prompts: Sequence[Prompt], step: int) -> RolloutStep:
        """See `SamplesSteps.sampled`."""
        return self(prompts, step)

    def start(self, prompts: Sequence[Prompt], step: int) -> None:
        """Ask an engine that works beside this process for the answers of a step; `__call__` takes them."""
        assert isinstance(self._engine, ProcessRollouts)
        prompted = [each.prompted for each in prompts]
        group = list(range(self._group_size))
        self._engine.start(prompted, [group] * len(prompts), self._at(step, self._settings.temperature))
        if self._needs_greedy:
            self._engine.start(prompted, [[0]] * len(prompts), self._at(step, 0.0))

    def greedy(self, prompts: Sequence[Prompt], step: int) -> RolloutStep:
        """Answer each prompt once, greedily, and reward the answers."""
        groups, bad = self._sampled(prompts, [0], self._at(step, 0.0))
        scores = self._rewards.score(sampled_answers(groups, self._codec))
        return RolloutStep(groups, scores, None, [*bad, *missing_rewards(scores)])

    def _at(self, step: int, temperature: float) -> RolloutSettings:
        return RolloutSettings(**{**vars(self._settings), "step": step, "temperature": temperature})

    def _sampled(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], settings: RolloutSettings
    ) -> tuple[list[RolloutGroup], list[BadSample]]:
        """Sample all groups together; where the model refuses a prompt, that one is left out."""
        try:
            found = self._engine.sample(
                [each.prompted for each in prompts], [numbers] * len(prompts), settings
            )
            return [RolloutGroup(*each) for each in zip(prompts, found, strict=True)], []
        except BadSample:
            return self._one_by_one(prompts, numbers, settings)

    def _one_by_one(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], settings: RolloutSettings
    ) -> tuple[list[RolloutGroup], list[BadSample]]:
        groups: list[RolloutGroup] = []
        bad: list[BadSample] = []
        for prompt in prompts:
            try:
                (rollouts,) = self._engine.sample([prompt.prompted], [numbers], settings)
                groups.append(RolloutGroup(prompt, rollouts))
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
                None if codes_KT is None or codec is None else spoken(codes_KT, codec),
                rollout.number,
                group.prompt.asked,
            )
            for group in groups
            for rollout in group.rollouts
        ]
    )


@torch.inference_mode()
def spoken(codes_KT: Tensor, codec: Codec) -> Waveform:
    """Decode speech; no frames give no samples."""
    samples_CN = codec.decode(codes_KT) if codes_KT.shape[1] else torch.zeros(1, 0)
    return Waveform(samples_CN.float().cpu().clamp(-1, 1), codec.sample_rate)


def total_rewards(scores: RewardScores) -> Tensor:
    """float64: weighted sums of the rewards, NaN where one is missing."""
    found = [total if kept else nan for total, kept in zip(scores.total_A, scores.kept_A, strict=True)]
    return torch.tensor(found, dtype=torch.float64)


def missing_rewards(scores: RewardScores) -> list[BadSample]:
    """Return rewards without a value, as they are set aside."""
    return [BadSample(f"reward {each.reward}", each.sample, f"answer {each.number}: {each.reason}", NO_REWARD)
            for each in scores.problems]  # fmt: skip


def failed_reward(bad: Sequence[BadSample]) -> BadSample | None:
    """The first reward that failed: it raised, hung, or returned no number. One that gave None did not fail."""
    missing = (each for each in bad if each.kind == NO_REWARD)
    return next((each for each in missing if not each.reason.endswith(GAVE_NONE)), None)


def selected_groups(made: RolloutStep, chosen: Sequence[bool]) -> RolloutStep:
    """Return the step with some of its groups alone, without its bad samples, seconds and figures."""
    groups = zip(made.groups, chosen, strict=True)
    return selected_answers(made, [own for group, own in groups for _ in group.rollouts])


def selected_answers(made: RolloutStep, chosen: Sequence[bool]) -> RolloutStep:
    """Return the step with some of its answers alone, without its bad samples, seconds and figures.

    Groups that are left without an answer are not in it.
    """
    left = iter(chosen)
    groups = [
        RolloutGroup(group.prompt, [each for each in group.rollouts if next(left)]) for group in made.groups
    ]
    has_any = [bool(group.rollouts) for group in groups]
    return RolloutStep(
        list(compress(groups, has_any)),
        _selected_scores(made.scores, chosen),
        None if made.greedy is None else _selected_scores(made.greedy, has_any),
        steps=list(compress(made.steps, chosen)),
    )


def joined_steps(steps: Sequence[RolloutStep]) -> RolloutStep:
    """Put groups together, in order; seconds are added. What the first has replaced, and its figures, are left out."""
    greedy = [each.greedy for each in steps if each.greedy is not None]
    seconds: dict[str, float] = {}
    for each in steps:
        for phase, spent in each.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
    return RolloutStep(
        [group for each in steps for group in each.groups],
        _joined_scores([each.scores for each in steps]),
        _joined_scores(greedy) if greedy else None,
        [bad for each in steps for bad in each.bad],
        seconds,
        [own for each in steps for own in each.steps],
    )


def _selected_scores(scores: RewardScores, chosen: Sequence[bool]) -> RewardScores:
    return RewardScores(
        list(compress(scores.total_A, chosen)),
        list(compress(scores.kept_A, chosen)),
        {name: list(compress(values, chosen)) for name, values in scores.by_name.items()},
        steps_by_name={name: list(compress(own, chosen)) for name, own in scores.steps_by_name.items()},
        raw_A=None if scores.raw_A is None else list(compress(scores.raw_A, chosen)),
    )


def _joined_scores(parts: Sequence[RewardScores]) -> RewardScores:
    return RewardScores(
        [value for part in parts for value in part.total_A],
        [kept for part in parts for kept in part.kept_A],
        {name: [value for part in parts for value in part.by_name[name]] for name in parts[0].by_name},
        [problem for part in parts for problem in part.problems],
        raw_A=[value for part in parts for value in part.told_A] if parts[0].raw_A is not None else None,
    )


def group_numbers(made: RolloutStep) -> Tensor:
    """int64 `[A]`: the group of each answer."""
    sizes = torch.tensor([len(group.rollouts) for group in made.groups], dtype=torch.long)
    return torch.arange(len(made.groups)).repeat_interleave(sizes)
