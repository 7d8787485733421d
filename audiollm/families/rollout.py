"""The protocol of rollout engines, and what they give: one for our generation engine, one for transformers' `generate`.

A *rollout* is a policy's answer to a prompt; a *group* is all rollouts of one prompt. Its tokens are those that were
drawn, never encoded again from text, with the *behaviour* log-probability of each under the distribution that it was
drawn from: the policy's own at a temperature, with nothing left out but constant masks, which training applies, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from audiollm.errors import ConfigError
from audiollm.generation.engine.request import AnswerKind, SampledTokens

Prompted = TypeVar("Prompted", contravariant=True)


@dataclass(frozen=True)
class RolloutSettings:
    """How rollouts are sampled. There is no top-p, top-k or guidance: each would sample from another distribution."""

    seed: int
    step: int
    """Step of the training: with the seed, the prompt's id and the rollout's number, all that its draws depend on."""
    temperature: float = 1.0
    """0 takes the most likely token: such rollouts have no log-probabilities."""
    answer: AnswerKind = "text"
    """`text`, `audio` (speech alone), or `any`: text, with speech where the model opens it."""
    max_text_tokens: int = 512
    max_frames: int = 750
    """Most code frames, over all stretches of speech."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"temperature: {self.temperature}", "", "give 0 or more")
        for name in ("max_text_tokens", "max_frames"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)}", "", "give 1 or more")

    def seed_of(self, prompt: str, number: int) -> int:
        """Return the seed of one rollout."""
        digest = hashlib.sha256(f"{self.seed}/{self.step}/{prompt}/{number}".encode()).digest()
        return int.from_bytes(digest[:7], "little")


@dataclass(frozen=True)
class Rollout:
    """One answer of the policy to a prompt."""

    prompt: str
    """Id of the prompt's sample."""
    number: int
    """Number of the rollout among those of its prompt."""
    tokens: SampledTokens
    """Ids and codes, which of them are actions, and the behaviour log-probability of each action.

    `Policy.encode_sampled` puts them behind the prompt."""
    truncated: bool
    """Whether a limit ended the answer: it has no end of turn, or its last speech no end."""
    text: str
    """The answer's words, without control tokens."""
    seed: int


class RolloutEngine(Protocol[Prompted]):
    """A model that gives rollouts."""

    def sample(
        self, prompts: Sequence[Prompted], numbers: Sequence[Sequence[int]], settings: RolloutSettings
    ) -> list[list[Rollout]]:
        """Sample the group of each prompt.

        Args:
            prompts: as the policy's `take` makes them; their answers are not read. Ids are unique.
            numbers: numbers of the rollouts of each prompt; a rollout does not depend on which others are sampled
                beside it, up to rounding.

        Raises:
            BadSample: a prompt that the model cannot take.
            ConfigError: settings that the model cannot follow (speech from a model that writes).
        """

    def weights_changed(self) -> None:
        """Take notice that the weights are others than at the last call of `sample`."""
