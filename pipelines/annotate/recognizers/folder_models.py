"""Recognizers in folders: `faster_whisper` (Whisper by CTranslate2), `transformers` (a CTC model such as wav2vec2,
HuBERT or Parakeet, or a decoder such as Whisper or Moonshine), and `audio_llm` (an audio LLM that is
prompted to transcribe).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from audiollm.models.recognition.ctranslate2_whisper import (
    CTranslate2Whisper,
    WhisperDecoding,
    whisper_problem,
)
from audiollm.models.recognition.transcript import RecognizedSpeech
from audiollm.recipe.stages import ModelPath, ModelSource, from_hub
from pipelines.annotate.recognizers.value import (
    RecognizerConfig,
    RecognizerStep,
    missing_folder,
    transcript_value,
)
from pipelines.annotate.step import Segment
from pipelines.steps.step import Value


class FasterWhisperConfig(RecognizerConfig):
    """Settings of `faster_whisper`."""

    kind: Literal["faster_whisper"] = "faster_whisper"
    model: Annotated[Path, from_hub("ctranslate2")]
    """A folder in CTranslate2's format, with its tokenizer.json (without, faster-whisper would ask the hub for it); or
    such a model's name on the hub."""
    language: str | None = None
    """Language of the speech; None: the model detects it, and gives its probability."""
    beam_size: int = Field(5, ge=1)
    initial_prompt: str | None = None
    """Prompt text: with hesitations in it ("Um, uh, so ..."), the model tends to write them."""
    condition_on_previous_text: bool = False
    """Condition on the text of the previous 30 s, and thereby on its errors."""
    word_timestamps: bool = True
    compute_type: str = "default"
    """`int8`, `float16`, `float32`, ...; default: the saved type, if the device supports it."""
    gpus: float = Field(0.0, ge=0)
    """Share of a GPU for each worker; 0: the CPU."""


class FasterWhisper(RecognizerStep[FasterWhisperConfig]):
    """A `CTranslate2Whisper` as a step; the confidence is the tokens' geometric mean probability."""

    version: ClassVar[int] = 2

    def missing(self) -> str | None:
        problem = whisper_problem(self.config.model)
        return None if problem is None else f"{self.name}.model: {problem}"

    def setup(self) -> None:
        """Raises: ConfigError: no such model."""
        config = self.config
        decoding = WhisperDecoding(
            config.language,
            config.beam_size,
            config.initial_prompt,
            config.condition_on_previous_text,
            config.word_timestamps,
        )
        device = "cuda" if config.gpus else "cpu"
        self._recognizer = CTranslate2Whisper(config.model, decoding, device, config.compute_type)

    def process(self, segment: Segment) -> Value:
        samples_N = segment.samples(self._recognizer.sample_rate).copy()
        speech = self._recognizer.transcribe([samples_N])[0]
        mean_log_probability = speech.mean_log_probability
        return transcript_value(
            speech.text,
            speech.words,
            speech.language,
            speech.language_probability,
            None if mean_log_probability is None else math.exp(mean_log_probability),
            mean_log_probability,
            speech.no_speech_probability,
        )


_FILES = ("config.json", "preprocessor_config.json")
_EXPECTED_FOLDER = "a speech recognizer of transformers with safetensors weights, saved with its processor"


class TransformersConfig(RecognizerConfig):
    """A speech recognizer of transformers in a local folder."""

    kind: Literal["transformers"] = "transformers"
    model: ModelPath
    language: str | None = None
    """Language of the speech, for a multilingual Whisper and the steps that read the text. None: Whisper detects it."""
    batch_size: int = Field(1, ge=1)
    """Segments per batch. More is faster on a GPU; results may then vary in the last digit with the batch."""
    max_tokens: int = Field(224, ge=1)
    """Most tokens per 30 s, for a model that writes token by token."""
    gpus: float = Field(0.0, ge=0)
    """Share of a GPU for each worker; 0: the CPU."""


class TransformersRecognizer(RecognizerStep[TransformersConfig]):
    """A `SpeechRecognizer` as a step; confidences are means of the tokens' probabilities."""

    version: ClassVar[int] = 2

    def __init__(self, config: TransformersConfig) -> None:
        self.batch_size = config.batch_size
        super().__init__(config)

    def missing(self) -> str | None:
        return missing_folder(f"{self.name}.model", self.config.model, _FILES, _EXPECTED_FOLDER)

    def setup(self) -> None:
        """Raises: ConfigError: no such model, or pickled weights only."""
        from audiollm.models.recognition.recognizer import SpeechRecognizer

        config = self.config
        device = "cuda" if config.gpus else "cpu"
        self._recognizer = SpeechRecognizer(config.model, config.language, device, config.max_tokens)

    def process(self, segment: Segment) -> Value:
        return self.process_batch([segment])[0]

    def process_batch(self, items: Sequence[Segment]) -> list[Value]:
        rate = self._recognizer.sample_rate
        clips = [segment.samples(rate).copy() for segment in items]
        return [_make_transformers_value(transcript) for transcript in self._recognizer.transcribe(clips)]


def _make_transformers_value(transcript: RecognizedSpeech) -> Value:
    return transcript_value(
        transcript.text,
        transcript.words,
        transcript.language,
        transcript.language_probability,
        transcript.confidence,
        transcript.mean_log_probability,
        transcript.no_speech_probability,
    )


PROMPT = "Transcribe the speech."
"""Prompt: a phrasing of the task `asr` (`audiollm/data/chat/tasks.yaml`), which audiollm models are trained with."""
_QUOTES = {'"': '"', "'": "'", "“": "”", "«": "»", "「": "」"}


class AudioLlmConfig(RecognizerConfig):
    """Settings of an audio LLM of audiollm or of transformers."""

    kind: Literal["audio_llm"] = "audio_llm"
    model: ModelSource
    """The folder of a model or of the stage that trained it, or `package.module:factory` (see `evaluate.subjects`)."""
    codec: ModelPath | None = None
    """Codec of an audiollm model that hears through one; None: the codec of its run."""
    prompt: str = Field(PROMPT, min_length=1)
    max_tokens: int = Field(256, ge=1)
    language: str | None = None
    """Language of the speech, for the steps that read the text; the model only learns it from the prompt."""
    gpus: float = Field(0.0, ge=0)
    """Share of a GPU for each worker."""


class AudioLlm(RecognizerStep[AudioLlmConfig]):
    """Transcription by an audio LLM: the greedy answer, without quotation marks around it."""

    def missing(self) -> str | None:
        model = Path(self.config.model)
        places = (model / "config.json", model / "model" / "config.json")
        if ":" in self.config.model and not model.exists():
            return None  # an import path: whether it can be made is known when it is made
        if any(place.is_file() for place in places):
            return None
        return f"{self.name}.model: no model in {model} (config.json): give a trained model's folder"

    def setup(self) -> None:
        """Raises: ConfigError: no such model, or its codec is not there."""
        from audiollm.evaluate.subjects.loading import load_answerer

        self._model = load_answerer(self.config.model, self.config.codec, self.config.max_tokens).model

    def process(self, segment: Segment) -> Value:
        answer = self._model.answer(segment.waveform(), self.config.prompt)
        return transcript_value(unquoted(answer), language=self.config.language)


def unquoted(answer: str) -> str:
    """Remove quotation marks around the whole text."""
    text = answer.strip()
    if len(text) > 1 and _QUOTES.get(text[0]) == text[-1] and text[-1] not in text[1:-1].replace("'", ""):
        return text[1:-1].strip()
    return text
