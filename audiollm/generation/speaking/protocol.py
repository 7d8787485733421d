"""What speaking needs of a loaded model and of its engine, whatever the family of the model.

Shapes: K codebooks, T code frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from audiollm.audio import Waveform
from audiollm.codec import Codec
from audiollm.data.hearing.features import PartAudio, PartSize
from audiollm.data.records.sample import Message
from audiollm.data.text.phrases import PhraseLayout
from audiollm.generation.engine.request import Answer, Event, Request


class GenerationEngine(Protocol):
    """Answers requests, many at a time."""

    def run(
        self, requests: Sequence[Request], on_step: Callable[[Sequence[Event]], None] = ...
    ) -> list[Answer]:
        """Answer all requests, in their order.

        Args:
            on_step: called with the events of each step.
        """

    def stream(self, request: Request) -> Iterator[Event]:
        """Answer one request, event by event; the last one is `Finished`."""


class SpeakingModel(Protocol):
    """A model with its codec, and the names of the speakers that it was trained on; `SpeechGenerator` is one."""

    speakers: list[str]
    longest_positions: int | None
    words: frozenset[str] | None
    phrase_layout: PhraseLayout | None

    @property
    def codec(self) -> Codec: ...

    def engine(self, requests: Sequence[Request]) -> GenerationEngine: ...

    def check_messages(self, messages: Sequence[Message], num_recordings: int) -> None: ...

    def messages_length(self, messages: Sequence[Message], sizes: Sequence[PartSize]) -> int: ...

    def answer_all(
        self, requests: Sequence[Request], on_seconds: Callable[[float], None] = ...
    ) -> list[Answer]: ...

    def encode_input_audio(self, waveform: Waveform, codes_KT: Tensor | None = None) -> PartAudio: ...

    def unseen_letters(self, text: str) -> str: ...

    def unseen_words(self, text: str) -> Sequence[str]: ...
