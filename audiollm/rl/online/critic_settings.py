"""Settings of the critic of `train_policy`. Loads no torch."""

from __future__ import annotations

from pydantic import Field

from audiollm.rl.policy_gradient.settings import ValueLossSettings
from audiollm.rl.preference.critic_settings import CriticStart


class CriticChoice(ValueLossSettings, CriticStart):
    """The critic of GAE, with its loss."""

    weight: float = Field(1.0, gt=0)
    """Weight of its loss beside that of the policy. Their gradients are clipped together (`clip_norm`)."""
