"""What public_objectives.py asks of a model under an objective.

Shapes: K codebooks, T frames, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

BOOKS, CODES = 4, 16
SPREAD = 0.1
"""Standard deviation of the random weights."""
TEXT = "a clip"


@dataclass(frozen=True)
class Losses:
    """Losses of clips: the one that is trained, and its parts as the objective counts them."""

    total: Tensor
    first: Tensor
    """Of the first codebook; of a model with one decoder, of all codebooks."""
    rest: Tensor | None = None
    """Of the predictor; None: the model has none."""


class Subject(Protocol):
    """A model of random weights under an objective. Clips are codes `[K, T]`."""

    name: str
    objective: str

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The trained weights."""

    def losses(self, clips: Sequence[Tensor]) -> Losses:
        """The losses of clips that all belong to one text."""

    def frame_logits(self, clip_KT: Tensor, as_generated: bool) -> Tensor:
        """Logits `[T, K, V]` of the heads that say each code, with all codes before it as inputs.

        Args:
            as_generated: with the inputs that `generate` uses; else with the objective's own.
        """

    def speak(self, limit: int) -> Tensor:
        """Codes `[K, T]` by the class's own greedy `generate`."""
