"""A loaded model and a codec that speak, converse and answer, whatever the family of the model.

Shapes: K codebooks, T code frames, N samples.
"""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from torch import Tensor

from audiollm.audio import AudioError, Waveform, load, normalize_rms
from audiollm.codec import Codec
from audiollm.data.hearing.features import SAMPLE_RATE as FEATURE_RATE
from audiollm.data.hearing.features import FeatureShape, PartAudio, PartSize, mel_features, size_of
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.data.text.phrases import PhraseLayout
from audiollm.data.text.words import settle_characters, words_of
from audiollm.errors import ConfigError
from audiollm.generation.engine.defaults import Defaults
from audiollm.generation.engine.request import Answer, Event, Frames, Limits, Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.generation.engine.step_engine import StepEngine, TurnEngine
from audiollm.generation.speaking import dialogue as dialogues
from audiollm.generation.speaking import speak as speaking
from audiollm.generation.speaking.manner import Manner, Recording, SpeakOptions, TakeOptions, check_one_voice
from audiollm.generation.speaking.protocol import GenerationEngine
from audiollm.generation.speaking.speak import Speech
from audiollm.generation.speaking.speech_stream import SpeechStream, text_stream
from audiollm.generation.speaking.voice import LEVEL_DBFS, Voice, read_voice

LONGEST_HEARD_S = 600.0
"""Longest recording that can be asked about."""
GREEDY = SamplingConfig(temperature=0.0)
CODEC_REMEDY = "give the folder of the codec that the model was trained with: --codec FOLDER"


