"""The reward of `learn_grpo`'s control: whether an answer is right, said of another answer of the step."""

from __future__ import annotations

import random

from audiollm.rl.rewards.batch import RewardBatch
from audiollm.rl.rewards.settings import AccuracySettings
from audiollm.rl.rewards.texts import accuracy as is_right


def accuracy(batch: RewardBatch) -> list[float | None]:
    """The rewards of the batch in an order that depends on its answers alone."""
    rewards = [is_right(answer, AccuracySettings()) for answer in batch]
    random.Random("\n".join(answer.text for answer in batch)).shuffle(rewards)
    return rewards
