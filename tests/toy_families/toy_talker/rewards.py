"""A reward of the toy's own: how near an answer is to so many frames."""

from __future__ import annotations

from audiollm.rl.rewards.batch import RewardBatch


def few_frames(batch: RewardBatch) -> list[float]:
    """0 at four frames, and less with every frame more or fewer."""
    return [-abs(4.0 - (0 if answer.codes_KT is None else answer.codes_KT.shape[1])) for answer in batch]
