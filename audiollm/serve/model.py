"""A loaded model of a server: what it can do, and what is asked of its engine.

Shapes: N samples.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import torch

from audiollm.audio import Waveform
from audiollm.data.hearing.features import size_of
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.families.answering import AnsweringModel, AnswerRequest, BatchedAnswers, SteppedAnswers
from audiollm.families.answering_engine import words_engine
from audiollm.families.registry import load_speech_generator, open_model_folder
from audiollm.generation.engine.defaults import read_trained
from audiollm.generation.engine.request import AnswerKind, Limits, Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.generation.engine.step_engine import StepEngine
from audiollm.generation.service.lane import Lane
from audiollm.generation.service.service import GenerationService
from audiollm.generation.speaking.conversation import encode_turns
from audiollm.generation.speaking.speech_generator import SpeechGenerator
from audiollm.generation.speaking.voice import Voice
from audiollm.models.audio_llms.inputs import Turn
from audiollm.models.frozen.formats import GenerationFormat
from audiollm.serve.errors import ApiError
from audiollm.serve.limits import ServeLimits
from audiollm.serve.voices import Reference

ENCODED_VOICES = 64
"""References whose codes a model keeps; the one that was not used for the longest time goes first."""
PIECE_S, SHORTEST_PIECE_S = 25.0, 2.0
"""Bounds of the pieces of a long recording; the upper one is less where a model was trained on shorter recordings."""
TRANSLATION_TASK = "speech_translation"
SPOKEN_TASKS = frozenset({"tts", "clone", "clone_by_turn", "dialogue", "text"})
"""Tasks of `tasks.yaml` that leave a model without words for what it hears."""
TRANSCRIPT_POSITIONS_PER_S = 6.0
"""Upper estimate of the text tokens per second of speech."""


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation, and how its answer is drawn."""

    turns: list[Turn]
    answer: AnswerKind = "text"
    seed: int = 0
    temperature: float | None = None
    """None: the likeliest words; of speech, what is best known for the model."""
    top_p: float | None = None
    max_tokens: int = 256
    max_frames: int = 750


@dataclass(eq=False)
class ServerModel:
    """A model behind a name: either it has a generator, or it answers in words alone."""

    name: str
    lane: Lane
    created: int
    """Unix time at which it was loaded."""
    generator: SpeechGenerator | None = None
    answering: AnsweringModel | None = None
    tasks: frozenset[str] | None = None
    """All tasks that it was trained for; None: not known."""
    _voices: OrderedDict[str, Voice] = field(default_factory=OrderedDict)

    @property
    def speaks(self) -> bool:
        """Whether it has a codec to speak with."""
        return self.generator is not None and self.generator.has_codec

    @property
    def hears(self) -> bool:
        """Whether it answers recordings: it takes them, and was not trained to speak alone."""
        subject = self.generator or self.answering
        assert subject is not None
        return subject.hears and not (self.tasks and self.tasks <= SPOKEN_TASKS)

    @property
    def speakers(self) -> list[str]:
        """Speakers of its training, by name."""
        return [] if self.generator is None else self.generator.speakers

    def speaking(self) -> SpeechGenerator:
        """Return the generator.

        Raises:
            ApiError: the model does not speak.
        """
        if self.generator is None or not self.speaks:
            message = (
                f"{self.name} answers in words and does not speak: name a model that was trained to speak"
            )
            raise ApiError(400, message, "model", "model_cannot_speak")
        return self.generator

    def check_hears(self) -> None:
        """Raises: ApiError: the model takes no recordings."""
        if not self.hears:
            message = f"{self.name} reads text and does not hear: name a model that was trained on recordings"
            raise ApiError(400, message, "model", "model_cannot_hear")

    def check_translates(self) -> None:
        """Raises: ApiError: the model takes no recordings, or was trained for other tasks."""
        self.check_hears()
        if self.tasks is not None and TRANSLATION_TASK not in self.tasks:
            tasks = ", ".join(sorted(self.tasks))
            message = f"{self.name} was trained for {tasks}: name a model that learned {TRANSLATION_TASK}"
            raise ApiError(400, message, "model", "model_cannot_translate")

    def encoded_voice(self, reference: Reference) -> Voice:
        """Encode a reference, once for as long as it is in use; called by the thread of the service.

        Raises:
            ConfigError: it is silent or too short.
        """
        voice = self._voices.pop(reference.digest, None)
        if voice is None:
            voice = self.speaking().voice(reference.waveform, reference.text, reference.language)
        self._voices[reference.digest] = voice
        while len(self._voices) > ENCODED_VOICES:
            self._voices.popitem(last=False)
        return voice

    def chat_request(self, prompt: ChatPrompt) -> tuple[Request | AnswerRequest, int | None]:
        """Make what the engine takes, with the positions of the prompt where they are known.

        Raises:
            ConfigError: the model does not take the conversation.
            AnswerError: as well.
        """
        if self.generator is None:
            request = AnswerRequest(
                prompt.turns, prompt.seed, prompt.temperature or 0.0, prompt.top_p or 1.0, prompt.max_tokens
            )
            assert self.answering is not None
            if not isinstance(
                self.answering, SteppedAnswers
            ):  # whose engine checks it, with the inputs that it needs
                self.answering.check(request)
            return request, None
        messages, audio = encode_turns(self.generator, prompt.turns)
        limits = Limits(prompt.max_frames, prompt.max_tokens)
        asked = Request(messages, prompt.seed, audio, self._sampling(prompt), limits, prompt.answer)
        return asked, self.generator.prompt_length(asked)

    def _sampling(self, prompt: ChatPrompt) -> SamplingConfig:
        assert self.generator is not None
        if prompt.answer == "text":
            return SamplingConfig(temperature=prompt.temperature or 0.0, top_p=prompt.top_p or 1.0)
        defaults = self.generator.defaults.over(
            temperature=prompt.temperature, top_p=prompt.top_p, text_guidance=1.0, speaker_guidance=1.0
        )
        return defaults.sampling

    def piece_s(self) -> float:
        """Return the longest piece of a recording that is transcribed at once, in seconds."""
        generator = self.generator
        if generator is None or generator.longest_positions is None:
            return PIECE_S
        messages = [Message(role="user", content=[AudioPart(path="(recording)"), TextPart(text="a")])]
        lengths = [
            generator.messages_length(messages, [size_of(generator.encode_input_audio(_silence(seconds)))])
            for seconds in (1, 2)
        ]
        per_second = lengths[1] - lengths[0] + TRANSCRIPT_POSITIONS_PER_S
        room = generator.longest_positions - (2 * lengths[0] - lengths[1])
        return min(PIECE_S, max(SHORTEST_PIECE_S, room / per_second))


