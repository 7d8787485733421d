"""The work of the stage `train_interpreter`. Called on every rank."""

from __future__ import annotations

from typing import Any

from audiollm.codec import FRAME_RATE
from audiollm.data.text.tokenizer import AUDIO_OUT_BOS
from audiollm.errors import StageError
from audiollm.families.policy import StreamPolicy
from audiollm.families.rollout import RolloutEngine
from audiollm.interpret.training.settings import InterpreterTrainingConfig
from audiollm.interpret.training.stream_maker import StreamMaker
from audiollm.interpret.training.stream_rewarder import StreamRewarder, check_streams
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.rl.online.refill import SamplesSteps
from audiollm.rl.online.run import SamplingParts, train_policy


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
        rewarders.append(StreamRewarder(config, tokenizer, opens_speech, 1 / FRAME_RATE, parts.ranks))
        return StreamMaker(engine, rewarders[-1], parts.settings, config.group_size)

    try:
        return train_policy(config, context, make)
    finally:
        for rewarder in rewarders:
            rewarder.close()