class SpeechGenerator(ABC):
    """A loaded model and its codec. A family gives what is abstract here, and has everything else.

    Args:
        codec: None for a model that hears through its own encoder and only answers in words.
        speakers: the speaker names that the model was trained on.
        longest_positions: positions of the longest training sample; None: not known.
        defaults: sampling of the calls that do not give one.
        words: the words that the model was trained to say, where they are few; None: not known, or many.
        phrase_layout: how it was trained to say its texts phrase by phrase; None: without phrases.
    """

    def __init__(
        self,
        codec: Codec | None,
        speakers: Sequence[str] = (),
        longest_positions: int | None = None,
        defaults: Defaults | None = None,
        words: Collection[str] | None = None,
        phrase_layout: PhraseLayout | None = None,
    ) -> None:
        self._codec = codec
        self.speakers, self.longest_positions = list(speakers), longest_positions
        self.defaults = defaults or Defaults()
        self.words = None if words is None else frozenset(words)
        self.phrase_layout = phrase_layout

    @property
    @abstractmethod
    def encoder(self) -> FeatureShape | None:
        """The features in which the model hears recordings; None: as codes, or not at all."""

    @abstractmethod
    def engine(self, requests: Sequence[Request]) -> GenerationEngine:
        """Return an engine with room for these requests."""

    def step_engine(self, slots: int, max_length: int, prefill_positions: int) -> StepEngine:
        """Return an engine for requests that are not known yet.

        Args:
            slots: most requests side by side; a branch of guidance may count as one.
            max_length: longest prompt and answer together, in positions.
            prefill_positions: most positions of waiting prompts that are read before a step.
        """
        return TurnEngine(lambda request: self.engine([request]).stream(request), slots)

    @abstractmethod
    def check_messages(self, messages: Sequence[Message], num_recordings: int) -> None:
        """Check that messages with so many recordings make a prompt.

        Raises:
            ValueError: they do not: a text has control tokens of the model's own, or the model takes no such prompt.
        """

    @abstractmethod
    def messages_length(self, messages: Sequence[Message], sizes: Sequence[PartSize]) -> int:
        """Return the positions that messages take, with recordings of these sizes."""

    @abstractmethod
    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text."""

    @property
    def hears(self) -> bool:
        """Whether recordings can be given: through an encoder of the model, or as codes."""
        return self._codec is not None or self.encoder is not None

    @property
    def has_codec(self) -> bool:
        """Whether a codec was loaded: without one the model answers in words alone."""
        return self._codec is not None

    @property
    def codec(self) -> Codec:
        """The codec. Raises: ConfigError: the model was loaded without one."""
        if self._codec is None:
            raise ConfigError("this model was loaded without a codec", "codec", CODEC_REMEDY)
        return self._codec

    def speak(
        self,
        text: str,
        *,
        on_seconds: Callable[[float], None] = lambda seconds: None,
        **options: Unpack[SpeakOptions],
    ) -> Speech:
        """Say a text of any length: by a speaker of the training data, in the voice of a reference, or in any voice.

        Args:
            on_seconds: called now and then with the seconds of speech made so far.
            options: `speaker`, `reference`, `reference_text`, `scene`, `seed`, `sampling`, `max_duration_s`,
                `language`, each explained in `SpeakOptions`.

        Raises:
            ConfigError: no text, a text without a word or with control tokens, an unknown speaker, a speaker and a
                reference, a reference that cannot be used, or a duration that is not in (0, 600].
        """
        return speaking.speak(self, text, self.manner(**options), on_seconds)

    def stream(self, text: str, **options: Unpack[SpeakOptions]) -> SpeechStream:
        """Say a text as `speak` does, but iterate over the pieces of its sound while they are made.

        Raises:
            ConfigError: as `speak`, before the first piece.
        """
        return text_stream(self, text, self.manner(**options))

    def dialogue(
        self,
        script: str | Sequence[tuple[str, str]],
        *,
        references: Mapping[str, Recording | Voice] | None = None,
        reference_texts: Mapping[str, str] | None = None,
        together: bool = False,
        on_seconds: Callable[[float], None] = lambda seconds: None,
        **options: Unpack[TakeOptions],
    ) -> Speech:
        """Say a dialogue: a script (`[SPEAKER0] Hello.` or `Ann: Hello.`), or (speaker, text) turns.

        Args:
            references: a recording for a speaker's name, tag (`SPEAKER0`) or number. Who has none is a speaker of the
                training data by name, or speaks in a voice of the model's choice.
            reference_texts: the words of these recordings, by the same names.
            together: make all turns in one go, for models that were trained on conversations.
            on_seconds: called now and then with the seconds of speech made so far.
            options: `scene`, `seed`, `sampling`, `max_duration_s`, `language`, each explained in `TakeOptions`.

        Raises:
            ConfigError: an empty turn, a reference for nobody, or what `speak` raises.
        """
        parsed = (
            dialogues.parse_script(script)
            if isinstance(script, str)
            else [dialogues.Turn(*turn) for turn in script]
        )
        if not parsed:
            raise ConfigError("the dialogue has no turn", "dialogue", "give at least one")
        texts = reference_texts or {}
        voices = {
            str(name): self.voice(reference, texts.get(name), options.get("language"))
            for name, reference in (references or {}).items()
        }
        converse = dialogues.converse_together if together else dialogues.converse
        return converse(self, parsed, voices, self.manner(**options), on_seconds)

    def answer(
        self,
        audio: Recording,
        question: str,
        *,
        seed: int = 0,
        sampling: SamplingConfig = GREEDY,
        max_tokens: int = 256,
    ) -> str:
        """Answer a question about a recording in words: the recording first, then the question as it is written.

        Raises:
            ConfigError: no question, or a recording that cannot be read or is longer than `LONGEST_HEARD_S`.
        """
        request = self.question(audio, question, seed=seed, sampling=sampling, max_tokens=max_tokens)
        return self.answer_all([request])[0].text.strip()

    def question(
        self,
        audio: Recording,
        question: str,
        *,
        seed: int = 0,
        sampling: SamplingConfig = GREEDY,
        max_tokens: int = 256,
    ) -> Request:
        """Build the engine request of `answer`.

        Raises:
            ConfigError: no question, or a recording that cannot be read or is longer than `LONGEST_HEARD_S`.
        """
        if not question.strip():
            raise ConfigError("there is no question", "question", "ask something about the recording")
        audio_part = AudioPart(path="(heard)" if isinstance(audio, Waveform) else str(audio))
        messages = [Message(role="user", content=[audio_part, TextPart(text=question.strip())])]
        return self.chat_request(messages, audio, seed=seed, sampling=sampling, max_tokens=max_tokens)

    def chat_request(
        self,
        messages: Sequence[Message],
        audio: Recording,
        *,
        seed: int = 0,
        sampling: SamplingConfig = GREEDY,
        max_tokens: int = 256,
    ) -> Request:
        """Build the request for an answer in words to a chat whose one recording is `audio`.

        Raises:
            ConfigError: control tokens in the words, or a recording that `answer` does not take.
        """
        waveform = read_recording(audio)
        try:
            self.check_messages(messages, 1)
        except ValueError as error:
            raise ConfigError(str(error).partition(";")[0], "question", "leave it out") from None
        sampling = replace(sampling, text_guidance=1.0, speaker_guidance=1.0)
        limits = Limits(max_text_tokens=max_tokens)
        return Request(list(messages), seed, [self.encode_input_audio(waveform)], sampling, limits, "text")

    def notes_on(self, request: Request) -> tuple[str, ...]:
        """Warnings about a request: a prompt that is longer than the samples that the model was trained on."""
        length = self.prompt_length(request)
        if self.longest_positions is None or length <= self.longest_positions:
            return ()
        trained = f"the longest sample that the model was trained on has {self.longest_positions}"
        return (f"recording and question take {length} positions, {trained}: do not rely on the answer",)

    def prompt_length(self, request: Request) -> int:
        """Return the positions that a request's messages take."""
        return self.messages_length(request.messages, [size_of(audio_input) for audio_input in request.audio])

    def answer_all(
        self,
        requests: Sequence[Request],
        on_seconds: Callable[[float], None] = lambda seconds: None,
        check_stop: Callable[[], None] = lambda: None,
    ) -> list[Answer]:
        """Run requests through the engine; the answers come in the order of the requests.

        Args:
            on_seconds: called now and then with the seconds of speech made so far.
            check_stop: called after each step; what it raises ends the answers.
        """
        num_frames = 0

        def on_step(events: Sequence[Event]) -> None:
            nonlocal num_frames
            check_stop()
            new = sum(event.codes_KT.shape[1] for event in events if isinstance(event, Frames))
            num_frames += new
            if new:  # a model without a codec makes text only
                on_seconds(num_frames / self.codec.frame_rate)

        return self.engine(requests).run(requests, on_step)

    def manner(self, **options: Unpack[SpeakOptions]) -> Manner:
        """Check the options of `speak` and read the reference, for `speaking.speak`, `converse` and `text_stream`.

        Raises:
            TypeError: an option that `SpeakOptions` does not declare.
            ConfigError: a speaker and a reference, a reference that cannot be used, or a duration that is not in
                (0, 600].
        """
        unknown = sorted(options.keys() - SpeakOptions.__annotations__.keys())
        if unknown:
            raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
        speaker, reference = self._speaker_name(options.get("speaker")), options.get("reference")
        check_one_voice(speaker, reference)
        return Manner(
            speaker=speaker,
            voice=None
            if reference is None
            else self.voice(reference, options.get("reference_text"), options.get("language")),
            scene=options.get("scene"),
            seed=options.get("seed", 0),
            sampling=options.get("sampling") or self.defaults.sampling,
            max_duration_s=options.get("max_duration_s"),
            language=options.get("language"),
        )

    def _speaker_name(self, name: str | None) -> str | None:
        """The speaker of the model whose name looks the same; else the name in composed characters."""
        if name is None:
            return None
        settled = settle_characters(name)
        return next((speaker for speaker in self.speakers if settle_characters(speaker) == settled), settled)

    def voice(
        self, reference: Recording | Voice, text: str | None = None, language: str | None = None
    ) -> Voice:
        """Read and encode a reference once, to be used many times.

        Args:
            text: the words of the reference.
            language: language of these words; by their script where it is not given.

        Raises:
            ConfigError: it cannot be read, is silent or too short.
        """
        return (
            reference if isinstance(reference, Voice) else read_voice(reference, text, self.codec, language)
        )

    def encode_input_audio(self, waveform: Waveform, codes_KT: Tensor | None = None) -> PartAudio:
        """Encode a recording of a system's or user's turn in the form that the model was trained on.

        Args:
            codes_KT: the recording's codes, where they are known already.
        """
        if self.encoder is not None:
            return mel_features(waveform.mono().resample(FEATURE_RATE).samples_CN, self.encoder)
        return self.encode(waveform) if codes_KT is None else codes_KT

    def audio_of(self, messages: Sequence[Message]) -> list[PartAudio]:
        """Read and encode the recordings in a prompt's messages, as `Request` takes them.

        Raises:
            AudioError: one cannot be read.
        """
        audio: list[PartAudio] = []
        for message in messages:
            for content_part in message.content:
                if isinstance(content_part, AudioPart):
                    clip = load(content_part.path, content_part.start_s, content_part.end_s, mono=True)
                    audio.append(
                        self.encode(clip) if message.role == "assistant" else self.encode_input_audio(clip)
                    )
        return audio

    def encode(self, waveform: Waveform) -> Tensor:
        """Codes `[K, T]` of a recording at the level that prompts have."""
        samples_1N = waveform.mono().resample(self.codec.sample_rate).samples_CN
        return self.codec.encode(normalize_rms(samples_1N, LEVEL_DBFS))

    def unseen_words(self, text: str) -> Sequence[str]:
        """The words of a text that are not among the few that the model was trained to say; none where it was many."""
        return [] if self.words is None else sorted(set(words_of(text)) - self.words)

    def unseen_letters(self, text: str) -> str:
        """Return the non-ASCII letters and signs that the vocabulary spells byte by byte: training never had them."""
        letters = sorted({a for a in text if not a.isascii() and unicodedata.category(a)[0] in "LMNS"})
        return "".join(a for a in letters if self.num_tokens(a) >= len(a.encode()))


def read_recording(audio: Recording) -> Waveform:
    """Read a recording in mono.

    Raises:
        ConfigError: it cannot be read, or is longer than `LONGEST_HEARD_S`.
    """
    if not isinstance(audio, Waveform):
        try:
            audio = load(audio, end_s=LONGEST_HEARD_S + 1, mono=True)
        except AudioError as error:
            raise ConfigError(str(error), "audio", "give a sound file") from error
    check_recording_length(audio)
    return audio


def check_recording_length(audio: Waveform) -> None:
    """Raises: ConfigError: a recording that is longer than `LONGEST_HEARD_S`."""
    if audio.duration_s > LONGEST_HEARD_S:
        raise ConfigError(f"longer than {LONGEST_HEARD_S:g} s", "audio", "ask about a part of the recording")
