"""Whisper in CTranslate2's format, by the package faster-whisper.

Shapes: N samples at 16 kHz.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from audiollm.errors import ConfigError
from audiollm.hub_models.folders import is_planned
from audiollm.models.recognition.transcript import RecognizedSpeech, SpokenWord

MAX_TOKENS_PER_SECOND, SPARE_TOKENS = 25.0, 40
"""Most tokens of a clip: twice what the fastest speech has, also in scripts of three tokens per character, and a short
sentence. A loop over a sound of a second ends after 65 tokens, not after 448."""
_MAX_TOKENS, _MAX_TOKENS_AFTER_A_PROMPT = 444, 220
"""Most tokens of 30 s: with its prompt, Whisper's context has 448 places."""
WEIGHTS = "model.bin"
_FILES = (WEIGHTS, "config.json", "tokenizer.json")  # without the tokenizer it would be looked up on the hub
EXPECTED_FOLDER = (
    "a Whisper that ct2-transformers-converter made, "
    "with --copy_files tokenizer.json preprocessor_config.json"
)


@dataclass(frozen=True)
class WhisperDecoding:
    """How speech is decoded: by beam search, once, without temperature fallback, so always to the same text."""

    language: str | None = None
    """Language of the speech; None: the model detects it."""
    beam_size: int = 5
    initial_prompt: str | None = None
    condition_on_previous_text: bool = False
    word_timestamps: bool = False


class CTranslate2Whisper:
    """A Whisper in a local folder, in CTranslate2's format.

    Args:
        compute_type: `int8`, `float16`, `float32`, ...; `default`: the saved type, if the device supports it.

    Raises:
        ConfigError: the package faster-whisper is missing, or the folder holds no such model.
    """

    sample_rate: ClassVar[int] = 16_000

    def __init__(
        self,
        folder: Path,
        decoding: WhisperDecoding | None = None,
        device: str = "cpu",
        compute_type: str = "default",
    ) -> None:
        if (problem := whisper_problem(folder)) is not None:
            raise ConfigError(problem, str(folder), f"give {EXPECTED_FOLDER}")
        from faster_whisper import WhisperModel

        self._decoding = decoding or WhisperDecoding()
        try:
            self._model = WhisperModel(
                str(folder.absolute()),
                device=device,
                compute_type=compute_type,
                cpu_threads=1,
                local_files_only=True,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigError(
                f"no Whisper loads from {folder}: {error}", str(folder), f"give {EXPECTED_FOLDER}"
            ) from error

    def transcribe(self, clips: Sequence[NDArray[np.float32]]) -> list[RecognizedSpeech]:
        """Recognize mono clips `[N]` at `sample_rate`, one after the other."""
        return [self._transcribe(clip_N) for clip_N in clips]

    def _transcribe(self, clip_N: NDArray[np.float32]) -> RecognizedSpeech:
        decoding, duration_s = self._decoding, len(clip_N) / self.sample_rate
        parts, info = self._model.transcribe(
            clip_N,
            language=decoding.language,
            beam_size=decoding.beam_size,
            temperature=0.0,
            condition_on_previous_text=decoding.condition_on_previous_text,
            initial_prompt=decoding.initial_prompt,
            word_timestamps=decoding.word_timestamps,
            max_new_tokens=self._max_tokens(duration_s),
            vad_filter=False,  # pauses are cut by those who call, or belong to the clip
        )
        segments = list(parts)
        words = tuple(
            SpokenWord(word.word, word.start, min(word.end, duration_s), word.probability)
            for segment in segments
            for word in segment.words or ()
        )
        return RecognizedSpeech(
            "".join(segment.text for segment in segments).strip(),
            words,
            info.language,
            None if decoding.language is not None else info.language_probability,
            _mean_log_probability(segments),
            sum(len(segment.tokens) for segment in segments),
            min((segment.no_speech_prob for segment in segments), default=None),
        )

    def _max_tokens(self, duration_s: float) -> int:
        decoding = self._decoding
        has_prompt = decoding.initial_prompt is not None or decoding.condition_on_previous_text
        max_tokens = _MAX_TOKENS_AFTER_A_PROMPT if has_prompt else _MAX_TOKENS
        return min(max_tokens, round(SPARE_TOKENS + MAX_TOKENS_PER_SECOND * duration_s))


def whisper_problem(folder: Path) -> str | None:
    """Name what is missing to open a folder: the package, the folder or files in it; None: nothing."""
    if importlib.util.find_spec("faster_whisper") is None:
        return "the package faster-whisper is not here: pip install 'audiollm[whisper]'"
    if not folder.is_dir():
        return f"no folder {folder}: give {EXPECTED_FOLDER}"
    missing = [name for name in _FILES if not (folder / name).is_file() and not is_planned(folder)]
    return f"{folder} holds no {' and no '.join(missing)}: give {EXPECTED_FOLDER}" if missing else None


def is_ctranslate2(folder: Path) -> bool:
    """Whether a folder holds weights in CTranslate2's format and none of transformers."""
    return (folder / WEIGHTS).is_file() and not any(folder.glob("*.safetensors"))


def _mean_log_probability(segments: Sequence[Any]) -> float | None:
    """The mean over the tokens of all segments, in nats."""
    tokens = sum(len(segment.tokens) for segment in segments)
    return sum(segment.avg_logprob * len(segment.tokens) for segment in segments) / tokens if tokens else None
