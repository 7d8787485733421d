"""Reward models: a scalar head on the states with which a model ends an answer or its steps, for any policy's model.

Shapes: A answers, S steps, X answers or steps, C hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.data.records.sample import RatedAnswer
from audiollm.data.records.source import LoadedSample
from audiollm.errors import ConfigError
from audiollm.families.logprobs.answers import AnswerScores, StepScores
from audiollm.families.policies import load_policy
from audiollm.families.policy import Policy
from audiollm.models.pretrained import model_folder
from audiollm.rl.critic.model import (
    HEAD_FILE,
    HeadedScorer,
    head_facts,
    head_weights,
    save_head,
    scorer_of,
)
from audiollm.train.settings import LoRASettings, Trained

MAX_TOKENS = 8_192

Scored = Literal["answers", "steps"]
"""What has a score: whole answers, or each of their steps (a process reward model)."""


class RewardScorer(HeadedScorer):
    """A policy's root with a score for each answer, or for each step: the module that a strategy wraps."""

    def forward(self, batch: Any) -> Tensor:
        """Compute the scores `[X]` of the answers of a policy's batch, or of the steps of a `SteppedBatch`."""
        scorer: Any = self.scorer
        if isinstance(batch, SteppedBatch):
            hidden_XC = scorer.hidden_at(batch.batch, batch.answer_S, batch.position_S)
        else:
            hidden_XC = scorer.hidden_before_end(batch)
        return self.score_of(hidden_XC)


