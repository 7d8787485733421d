"""Logits of a few target tokens, and by how much those of two models differ.

Shapes: T target tokens, V entries of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from audiollm.data.records.source import LoadedSample
from audiollm.errors import BadSample
from audiollm.families.prompts import with_last_message_as_answer
from audiollm.models.chunked_cross_entropy import HeadWeight, column_blocks, joined_weight

Logits = Sequence[Tensor]
"""float32 on the CPU, `[T, V]` for each vocabulary that has targets: words, codes."""
ReadLogits = Callable[[], Logits]
MAX_TARGETS = 256
"""Target tokens of each vocabulary whose logits are compared."""
COMPARED_SAMPLES = 4


@runtime_checkable
class GivesLogits(Protocol):
    """A policy, or a model on packs, whose logits can be looked at."""

    def target_logits(self, batch: Any) -> Logits:
        """Compute the logits of the first `MAX_TARGETS` targets of a batch, without gradient."""


@dataclass(frozen=True)
class LogitDifference:
    """By how much the logits of one model differ from those of another on the same tokens."""

    error: float
    """Root mean square of the differences, relative to that of the first model's logits around their mean."""
    same_tokens: float
    """Share of the target tokens at which both have the same likeliest token."""
    targets: int
    """Number of the target tokens."""

    @classmethod
    def between(cls, expected: Logits, actual: Logits) -> LogitDifference | None:
        """Compare logits; None where there are none."""
        difference = scale = same = 0.0
        targets = 0
        for expected_TV, actual_TV in zip(expected, actual, strict=True):
            difference += float((actual_TV - expected_TV).double().square().sum())
            centred_TV = expected_TV - expected_TV.mean(dim=1, keepdim=True)
            scale += float(centred_TV.double().square().sum())
            same += float((actual_TV.argmax(dim=1) == expected_TV.argmax(dim=1)).sum())
            targets += len(expected_TV)
        if not targets:
            return None
        return cls((difference / max(scale, 1e-30)) ** 0.5, same / targets, targets)

    def __str__(self) -> str:
        return (
            f"logits differ by {self.error:.2%} (root mean square), and the likeliest token is the same at "
            f"{self.same_tokens:.1%} of {self.targets} tokens"
        )


def head_logits(hidden_TC: Tensor, weight_VC: HeadWeight, books: int = 1) -> Tensor:
    """Compute the logits `[T x books, V]` of the first rows of a head's input, in float32 on the CPU."""
    hidden_TC = hidden_TC[: max(1, MAX_TARGETS // books)].float()
    weight = joined_weight(column_blocks(weight_VC), torch.float32)
    logits = (hidden_TC @ weight.T).unflatten(1, (books, -1)).flatten(0, 1)
    return logits.cpu()


def compared_batch(policy: Any, samples: Iterable[LoadedSample]) -> Any:
    """Make a batch of the first answers among samples, or of their last messages; None where none can be encoded."""
    encoded: list[Any] = []
    for loaded in samples:
        last = loaded.sample.messages[-1]
        if not loaded.sample.answers and (last.role != "assistant" or last.chunk_frames is not None):
            continue
        with suppress(BadSample):
            answered = loaded if loaded.sample.answers else with_last_message_as_answer(loaded)
            encoded += policy.encode(policy.take(answered, [0]))[:1]
        if len(encoded) == COMPARED_SAMPLES:
            break
    return policy.batch(encoded) if encoded else None


def read_logits(model: Any, batch: Any) -> Logits:
    """The logits of a batch's targets; none where there is no batch, or a model of another's family gives none."""
    if batch is None or not isinstance(model, GivesLogits):
        return []
    with torch.no_grad():
        return model.target_logits(batch)
