"""Prompts and answers in text and speech, as families that speak take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from audiollm.data.chat.conditions import Conditions
from audiollm.data.hearing.features import PartAudio
from audiollm.data.records.sample import Message, Part

AS_IT_IS = Conditions()


@dataclass(frozen=True)
class AnswerContent:
    """An answer in text, speech or both."""

    content: Sequence[Part]
    codes: Sequence[Tensor] = ()
    """Codes `[K, frames]` of its audio parts, in order."""


@dataclass(frozen=True)
class PromptedContents:
    """A prompt, and the answers to it in text or speech whose log-probabilities are asked for."""

    id: str
    """Of the sample, for errors."""
    prompt: Sequence[Message]
    """All messages before the assistant's answer."""
    audio: Sequence[PartAudio]
    """Codes or features of the prompt's audio parts, in order; varied (`augment_features`) once for all answers."""
    answers: Sequence[AnswerContent]
    place: str = ""
    """Where the sample was read, for errors."""
    conditions: Conditions = AS_IT_IS
    """How the prompt is shown, to all answers alike. Text and speaker are hidden only where all answers are spoken."""
    seed: int = 0
    """Of the codes that are corrupted in the prompt; those of answers never are."""
    chunk_frames: int | None = None
    """Code frames of a chunk, where the last message is a recording that is heard as a stream; None: it is none."""

    @property
    def before_stream(self) -> PromptedContents:
        """The messages before the recording of a stream."""
        return replace(self, prompt=self.prompt[:-1], audio=self.audio[:-1])
