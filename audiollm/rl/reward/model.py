"""Reward models: a scalar head on the state with which a model ends an answer, for any policy's model.

Shapes: A answers, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from audiollm.data.records.source import LoadedSample
from audiollm.errors import ConfigError
from audiollm.files.atomic import atomic_path
from audiollm.files.tensors import load_tensors
from audiollm.models.pretrained import model_folder
from audiollm.rl.objectives.answers import AnswerScores
from audiollm.rl.policy.protocol import Policy
from audiollm.rl.preference.policies import load_policy
from audiollm.train.options import LoRASettings, Trained

HEAD_FILE = "score_head.safetensors"
MAX_TOKENS = 8_192


class HiddenScorer(Protocol):
    """The root of a policy, as a reward model uses it."""

    def last_hidden(self, batch: Any) -> Tensor:
        """The hidden state `[A, C]` at the token that ends each answer."""

    def freeze_head(self) -> None:
        """Take the output head, which a score does not depend on, out of what is trained."""


class RewardScorer(nn.Module):
    """A policy's root with a scalar head behind it: the module that a strategy wraps.

    The head begins with weights of variance 1 / (C + 1) (InstructGPT, arXiv 2203.02155) and no bias: a constant would
    cancel in every comparison.
    """

    def __init__(self, scorer: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.scorer = scorer
        self.score = nn.Linear(hidden_size, 1, bias=False)
        nn.init.normal_(self.score.weight, std=(hidden_size + 1) ** -0.5)

    def forward(self, batch: Any) -> Tensor:
        """Compute the score `[A]` of each answer of a policy's batch."""
        hidden_AC: Tensor = self.scorer.last_hidden(batch)  # type: ignore[operator]
        score_A1: Tensor = self.score(hidden_AC.to(self.score.weight.dtype))
        return score_A1[:, 0]


class RewardModel:
    """Scores of answers to recordings and texts, in text and speech; `load` reads what the stage wrote."""

    def __init__(self, policy: Policy[Any, Any, Any], root: RewardScorer) -> None:
        self.policy, self.root = policy, root

    @classmethod
    def begin(
        cls,
        folder: Path,
        trained: Trained = "all",
        lora: LoRASettings | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> RewardModel:
        """Put a new head, drawn from torch's generator, behind the model of a folder.

        Raises:
            ConfigError: the folder holds no model, or `trained` and `lora` do not fit it.
        """
        policy = load_policy(folder, trained, lora, max_tokens=max_tokens)
        scorer: Any = policy.root
        if trained == "all":
            scorer.freeze_head()
        return cls(policy, RewardScorer(scorer, _hidden_size(scorer)))

    @classmethod
    def load(cls, folder: Path) -> RewardModel:
        """Load a trained reward model on the CPU, in eval mode.

        Args:
            folder: that of the stage `train_reward`, or its `model`.

        Raises:
            ConfigError: there is no reward model.
            DamagedFile: its head is not whole.
        """
        place = model_folder(folder)
        if not (place / HEAD_FILE).exists():
            raise ConfigError(
                f"no reward model here: {HEAD_FILE} is missing",
                str(place),
                "give the folder of a train_reward stage",
            )
        made = cls.begin(place)
        made.root.score.load_state_dict(load_tensors(place / HEAD_FILE))
        made.root.requires_grad_(False).eval()
        return made

    def save(self, folder: Path) -> None:
        """Write the model, adapter merged, to `folder/model`, with the head beside its weights."""
        self.policy.save(folder)
        with atomic_path(folder / "model" / HEAD_FILE) as temporary:
            save_file({"weight": self.root.score.weight.detach().contiguous()}, temporary)

    def answer_scores(self, root: nn.Module, batch: Any) -> AnswerScores:
        """Compute the scores of a policy's batch through the root as a strategy wrapped it."""
        return AnswerScores(root(batch))

    @torch.no_grad()
    def score(
        self, loaded: LoadedSample, answers: Sequence[int] | None = None, place: str = ""
    ) -> list[float]:
        """Score answers of a record.

        Args:
            answers: numbers of the answers; None: all.
            place: where the sample was read, for errors.

        Raises:
            BadSample: a recording or an answer that the model cannot take.
        """
        numbers = range(len(loaded.sample.answers)) if answers is None else answers
        device = next(self.root.parameters()).device
        encoded = self.policy.encode(self.policy.take(loaded, list(numbers), place))
        found: list[float] = self.root(self.policy.batch(encoded).to(device)).tolist()
        return found


def _hidden_size(scorer: Any) -> int:
    config = scorer.model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(text.hidden_size)