class RewardModel:
    """Scores of answers to recordings and texts, in text and speech; `load` reads what the stage wrote."""

    def __init__(self, policy: Any, root: RewardScorer, scored: Scored = "answers") -> None:
        self.policy, self.root, self.scored = policy, root, scored
        """`policy` reads answers and makes batches of them: a `Policy`, or a `StepPolicy` around one."""

    @classmethod
    def begin(
        cls,
        folder: Path,
        trained: Trained = "all",
        lora: LoRASettings | None = None,
        max_tokens: int = MAX_TOKENS,
        scored: Scored = "answers",
        bias: bool = False,
    ) -> RewardModel:
        """Put a head behind the model of a folder: that of a reward model which scores the same, or else a new one.

        Args:
            trained, lora: what is trained beside the head, which always is.
            bias: whether a new head has a bias.

        Raises:
            ConfigError: the folder holds no model, or `trained` and `lora` do not fit it.
            DamagedFile: the head of a reward model is not whole.
        """
        policy: Any = load_policy(folder, trained, lora, max_tokens=max_tokens)
        scorer = scorer_of(policy, folder)
        root = RewardScorer(scorer, scorer.hidden_size, bias)
        place = model_folder(folder)
        if weights := head_weights(place, [scored]):
            root.score = nn.Linear(root.score.in_features, 1, bias="bias" in weights)
            root.score.load_state_dict(weights)
        return cls(policy if scored == "answers" else StepPolicy(policy), root, scored)

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
        scored = head_facts(place)["scored"]
        if scored == "tokens":
            raise ConfigError(
                "this is a critic, and no reward model", str(place), "give the folder of a train_reward stage"
            )
        reward_model = cls.begin(place, scored=scored)
        reward_model.root.requires_grad_(False).eval()
        return reward_model

    @property
    def base(self) -> Policy[Any, Any, Any]:
        """The policy whose hidden states are scored."""
        base: Policy[Any, Any, Any] = self.policy.base if isinstance(self.policy, StepPolicy) else self.policy
        return base

    def save(self, folder: Path) -> None:
        """Write the model, adapter merged, to `folder/model`, with the head and what it scores beside its weights."""
        self.policy.save(folder)
        save_head(folder / "model", self.root, self.scored)

    def scores(self, root: nn.Module, batch: Any) -> AnswerScores | StepScores:
        """Compute the scores of a batch of `policy` through the root as a strategy wrapped it."""
        score_X = root(batch)
        if isinstance(batch, SteppedBatch):
            return StepScores(score_X, batch.answer_S, batch.num_answers)
        return AnswerScores(score_X)

    def score(
        self, loaded: LoadedSample, answers: Sequence[int] | None = None, place: str = ""
    ) -> list[float]:
        """Score answers of a record: see `score_many`.

        Args:
            answers: numbers of the answers; None: all.
            place: where the sample was read, for errors.

        Raises:
            BadSample: a recording or an answer that the model cannot take.
        """
        return [
            self._answer_score(step_scores)
            for step_scores in self._steps([self._encoded(loaded, answers, place)])[0]
        ]

    def score_many(self, samples: Sequence[LoadedSample], max_tokens: int = MAX_TOKENS) -> list[list[float]]:
        """Score all answers of several records, in batches.

        Of a process reward model, the score of an answer is the log of the probability that all its steps are right:
        the sum of `log sigmoid` of their scores (arXiv 2305.20050, section 2.6).

        Args:
            max_tokens: tokens of a batch, with padding.

        Raises:
            BadSample: a recording or an answer that the model cannot take.
        """
        encoded = [self._encoded(loaded, None, "") for loaded in samples]
        return [
            [self._answer_score(step_scores) for step_scores in record]
            for record in self._steps(encoded, max_tokens)
        ]

    def step_scores(
        self, loaded: LoadedSample, answers: Sequence[int] | None = None, place: str = ""
    ) -> list[list[float]]:
        """Score the steps of answers of a record: logits that each is right.

        A step ends with each part of an answer that has a score for it, or with every part where it has none.

        Args:
            answers: numbers of the answers; None: all.
            place: where the sample was read, for errors.

        Raises:
            BadSample: a recording or an answer that the model cannot take.
            ValueError: the model scores whole answers.
        """
        self._check_steps()
        return self._steps([self._encoded(loaded, answers, place)])[0]

    def step_scores_many(
        self, samples: Sequence[LoadedSample], max_tokens: int = MAX_TOKENS
    ) -> list[list[list[float]]]:
        """Score the steps of all answers of several records, in batches: see `step_scores`.

        Args:
            max_tokens: tokens of a batch, with padding.

        Raises:
            BadSample: a recording or an answer that the model cannot take.
            ValueError: the model scores whole answers.
        """
        self._check_steps()
        return self._steps([self._encoded(loaded, None, "") for loaded in samples], max_tokens)

    def _check_steps(self) -> None:
        if self.scored != "steps":
            raise ValueError("this reward model scores whole answers: train one with the objective `process`")

    def _encoded(self, loaded: LoadedSample, answers: Sequence[int] | None, place: str) -> list[Any]:
        numbers = range(len(loaded.sample.answers)) if answers is None else answers
        encoded: list[Any] = self.policy.encode(self.policy.take(loaded, list(numbers), place))
        return encoded

    @torch.no_grad()
    def _steps(self, records: Sequence[list[Any]], max_tokens: int = MAX_TOKENS) -> list[list[list[float]]]:
        """The scores of each answer of each record: one, or those of its steps."""
        device = next(self.root.parameters()).device
        answer_scores: list[list[list[float]]] = [[[] for _ in record] for record in records]
        for planned in self.policy.plan(records, max_tokens):
            places = [(record, answer) for record in planned for answer in range(len(records[record]))]
            batch = self.policy.batch([records[record][answer] for record, answer in places])
            scores = self.scores(self.root, batch.to(device))
            if isinstance(scores, StepScores):
                owned = zip(scores.answer_S.tolist(), scores.score_S.tolist(), strict=True)
            else:
                owned = zip(range(len(places)), scores.score_A.tolist(), strict=True)
            for owner, value in owned:
                record, answer = places[owner]
                answer_scores[record][answer].append(value)
        return answer_scores

    def _answer_score(self, scores: Sequence[float]) -> float:
        if self.scored == "answers":
            return scores[0]
        return float(functional.logsigmoid(torch.tensor(scores, dtype=torch.float64)).sum())


