"""Answers whose steps are scored: a policy's answers and batches, with the places where their steps end.

Shapes: S steps of the answers of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.data.records.sample import RatedAnswer
from audiollm.data.records.source import LoadedSample
from audiollm.families.policy import Policy


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
