"""Recognizer `faster_whisper`: Whisper by CTranslate2, from a folder.

Shapes: N samples at 16 kHz.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from audiollm.models.recognition.transcript import SpokenWord
from pipelines.annotate.recognizers.value import RecognizerConfig, heard, missing_folder
from pipelines.annotate.step import Segment
from pipelines.steps.step import Resources, Value

SAMPLE_RATE = 16000
MAX_TOKENS_PER_SECOND, SPARE_TOKENS = 25.0, 40
"""Most tokens of a clip: twice what the fastest speech has, also in scripts of three tokens per character, and a short
sentence. A loop over a sound of a second ends after 65 tokens, not after 448."""
_MAX_TOKENS, _MAX_TOKENS_AFTER_A_PROMPT = 444, 220
"""Most tokens of 30 s: with its prompt, Whisper's context has 448 places."""
_FILES = ("model.bin", "config.json", "tokenizer.json")
_EXPECTED_FOLDER = (
    "a Whisper that ct2-transformers-converter made, "
    "with --copy_files tokenizer.json preprocessor_config.json"
)


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
    """Whisper without temperature fallback: beam search decodes all speech once, and always gives the same text."""

    level: ClassVar[Literal["segment"]] = "segment"
    needs: tuple[str, ...] = ()
    version: ClassVar[int] = 2

    def __init__(self, config: FasterWhisperConfig) -> None:
        self.name = config.name or config.kind
        self.resources = Resources(gpus=config.gpus)
        self._config = config

    def missing(self) -> str | None:
        if importlib.util.find_spec("faster_whisper") is None:
            return f"{self.name}: the package faster-whisper is not here: pip install 'audiollm[whisper]'"
        return missing_folder(f"{self.name}.model", self._config.model, _FILES, _EXPECTED_FOLDER)

    def setup(self) -> None:
        """Raises: ConfigError: no such model."""
        from audiollm.errors import ConfigError

        if (problem := self.missing()) is not None:
            raise ConfigError(problem, self.name, "see what is missing")
        from faster_whisper import WhisperModel

        try:
            self._model = WhisperModel(
                str(self._config.model.absolute()),
                device="cuda" if self._config.gpus else "cpu",
                compute_type=self._config.compute_type,
                cpu_threads=1,
                local_files_only=True,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigError(
                f"no Whisper loads from {self._config.model}: {error}",
                f"{self.name}.model",
                f"give {_EXPECTED_FOLDER}",
            ) from error

    def process(self, segment: Segment) -> Value:
        config = self._config
        parts, info = self._model.transcribe(
            segment.samples(SAMPLE_RATE).copy(),
            language=config.language,
            beam_size=config.beam_size,
            temperature=0.0,
            condition_on_previous_text=config.condition_on_previous_text,
            initial_prompt=config.initial_prompt,
            word_timestamps=config.word_timestamps,
            max_new_tokens=self._max_tokens(segment.duration_s),
            vad_filter=False,  # voice activity has cut the segments already
        )
        spoken = list(parts)
        words = [
            SpokenWord(word.word, word.start, min(word.end, segment.duration_s), word.probability)
            for part in spoken
            for word in part.words or ()
        ]
        mean_log_probability = _mean_log_probability(spoken)
        told = config.language is not None
        return heard(
            "".join(part.text for part in spoken),
            words,
            info.language,
            None if told else info.language_probability,
            None if mean_log_probability is None else math.exp(mean_log_probability),
            mean_log_probability,
            min((part.no_speech_prob for part in spoken), default=None),
        )

    def _max_tokens(self, duration_s: float) -> int:
        config = self._config
        has_prompt = config.initial_prompt is not None or config.condition_on_previous_text
        most = _MAX_TOKENS_AFTER_A_PROMPT if has_prompt else _MAX_TOKENS
        return min(most, round(SPARE_TOKENS + MAX_TOKENS_PER_SECOND * duration_s))


def _mean_log_probability(parts: list[Any]) -> float | None:
    """The mean over the tokens of all parts, in nats."""
    tokens = sum(len(part.tokens) for part in parts)
    return sum(part.avg_logprob * len(part.tokens) for part in parts) / tokens if tokens else None
