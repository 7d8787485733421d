"""Recognizer `transformers`: a CTC model (wav2vec2, HuBERT, Parakeet) or a decoder (Whisper, Moonshine) in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from audiollm.models.recognition.transcript import RecognizedSpeech
from pipelines.annotate.recognizers.value import RecognizerConfig, missing_folder, transcript_value
from pipelines.annotate.step import Segment
from pipelines.steps.step import Resources, Value

_FILES = ("config.json", "preprocessor_config.json")
_EXPECTED_FOLDER = "a speech recognizer of transformers with safetensors weights, saved with its processor"


class TransformersConfig(RecognizerConfig):
    """A speech recognizer of transformers in a local folder."""

    kind: Literal["transformers"] = "transformers"
    model: Path
    language: str | None = None
    """Language of the speech, for a multilingual Whisper and the steps that read the text. None: Whisper detects it."""
    batch_size: int = Field(1, ge=1)
    """Segments per batch. More is faster on a GPU; results may then vary in the last digit with the batch."""
    max_tokens: int = Field(224, ge=1)
    """Most tokens per 30 s, for a model that writes token by token."""
    gpus: float = Field(0.0, ge=0)
    """Share of a GPU for each worker; 0: the CPU."""


class TransformersRecognizer:
    """A `SpeechRecognizer` as a step; confidences are means of the tokens' probabilities."""

    level: ClassVar[Literal["segment"]] = "segment"
    needs: tuple[str, ...] = ()
    version: ClassVar[int] = 2

    def __init__(self, config: TransformersConfig) -> None:
        self.name = config.name or config.kind
        self.resources = Resources(gpus=config.gpus)
        self.batch_size = config.batch_size
        self._config = config

    def missing(self) -> str | None:
        return missing_folder(f"{self.name}.model", self._config.model, _FILES, _EXPECTED_FOLDER)

    def setup(self) -> None:
        """Raises: ConfigError: no such model, or pickled weights only."""
        from audiollm.models.recognition.recognizer import SpeechRecognizer

        config = self._config
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
