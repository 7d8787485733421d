"""Settings of a critic, or value head, that is trained beside a policy. Loads no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from audiollm.recipe.stages import InputModel
from audiollm.rl.policy_gradient.settings import ValueLossSettings
from audiollm.train.settings import LoRASettings, ParameterRule

CRITIC_PATTERN = "policy.critic.*"
"""Fits the names of the critic's parameters; those of the policy are then like `policy.actor.*`."""
CRITIC_ARTIFACT = {"critic": "critic/model"}
"""The artifact of a stage that trains a critic."""


class CriticStart(BaseModel):
    """The critic: a second model with a value head, trained beside the policy on the same batches."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    start: InputModel | None = None
    """The model to begin from: a stage of `train_reward`, whose head is taken over, a critic of an earlier run, or any
    model that reads what the policy reads; None: the policy's model, with a new head."""
    trained: Literal["all", "audio_ffn", "adapter"] | list[str] | None = None
    """The trained part beside the head, as `trained` has it for the policy; None: the same as of the policy."""
    lora: LoRASettings | None = None
    """The adapter of a critic of which an adapter is trained; None: as that of the policy."""
    learning_rate: float | None = Field(None, gt=0)
    """Learning rate of the critic; None: that of the policy. A pattern of `rules` that fits a parameter of the critic
    comes first."""

    @model_validator(mode="after")
    def _check_adapter(self) -> CriticStart:
        if self.lora is not None and self.trained not in (None, "adapter"):
            raise ValueError("critic.lora is set, but critic.trained is not `adapter`: leave one out")
        return self

    def rules(self, learning_rate: float) -> tuple[ParameterRule, ...]:
        """Return the rules of parameters that give the critic its own learning rate.

        Args:
            learning_rate: of the policy.
        """
        if self.learning_rate is None:
            return ()
        return (ParameterRule(CRITIC_PATTERN, rate_factor=self.learning_rate / learning_rate),)


class CriticChoice(ValueLossSettings, CriticStart):
    """The critic of GAE, with its loss."""

    weight: float = Field(1.0, gt=0)
    """Weight of its loss beside that of the policy. Their gradients are clipped together (`clip_norm`)."""
