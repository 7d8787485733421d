"""Penalties on the lengths of answers."""

from __future__ import annotations

import torch

from audiollm.rl.policy_gradient.reward_shaping import overlong_penalty
from audiollm.rl.rewards.batch import RewardBatch
from audiollm.rl.rewards.settings import OverlongSettings


def overlong_scores(batch: RewardBatch, settings: OverlongSettings) -> list[float | None]:
    """DAPO's penalty on answers close to their limit, from 0 down to -1; see `overlong_penalty`.

    Text is counted in tokens and speech in frames; of an answer with both, the larger penalty counts.
    """
    frames = [0 if answer.codes_KT is None else answer.codes_KT.shape[1] for answer in batch]
    words = [answer.num_tokens - num_frames for answer, num_frames in zip(batch, frames, strict=True)]
    penalty_A = torch.zeros(len(batch), dtype=torch.float64)
    for lengths, limit in ((words, settings.max_tokens), (frames, settings.max_frames)):
        if limit is not None:
            limit_penalty_A = overlong_penalty(
                torch.tensor(lengths, dtype=torch.float64), limit, settings.buffer
            )
            penalty_A = torch.minimum(penalty_A, limit_penalty_A)
    return [float(value) for value in penalty_A]
