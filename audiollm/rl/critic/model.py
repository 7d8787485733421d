"""A critic beside a policy: the scalar head that reward models share, its files, and the root with both.

Shapes: A answers, S steps, T answer tokens, X of any of these, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from audiollm.errors import ConfigError
from audiollm.families.logprobs.token_figures import TokenFigures, TokenRequest
from audiollm.families.policies import load_policy
from audiollm.families.policy import HiddenScorer, Policy
from audiollm.files.atomic import atomic_path, read_json, write_json
from audiollm.files.tensors import load_tensors
from audiollm.models.pretrained import model_folder
from audiollm.rl.critic.settings import CriticStart
from audiollm.train.settings import LoRASettings, Trained

HEAD_FILE = "score_head.safetensors"
FACTS_FILE = "reward.json"
STATE_OF_ANSWERS = "before the end of the turn"
"""The hidden state that an answer is scored by; told beside the head, which means nothing on another one."""


class HeadedScorer(nn.Module):
    """A policy's root with a scalar head behind it. What has a score is up to the classes below it.

    The head begins with weights of variance 1 / (C + 1) (InstructGPT, arXiv 2203.02155) and a bias of 0.

    Args:
        scorer: the root of a policy, a `HiddenScorer`.
        bias: whether the head has one; where scores are only compared, a constant would cancel.
    """

    def __init__(self, scorer: nn.Module, hidden_size: int, bias: bool = False) -> None:
        super().__init__()
        self.scorer = scorer
        self.score = nn.Linear(hidden_size, 1, bias=bias)
        nn.init.normal_(self.score.weight, std=(hidden_size + 1) ** -0.5)
        if bias:
            nn.init.zeros_(self.score.bias)

    def score_of(self, hidden_XC: Tensor) -> Tensor:
        """Compute the head's scores `[X]` of hidden states."""
        with torch.autocast(hidden_XC.device.type, enabled=False):  # bf16 would round scores to 3 digits
            score_X1: Tensor = self.score(hidden_XC.to(self.score.weight.dtype))
        return score_X1.sum(1)  # no view: FSDP2 puts a hook on what a root returns


def head_weights(place: Path, scored: Sequence[str]) -> dict[str, Tensor]:
    """Return the weights of the head beside a model, where it scores one of these; else nothing.

    Args:
        place: the model's own folder.
        scored: `answers`, `steps`, or `tokens` (a critic).

    Raises:
        ConfigError: `reward.json` is missing, or names nothing that has a score.
        DamagedFile: the head is not whole.
    """
    if not (place / HEAD_FILE).exists() or head_facts(place)["scored"] not in scored:
        return {}
    return load_tensors(place / HEAD_FILE)


def save_head(place: Path, root: HeadedScorer, scored: str) -> None:
    """Write a head, and what it scores, beside the model that is in `place`."""
    facts = {"scored": scored}
    if scored == "answers":
        facts["state"] = STATE_OF_ANSWERS
    write_json(place / FACTS_FILE, facts)
    with atomic_path(place / HEAD_FILE) as temporary:
        save_file({name: value.contiguous() for name, value in root.score.state_dict().items()}, temporary)


def head_facts(place: Path) -> dict[str, Any]:
    """What `reward.json` says.

    Raises:
        ConfigError: it is missing, or names nothing that has a score, or another state than is read today.
    """
    path = place / FACTS_FILE
    facts = read_json(path) if path.exists() else {}
    if not isinstance(facts, dict) or facts.get("scored") not in ("answers", "steps", "tokens"):
        raise ConfigError(f"{FACTS_FILE} does not say what the model scores", str(path), "train it again")
    if facts["scored"] == "answers" and facts.get("state") != STATE_OF_ANSWERS:
        raise ConfigError(
            f"its head scores another state than the one {STATE_OF_ANSWERS}, which is read now",
            str(path),
            "train it again",
        )
    return facts


def scorer_of(policy: Policy[Any, Any, Any], folder: Path) -> Any:
    """Return a policy's root, whose hidden states a head is to score, with its own output head frozen.

    Raises:
        ConfigError: the family of the model does not give hidden states.
    """
    root = policy.root
    if not isinstance(root, HiddenScorer):
        raise ConfigError(
            "models of this family give no hidden states, which reward models and critics score",
            str(folder),
            "give a DualFFN or an audio LLM of transformers, or methods of `HiddenScorer` to the policy's root",
        )
    root.freeze_head()
    return root


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
        scorer = scorer_of(policy, folder)
        root = Critic(scorer, scorer.hidden_size, bias=True)
        if weights := head_weights(model_folder(folder), ["answers", "tokens"]):
            root.score.load_state_dict({"bias": torch.zeros(1), **weights})
        return cls(policy, root)

    def save(self, folder: Path) -> None:
        """Write the model, adapter merged, with its head to `folder/model`; a later training begins from `folder`."""
        self.policy.save(folder)
        save_head(folder / "model", self.root, "tokens")
