"""Models that answer in words: what evaluation, judges, annotation and sampling ask of a model of any family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from audiollm.models.audio_llms.inputs import Turn

if TYPE_CHECKING:
    from audiollm.generation.engine.step_engine import StepEngine
    from audiollm.generation.speaking.speech_generator import SpeechGenerator


@dataclass(frozen=True)
class AnswerRequest:
    """A conversation to answer, and how its words are drawn."""

    turns: Sequence[Turn]
    """All turns before the answer: roles, texts, recordings and pictures."""
    seed: int = 0
    temperature: float = 0.0
    """0 takes the likeliest words."""
    top_p: float = 1.0
    max_tokens: int = 256
    """Longest answer, in tokens of text."""


@dataclass(frozen=True)
class WrittenAnswer:
    """An answer in words."""

    text: str
    tokens: int
    """Tokens of the conversation with the answer."""


class AnswerError(Exception):
    """A conversation that a model cannot take, or an answer that failed.

    Args:
        reason: what is wrong, for a person.
        kind: the few words that it is counted by.
    """

    def __init__(self, reason: str, kind: str = "refused by model") -> None:
        super().__init__(reason, kind)
        self.reason, self.kind = reason, kind

    def __str__(self) -> str:
        return self.reason


class AnsweringModel(Protocol):
    """A loaded model that answers in words."""

    @property
    def name(self) -> str:
        """Name of its folder."""

    @property
    def fingerprint(self) -> str:
        """Changes when the model, or the codec that it hears with, does."""

    @property
    def hears(self) -> bool:
        """Whether it takes recordings."""

    def check(self, request: AnswerRequest) -> None:
        """Check that the model can take a conversation.

        Raises:
            AnswerError: it cannot.
        """

    def answer(
        self, requests: Sequence[AnswerRequest], check_stop: Callable[[], None] | None = None
    ) -> list[WrittenAnswer]:
        """Answer conversations, in order; each answer depends on its own request alone, up to rounding.

        Args:
            check_stop: called now and then; what it raises ends the answers, where it is no `Exception`.

        Raises:
            AnswerError: a conversation that the model cannot take, or an answer that failed.
        """

    def notes_on(self, request: AnswerRequest) -> tuple[str, ...]:
        """Return warnings: what makes the answer to this request unreliable."""


@runtime_checkable
class LikelihoodModel(AnsweringModel, Protocol):
    """A model that tells how likely answers are."""

    def log_probability(self, answered: Sequence[tuple[Sequence[Turn], str]]) -> tuple[float, int]:
        """Return the log-probability of answers in words, their ends included, and the number of their tokens.

        Args:
            answered: conversations with their answers.

        Raises:
            AnswerError: a conversation that the model cannot take.
        """


@runtime_checkable
class BatchedAnswers(AnsweringModel, Protocol):
    """A model whose answers an engine computes side by side, token by token."""

    @property
    def generator(self) -> SpeechGenerator:
        """Makes that engine; of a model that answers in words alone, it has no codec."""


@runtime_checkable
class SteppedAnswers(AnsweringModel, Protocol):
    """A model that answers in words alone, several conversations side by side."""

    def step_engine(self, slots: int, max_length: int, prefill_positions: int) -> StepEngine | None:
        """Return an engine that takes `AnswerRequest`s; None: its class answers one after the other alone.

        Args:
            slots: most answers side by side.
            max_length: positions that each of them has room for, prompt and answer together.
            prefill_positions: of a prompt, read between two steps of those under way.
        """
