"""The work of the stage `train_interpreter`: streams sampled and rewarded by actions. Called on every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from audiollm.data.text.tokenizer import AUDIO_OUT_BOS
from audiollm.errors import StageError
from audiollm.families.policy import StreamPolicy
from audiollm.families.rollout import RolloutEngine, RolloutSettings
from audiollm.families.streams import stream_rate
from audiollm.interpret.training.settings import InterpreterTrainingConfig
from audiollm.interpret.training.stream_rewarder import StreamRewarder, check_streams
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.rl.online.prompts import Prompt
from audiollm.rl.online.refill import SamplesSteps
from audiollm.rl.online.rollout_step import RolloutStep, missing_rewards, sample_groups
from audiollm.rl.online.run import SamplingParts, train_policy
from audiollm.rl.rollouts.process import ProcessRollouts


def train_interpreter(config: InterpreterTrainingConfig, context: Context) -> dict[str, Any]:
    """Train an interpreter on its own actions over streams.

    Raises:
        StageError: a model that is no DualFFN, samples that are no streams, and what `train_policy` raises.
    """
    rewarders: list[StreamRewarder] = []

    def make(engine: RolloutEngine[Any], parts: SamplingParts) -> SamplesSteps:
        policy = parts.sampler
        if not isinstance(policy, StreamPolicy):
            raise StageError("the model takes no streams", "begin from a model of `train`", 2)
        check_streams(parts.prompts.samples, config)
        tokenizer = policy.template.tokenizer
        opens_speech = required(tokenizer.token_to_id(AUDIO_OUT_BOS))
        frame_s = 1 / stream_rate(policy.encoder)
        rewarders.append(StreamRewarder(config, tokenizer, opens_speech, frame_s, parts.ranks))
        return StreamMaker(engine, rewarders[-1], parts.settings, config.group_size)

    try:
        return train_policy(config, context, make)
    finally:
        for rewarder in rewarders:
            rewarder.close()


class StreamMaker:
    """A `SamplesSteps` over streams.

    Args:
        group_size: rollouts of each stream.
    """

    def __init__(
        self, engine: RolloutEngine[Any], rewarder: StreamRewarder, settings: RolloutSettings, group_size: int
    ) -> None:
        self._engine, self._rewarder = engine, rewarder
        self._settings, self._group_size = settings, group_size

    def __call__(self, prompts: Sequence[Prompt], step: int) -> RolloutStep:
        """Sample and reward the rollouts of each stream."""
        return self._sample_step(prompts, range(self._group_size), self._at(step, self._settings.temperature))

    def sampled(self, prompts: Sequence[Prompt], step: int) -> RolloutStep:
        """See `SamplesSteps.sampled`."""
        return self(prompts, step)

    def greedy(self, prompts: Sequence[Prompt], step: int) -> RolloutStep:
        """Take the likeliest actions of each stream once, and reward them."""
        return self._sample_step(prompts, [0], self._at(step, 0.0))

    def start(self, prompts: Sequence[Prompt], step: int) -> None:
        """Ask an engine that works beside this process for the streams of a step; `__call__` takes them."""
        assert isinstance(self._engine, ProcessRollouts)
        prompted = [prompt.prompted for prompt in prompts]
        numbers = [range(self._group_size)] * len(prompts)
        self._engine.start(prompted, numbers, self._at(step, self._settings.temperature))

    def _sample_step(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], settings: RolloutSettings
    ) -> RolloutStep:
        started = time.monotonic()
        groups, bad = sample_groups(self._engine, prompts, numbers, settings)
        sampled = time.monotonic()
        samples = [group.prompt.sample for group in groups for _ in group.rollouts]
        sizes = torch.tensor([len(group.rollouts) for group in groups], dtype=torch.long)
        group_B = torch.arange(len(groups)).repeat_interleave(sizes)
        scores, steps = self._rewarder(
            samples, [rollout for group in groups for rollout in group.rollouts], group_B
        )
        bad += missing_rewards(scores)
        seconds = {"rollout": sampled - started, "reward": time.monotonic() - sampled}
        return RolloutStep(groups, scores, None, bad, seconds, steps)

    def _at(self, step: int, temperature: float) -> RolloutSettings:
        return replace(self._settings, step=step, temperature=temperature)
