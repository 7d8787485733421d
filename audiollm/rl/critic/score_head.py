"""A scalar head on the hidden states of a policy's root, for reward models and critics, and its files.

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
from audiollm.files.atomic import atomic_path, read_json, write_json
from audiollm.files.tensors import load_tensors

HEAD_FILE = "score_head.safetensors"
FACTS_FILE = "reward.json"
STATE_OF_ANSWERS = "before the end of the turn"
"""The hidden state that an answer is scored by; told beside the head, which means nothing on another one."""


class HiddenScorer(Protocol):
    """The root of a policy, as a reward model uses it."""

    def hidden_before_end(self, batch: Any) -> Tensor:
        """The hidden state `[A, C]` that the token which ends each answer is chosen from: it has seen all the rest.

        Behind that token a supervised training has no target: what a trained model has heard and said is hardly there.
        """

    def hidden_at(self, batch: Any, answer_S: Tensor, position_S: Tensor) -> Tensor:
        """The hidden state `[S, C]` at positions of answers, counted from the beginning of their prompts."""

    def hidden_before(self, batch: Any) -> Tensor:
        """The hidden state `[T, C]` that each answer token is chosen from."""

    def freeze_head(self) -> None:
        """Take the output head, which a score does not depend on, out of what is trained."""


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


def hidden_size(scorer: Any) -> int:
    """Return the size of the hidden states of a policy's root."""
    config = scorer.model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(text.hidden_size)
