"""Models under test from folders, of any family: as a `Speaker`, a `DialogueSpeaker`, an `Answerer`, a `Conversant`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from audiollm.audio import Waveform
from audiollm.codec import default_codec_folder
from audiollm.data.records.sample import AudioPart, Message
from audiollm.evaluate.subjects.protocols import VoicePrompt
from audiollm.families.answering import AnsweringModel, AnswerRequest
from audiollm.families.registry import open_model_folder
from audiollm.files.atomic import folder_digest
from audiollm.generation.speaking.speech_generator import SpeechGenerator
from audiollm.models.audio_llms.inputs import turns_of
from audiollm.models.pretrained import model_folder


@dataclass(frozen=True)
class FolderAnswerer:
    """A model that answers in words: a `SamplingAnswerer`, too."""

    model: AnsweringModel
    max_tokens: int = 256

    def answer(self, audio: Waveform, question: str) -> str:
        """See `Answerer.answer`."""
        return self.answer_many([audio], [question], [0], 0.0)[0]

    def answer_many(
        self,
        recordings: Sequence[Waveform],
        questions: Sequence[str],
        seeds: Sequence[int],
        temperature: float,
    ) -> list[str]:
        """See `SamplingAnswerer`; words are drawn from the whole distribution."""
        requests = [
            AnswerRequest(
                [("user", [audio, question.strip()])], seed, temperature, max_tokens=self.max_tokens
            )
            for audio, question, seed in zip(recordings, questions, seeds, strict=True)
        ]
        return [answer.text for answer in self.model.answer(requests)]

    def reply(self, messages: Sequence[Message], audio: Waveform) -> str:
        """See `Conversant.reply`."""
        return self.reply_many([messages], [audio])[0]

    def reply_many(self, chats: Sequence[Sequence[Message]], recordings: Sequence[Waveform]) -> list[str]:
        """See `BatchConversant.reply_many`."""
        requests = []
        for messages, audio in zip(chats, recordings, strict=True):
            hears = any(isinstance(content, AudioPart) for message in messages for content in message.content)
            turns = turns_of(messages, [audio] if hears else [])
            requests.append(AnswerRequest(turns, max_tokens=self.max_tokens))
        return [answer.text for answer in self.model.answer(requests)]


@dataclass(frozen=True)
class FolderSpeaker:
    """A trained model and its codec, with the sampling that `SpeechGenerator` has by default.

    Args:
        max_duration_s: of one text; None: as `SpeechGenerator.speak` has it, by the length of the text.
    """

    generator: SpeechGenerator
    fingerprint: str
    max_duration_s: float | None = None

    @classmethod
    def load(cls, folder: Path, codec: Path | None, max_duration_s: float | None = None) -> FolderSpeaker:
        """
        Raises:
            ConfigError: no model, one that does not speak, or no codec given and none in the run.
        """
        opened = open_model_folder(folder)
        generator = opened.generator(codec)
        codec = codec or default_codec_folder(opened.path)
        heard_with = folder_digest(model_folder(codec)) if codec.is_dir() else None
        made_by = [folder_digest(opened.path), heard_with, max_duration_s]
        return cls(generator, " ".join(map(str, made_by)), max_duration_s)

    def speak(self, text: str, reference: Path | None, reference_text: str | None, seed: int) -> Waveform:
        return self._say(text, reference, reference_text, seed)

    def converse(
        self, turns: Sequence[tuple[str, str]], references: Mapping[str, VoicePrompt], seed: int
    ) -> list[Waveform]:
        """Speak a dialogue turn by turn.

        A speaker without a reference is the speaker of the training data by that name. If there is none, the model
        chooses the voice of the speaker's first turn, and the others are spoken in that voice.
        """
        first: dict[str, tuple[Waveform, str]] = {}
        waves: list[Waveform] = []
        for place, (name, text) in enumerate(turns):
            if name in references:
                voice = references[name]
                wave = self._say(text, voice.path, voice.text, seed + place)
            elif name in self.generator.speakers:
                wave = self._say(text, None, None, seed + place, name)
            elif name in first:
                wave = self._say(text, *first[name], seed + place)
            else:
                wave = self._say(text, None, None, seed + place)
                first[name] = wave, text
            waves.append(wave)
        return waves

    def _say(
        self,
        text: str,
        reference: Path | Waveform | None,
        reference_text: str | None,
        seed: int,
        speaker: str | None = None,
    ) -> Waveform:
        speech = self.generator.speak(
            text,
            speaker=speaker,
            reference=reference,
            reference_text=reference_text,
            seed=seed,
            max_duration_s=self.max_duration_s,
        )
        return Waveform(speech.samples_1N.cpu(), speech.sample_rate)
