"""The critic beside a policy: a value for every token that an answer is made of, before it is chosen.

Shapes: T answer tokens of a batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from audiollm.families.logprobs.token_figures import TokenFigures, TokenRequest
from audiollm.rl.critic.score_head import HeadedScorer


class Critic(HeadedScorer):
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
        output = self.actor(batch, request, **passed)
        if request is None or not request.value:
            return output
        assert isinstance(output, TokenFigures)
        return output._replace(value_T=self.critic(batch))
