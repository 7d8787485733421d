"""Recognizer `faster_whisper`: Whisper by CTranslate2, from a folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from audiollm.models.recognition.ctranslate2_whisper import (
    CTranslate2Whisper,
    WhisperDecoding,
    whisper_problem,
)
from pipelines.annotate.recognizers.value import RecognizerConfig, transcript_value
from pipelines.annotate.step import Segment
from pipelines.steps.step import Resources, Value


class FasterWhisperConfig(RecognizerConfig):
    """Settings of `faster_whisper`; nothing is downloaded."""

    kind: Literal["faster_whisper"] = "faster_whisper"
    model: Path
    """A folder in CTranslate2's format, with its tokenizer.json (without, faster-whisper would ask the hub for it)."""
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


class FasterWhisper:
    """A `CTranslate2Whisper` as a step; the confidence is the tokens' geometric mean probability."""

    level: ClassVar[Literal["segment"]] = "segment"
    needs: tuple[str, ...] = ()
    version: ClassVar[int] = 2

    def __init__(self, config: FasterWhisperConfig) -> None:
        self.name = config.name or config.kind
        self.resources = Resources(gpus=config.gpus)
        self._config = config

    def missing(self) -> str | None:
        problem = whisper_problem(self._config.model)
        return None if problem is None else f"{self.name}.model: {problem}"

    def setup(self) -> None:
        """Raises: ConfigError: no such model."""
        config = self._config
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
