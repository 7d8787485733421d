"""Rewards of controls: those of a step's answers, each said of another answer of the step."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace

from make_reasoning import NAMES

from audiollm.rl.rewards.batch import RewardBatch, SampledAnswer, ScoredStep
from audiollm.rl.rewards.settings import AccuracySettings, StepsSettings
from audiollm.rl.rewards.texts import accuracy as is_right
from audiollm.rl.rewards.texts import audible_steps


def accuracy(batch: RewardBatch) -> list[float | None]:
    """Whether an answer is right, said of another one."""
    return shuffled([is_right(answer, AccuracySettings()) for answer in batch], batch)


def steps(batch: RewardBatch) -> list[list[ScoredStep] | None]:
    """The scores of all steps of the batch, each said of another step."""
    steps_by_answer = [audible_steps(answer, StepsSettings(names=NAMES)) for answer in batch]
    scores = iter(
        shuffled([step.score for answer_steps in steps_by_answer for step in answer_steps or ()], batch)
    )
    return [
        answer_steps and [replace(step, score=next(scores) or 0.0) for step in answer_steps]
        for answer_steps in steps_by_answer
    ]


def shuffled(rewards: Sequence[float | None], batch: RewardBatch) -> list[float | None]:
    """The rewards of the batch in an order that depends on its answers alone."""
    reordered = list(rewards)
    random.Random(b"".join(_digest(answer) for answer in batch)).shuffle(reordered)
    return reordered


def _digest(answer: SampledAnswer) -> bytes:
    codes = b"" if answer.codes_KT is None else answer.codes_KT.cpu().numpy().tobytes()
    return hashlib.sha256(answer.text.encode() + codes).digest()
