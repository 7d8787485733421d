"""The stop test: clips by heart come out code by code, and end at their last frame.

Shapes: K codebooks, T frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from audiollm.families.policy import Policy
from audiollm.families.rollout import RolloutSettings
from audiollm.supervised.guards.trials import TEXTS, TrialSettings, spoken_prompt, train_trial

FRAMES = (2, 7, 8, 9, 40)
"""Frames of the clips."""
VALUES = 16
"""Codes are drawn from fewer than so many, which every codec has."""


@dataclass(frozen=True)
class RecitedClip:
    """A clip by heart, and what the model says with its likeliest codes."""

    frames: int
    spoken_frames: int
    """At most the limit of the generation, twice the longest clip's frames."""
    has_ended: bool
    right: float
    """Share of the clip's codes that were said."""

    @property
    def is_whole(self) -> bool:
        """Whether every code came, and then the end."""
        return self.has_ended and self.spoken_frames == self.frames and self.right == 1.0


@dataclass(frozen=True)
class StopTest:
    """The clips, and the loss with which the training ended, in nats a target."""

    clips: Sequence[RecitedClip]
    loss: float


def test_stop(
    policy: Policy[Any, Any, Any],
    settings: TrialSettings,
    frames: Sequence[int] = FRAMES,
    advance: Callable[[], None] = lambda: None,
) -> StopTest:
    """Learn clips of random codes by heart, and say them."""
    generator = torch.Generator().manual_seed(settings.seed)
    codes = [torch.randint(1, VALUES, (policy.num_codebooks, count), generator=generator) for count in frames]
    clips = [spoken_prompt(TEXTS[number], codes_KT) for number, codes_KT in enumerate(codes)]
    loss = float("nan")
    for logprobs in train_trial(policy, lambda step: clips, settings, advance):
        loss = -float(logprobs.policy_T.detach().mean())
    request = RolloutSettings(
        seed=settings.seed, step=0, temperature=0.0, answer="audio", max_frames=2 * max(frames)
    )
    engine = policy.rollout_engine()
    engine.weights_changed()
    groups = engine.sample(clips, [[0]] * len(clips), request)
    spoken = [
        _compare_clip(codes_KT, group[0].tokens.codes[0].cpu(), not group[0].truncated)
        for codes_KT, group in zip(codes, groups, strict=True)
    ]
    return StopTest(spoken, loss)


def _compare_clip(codes_KT: Tensor, spoken_KT: Tensor, has_ended: bool) -> RecitedClip:
    common = min(codes_KT.shape[1], spoken_KT.shape[1])
    right = int((codes_KT[:, :common] == spoken_KT[:, :common]).sum())
    return RecitedClip(codes_KT.shape[1], spoken_KT.shape[1], has_ended, right / codes_KT.numel())