def load_served_model(
    folder: Path,
    service: GenerationService,
    limits: ServeLimits,
    name: str = "",
    codec: Path | None = None,
    dtype: GenerationFormat = "fp32",
) -> ServerModel:
    """Load a model, and give the service its engine.

    Args:
        folder: of a stage, of a saved model, or of a published one.
        name: by which it is asked for; empty: `served_name`.
        codec: folder of its codec; None: that of its run.
        dtype: how the linear layers of a model that speaks are held in memory.

    Raises:
        ConfigError: the model or its codec does not load.
    """
    import time

    opened = open_model_folder(folder)
    name, created = name or served_name(opened.path), int(time.time())
    tasks = read_trained(opened.path).tasks
    if opened.speaks:
        generator = load_speech_generator(opened.path, codec, dtype)
        model = serve_generator(generator, name, service, limits, created)
    else:
        answering = opened.answering_model(codec)
        if isinstance(answering, BatchedAnswers):
            model = serve_generator(answering.generator, name, service, limits, created)
        else:
            sizes = limits.slots, limits.max_length, limits.prefill_positions
            lane = service.add_engine(lambda: words_engine(answering, *sizes))
            model = ServerModel(name, lane, created, None, answering)
    model.tasks = None if tasks is None else frozenset(tasks)
    return model


def serve_generator(
    generator: SpeechGenerator, name: str, service: GenerationService, limits: ServeLimits, created: int = 0
) -> ServerModel:
    """Give the service the engine of a loaded generator."""

    def make_engine() -> StepEngine:
        return generator.step_engine(limits.slots, limits.max_length, limits.prefill_positions)

    return ServerModel(name, service.add_engine(make_engine), created, generator)


def served_name(path: Path) -> str:
    """The name of a model's folder: its own, or `RUN` and `STAGE` of `RUN/STAGE/model` with a hyphen between them."""
    from audiollm.hub_models.names import folder_label

    path = path.resolve()
    return f"{path.parent.parent.name}-{path.parent.name}" if path.name == "model" else folder_label(path)


def _silence(seconds: int) -> Waveform:
    return Waveform(torch.zeros(1, 16_000 * seconds), 16_000)
