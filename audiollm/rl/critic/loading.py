"""The critic of a training: how it is loaded, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from audiollm.families.policies import load_policy
from audiollm.families.policy import Policy
from audiollm.models.pretrained import model_folder
from audiollm.rl.critic.score_head import head_weights, hidden_size, save_head
from audiollm.rl.critic.settings import CriticStart
from audiollm.rl.critic.value_model import Critic
from audiollm.train.options import LoRASettings, Trained


class HasCritic(Protocol):
    """Settings of a training with a critic."""

    @property
    def start(self) -> Path:
        """The model that the policy begins from."""

    @property
    def trained(self) -> Trained:
        """The trained part of the policy."""

    @property
    def lora(self) -> LoRASettings:
        """The policy's adapter."""

    @property
    def critic(self) -> CriticStart | None:
        """The critic's settings."""


class CriticModel:
    """A critic with the policy around its model, which loads and writes it."""

    def __init__(self, policy: Policy[Any, Any, Any], root: Critic) -> None:
        self.policy, self.root = policy, root

    @classmethod
    def begin(cls, config: HasCritic, max_tokens: int) -> CriticModel:
        """Load the critic that a training begins with, on the CPU: see `critic` among its settings.

        A head that scores whole answers or tokens is taken over; a new one begins as that of a reward model does.

        Raises:
            ConfigError: the folder holds no model, or `trained` and `lora` do not fit it.
            DamagedFile: the head is not whole.
        """
        choice = config.critic
        assert choice is not None
        folder = choice.start or config.start
        policy = load_policy(
            folder, choice.trained or config.trained, choice.lora or config.lora, max_tokens=max_tokens
        )
        scorer: Any = policy.root
        scorer.freeze_head()
        root = Critic(scorer, hidden_size(scorer), bias=True)
        if weights := head_weights(model_folder(folder), ["answers", "tokens"]):
            root.score.load_state_dict({"bias": torch.zeros(1), **weights})
        return cls(policy, root)

    def save(self, folder: Path) -> None:
        """Write the model, adapter merged, with its head to `folder/model`; a later training begins from `folder`."""
        self.policy.save(folder)
        save_head(folder / "model", self.root, "tokens")
