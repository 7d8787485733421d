"""Protocols of the models under test: our own model folders, and models of others by an import path.

`package.module:factory` names a function without arguments (or a class) that makes one. It may have an attribute
`fingerprint`, a text that changes when what it says may change; without one the import path stands for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from audiollm.data.records.sample import Message

if TYPE_CHECKING:
    from audiollm.audio import Waveform


@runtime_checkable
class Speaker(Protocol):
    """Speaks a text."""

    def speak(self, text: str, reference: Path | None, reference_text: str | None, seed: int) -> Waveform:
        """Speak a text in the voice of a recording (transcript optional); without a recording, in any voice."""


@dataclass(frozen=True)
class VoicePrompt:
    """A recording of a voice and, where known, its transcript."""

    path: Path
    text: str | None = None


@runtime_checkable
class DialogueSpeaker(Protocol):
    """Speaks a dialogue."""

    def converse(
        self, turns: Sequence[tuple[str, str]], references: Mapping[str, VoicePrompt], seed: int
    ) -> list[Waveform]:
        """The sound of each (speaker, text) turn, by speakers with a reference or of the model's own choice."""


@runtime_checkable
class Answerer(Protocol):
    """Answers a question about a recording in words."""

    def answer(self, audio: Waveform, question: str) -> str: ...


@runtime_checkable
class SamplingAnswerer(Protocol):
    """Answers several questions at a time, and samples its answers."""

    def answer_many(
        self,
        recordings: Sequence[Waveform],
        questions: Sequence[str],
        seeds: Sequence[int],
        temperature: float,
    ) -> list[str]:
        """The answers, each by its own seed; temperature 0 takes the likeliest words."""


@runtime_checkable
class Conversant(Protocol):
    """Answers in a chat: with its system message, and with texts and recording in their order."""

    def reply(self, messages: Sequence[Message], audio: Waveform) -> str:
        """The assistant's next turn in words; `audio` is the recording of the audio part, if there is one."""


@runtime_checkable
class BatchConversant(Protocol):
    """Answers in several chats at a time."""

    def reply_many(self, chats: Sequence[Sequence[Message]], recordings: Sequence[Waveform]) -> list[str]:
        """The assistant's next turn of each chat, as `Conversant.reply` gives it."""


@dataclass(frozen=True)
class TurnByTurn:
    """Any `Speaker` as a `DialogueSpeaker`: each turn alone, in the voice of its speaker's reference.

    A speaker without a reference speaks the first turn in the model's own voice and the others in that of the first.
    """

    speaker: Speaker
    folder: Path
    """Folder for the first turns, which serve as references."""

    def converse(
        self, turns: Sequence[tuple[str, str]], references: Mapping[str, VoicePrompt], seed: int
    ) -> list[Waveform]:
        from audiollm.audio import save
        from audiollm.evaluate.report.store import key_of

        voices = dict(references)
        waves: list[Waveform] = []
        for number, (name, text) in enumerate(turns):
            voice = voices.get(name)
            path, words = (voice.path, voice.text) if voice else (None, None)
            wave = self.speaker.speak(text, path, words, seed + number)
            waves.append(wave)
            if voice is None:
                first = self.folder / f"{key_of(list(turns), name, seed)[:16]}.wav"
                save(first, wave.samples_CN, wave.sample_rate)
                voices[name] = VoicePrompt(first, text)
        return waves


@dataclass(frozen=True)
class Subject:
    """A model under test, and the fingerprint that identifies it in the rows."""

    name: str
    fingerprint: str
    model: Any