def load_reward_model(folder: Path, device: torch.device | None = None) -> RewardModel:
    """Load what `train_reward` wrote, to score answers with it.

    Args:
        folder: that of the stage, or its `model`.
        device: None: the CPU.

    Raises:
        ConfigError: there is no reward model.
        DamagedFile: its head is not whole.
    """
    reward_model = RewardModel.load(folder)
    if device is not None:
        reward_model.root.to(device)
    return reward_model


@dataclass(frozen=True)
class PromptedSteps:
    """A prompt with its answers, as the policy takes them, and the steps of each answer."""

    prompted: Any
    last_parts: list[list[int]]
    """Of each answer, the part of its content that each step ends with."""


@dataclass(frozen=True)
class EncodedSteps:
    """An encoded answer, and where its steps end."""

    answer: Any
    ends: tuple[int, ...]
    """Position of each step's last token, counted from the beginning of the prompt."""


@dataclass(frozen=True)
class SteppedBatch:
    """A policy's batch, and the places of the steps of its answers."""

    batch: Any
    answer_S: Tensor
    """int64: the answer of each step; answer after answer."""
    position_S: Tensor
    """int64: position of each step's last token in its answer's sequence."""
    num_answers: int

    def to(self, device: torch.device) -> SteppedBatch:
        """Return the batch on a device."""
        answer_S, position_S = self.answer_S.to(device), self.position_S.to(device)
        return SteppedBatch(self.batch.to(device), answer_S, position_S, self.num_answers)


class StepPolicy:
    """A policy's way of reading answers, which also keeps where their steps end."""

    def __init__(self, policy: Policy[Any, Any, Any]) -> None:
        self._policy = policy

    @property
    def base(self) -> Policy[Any, Any, Any]:
        """The policy of whole answers."""
        return self._policy

    @property
    def root(self) -> nn.Module:
        """See `Policy.root`."""
        return self._policy.root

    @property
    def frozen(self) -> Mapping[str, nn.Module]:
        """See `Policy.frozen`."""
        return self._policy.frozen

    def take(self, loaded: LoadedSample, answers: Sequence[int], place: str = "") -> PromptedSteps:
        """See `Policy.take`; a step ends where the record has a score for it, or with every part where it has none."""
        last_parts = [_last_parts(loaded.sample.answers[number]) for number in answers]
        return PromptedSteps(self._policy.take(loaded, answers, place), last_parts)

    def encode(self, prompted: PromptedSteps) -> list[EncodedSteps]:
        """See `Policy.encode`."""
        encoded = self._policy.encode(prompted.prompted)
        part_ends = self._policy.part_ends(prompted.prompted, encoded)
        return [
            EncodedSteps(answer, tuple(ends[number] for number in parts))
            for answer, ends, parts in zip(encoded, part_ends, prompted.last_parts, strict=True)
        ]

    def num_answer_tokens(self, encoded: EncodedSteps) -> int:
        """See `Policy.num_answer_tokens`."""
        return self._policy.num_answer_tokens(encoded.answer)

    def plan(self, groups: Sequence[Sequence[EncodedSteps]], max_tokens: int) -> list[list[int]]:
        """See `Policy.plan`."""
        return self._policy.plan([[steps.answer for steps in group] for group in groups], max_tokens)

    def batch(self, encoded: Sequence[EncodedSteps]) -> SteppedBatch:
        """See `Policy.batch`."""
        batch = self._policy.batch([steps.answer for steps in encoded])
        answers = [number for number, steps in enumerate(encoded) for _ in steps.ends]
        positions = [end for steps in encoded for end in steps.ends]
        return SteppedBatch(batch, torch.tensor(answers).long(), torch.tensor(positions).long(), len(encoded))

    def idle_batch(self) -> SteppedBatch:
        """See `Policy.idle_batch`."""
        none = torch.zeros(0, dtype=torch.long)
        return SteppedBatch(self._policy.idle_batch(), none, none, 0)

    def save(self, folder: Path) -> None:
        """See `Policy.save`."""
        self._policy.save(folder)


def _last_parts(answer: RatedAnswer) -> list[int]:
    if answer.steps is None:
        return list(range(len(answer.content)))
    return [number for number, score in enumerate(answer.steps) if score is not None]
