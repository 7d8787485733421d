"""The part of a loaded model that speaking needs; `Generator` implements it.

Shapes: K codebooks, T code frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from audiollm.audio import Waveform
from audiollm.codec import Codec
from audiollm.data.chat.template import Template
from audiollm.data.hearing.features import PartAudio
from audiollm.generation.engine.request import Answer, Request
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.packed_decoder import GenerationDecoder


class SpeakingModel(Protocol):
    """A model with its codec, template and decoder, and the names of the speakers that it was trained on."""

    model: DualFFN
    decoder: GenerationDecoder
    template: Template
    speakers: list[str]
    longest_positions: int | None
    words: frozenset[str] | None

    @property
    def codec(self) -> Codec: ...

    def answer_all(
        self, requests: Sequence[Request], on_seconds: Callable[[float], None] = ...
    ) -> list[Answer]: ...

    def heard(self, waveform: Waveform, codes_KT: Tensor | None = None) -> PartAudio: ...

    def unseen_letters(self, text: str) -> str: ...

    def unseen_words(self, text: str) -> Sequence[str]: ...
