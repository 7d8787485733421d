"""The critic of a training on fresh answers: a value for every token that an answer is made of, before it is chosen.

Shapes: T answer tokens of a batch, C hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.models.pretrained import model_folder
from audiollm.rl.online.settings import PolicyTrainingConfig
from audiollm.rl.policy.protocol import Policy
from audiollm.rl.policy.token_figures import TokenFigures, TokenRequest
from audiollm.rl.preference.policies import load_policy
from audiollm.rl.reward.model import RewardScorer, head_weights, hidden_size, save_head


class Critic(RewardScorer):
    """A policy's root with a scalar head, which reads the hidden states that the answer tokens are chosen from.

    The codes of a frame are chosen from one state, so they have one value.
    """

    def forward(self, batch: Any) -> Tensor:
        """Compute the values `[T]` of the answer tokens of a policy's batch."""
        scorer: Any = self.scorer
        return self.score_of(scorer.hidden_before(batch))


class ActorCritic(nn.Module):
    """A policy's root and a critic as one module: what a strategy wraps. Both read the batch in one forward pass."""

    def __init__(self, actor: nn.Module, critic: Critic) -> None:
        super().__init__()
        self.actor, self.critic = actor, critic

    def forward(self, batch: Any, request: TokenRequest | None, **passed: Any) -> Any:
        """Compute what the actor gives, with values where `request.value` asks for them.

        Args:
            request, passed: as the policy's root takes them.
        """
        found = self.actor(batch, request, **passed)
        if request is None or not request.value:
            return found
        assert isinstance(found, TokenFigures)
        return found._replace(value_T=self.critic(batch))


class CriticModel:
    """A critic with the policy around its model, which loads and writes it."""

    def __init__(self, policy: Policy[Any, Any, Any], root: Critic) -> None:
        self.policy, self.root = policy, root

    @classmethod
    def begin(cls, config: PolicyTrainingConfig, max_tokens: int) -> CriticModel:
        """Load the critic that a training begins with, on the CPU: see `critic` among the settings.

        A head that scores whole answers or tokens is taken over; a new one begins as that of a reward model does.

        Raises:
            ConfigError: the folder holds no model, or `trained` and `lora` do not fit it.
            DamagedFile: the head is not whole.
        """
        choice = config.critic
        assert choice is not None
        folder = choice.model or config.model
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
