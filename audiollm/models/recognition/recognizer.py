"""The one way to name and to call a speech recognizer in a folder: clips in, transcripts out, whatever its class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from audiollm.errors import ConfigError
from audiollm.files.json_files import read_json_file
from audiollm.files.transformers_folders import opening
from audiollm.models.recognition.ctranslate2_whisper import (
    CTranslate2Whisper,
    WhisperDecoding,
    is_ctranslate2,
)
from audiollm.models.recognition.transcript import RecognizedSpeech

if TYPE_CHECKING:
    from audiollm.models.recognition.ctc import CtcRecognizer
    from audiollm.models.recognition.decoder import DecoderRecognizer

MAX_TOKENS = 224
"""Most tokens per 30 s: half of Whisper's context, as its authors decode."""
FolderKind = Literal["transformers", "faster_whisper"]
_FOLDER_KINDS: dict[str, FolderKind] = {"transformers": "transformers", "faster_whisper": "faster_whisper"}


class FolderRecognizer(Protocol):
    """A recognizer opened from a folder."""

    @property
    def sample_rate(self) -> int: ...
    def transcribe(self, clips: Sequence[NDArray[np.float32]]) -> list[RecognizedSpeech]:
        """Recognize mono clips `[N]` at `sample_rate`."""


class SpeechRecognizer:
    """A CTC model (wav2vec2, HuBERT, Parakeet) or a decoder (Whisper, Moonshine) of transformers in a local folder.

    Weights may be stored in float32, float16 or bfloat16. Clips of any length are taken: long ones are cut where it is
    quiet.

    Args:
        language: of the speech (`en`, `pt-BR`); None: a multilingual Whisper detects it.
        max_tokens: most tokens per 30 s, of a decoder.

    Raises:
        ConfigError: the folder holds no recognizer, or pickled weights only.
    """

    def __init__(
        self,
        folder: Path,
        language: str | None = None,
        device: str = "cpu",
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._model: CtcRecognizer | DecoderRecognizer
        if _is_ctc(folder):
            from audiollm.models.recognition.ctc import CtcModel, CtcRecognizer

            self._model = CtcRecognizer(CtcModel(folder, device), language)
        else:
            from audiollm.models.recognition.decoder import DecoderRecognizer

            self._model = DecoderRecognizer(folder, language, device, max_tokens)
        self.sample_rate = self._model.sample_rate

    def transcribe(self, clips: Sequence[NDArray[np.float32]]) -> list[RecognizedSpeech]:
        """Recognize mono clips `[N]` at `sample_rate`, together as one batch."""
        return self._model.transcribe(clips)


def folder_recognizer(text: str) -> tuple[FolderKind, Path]:
    """The kind and the folder of a recognizer as commands and settings name it.

    Args:
        text: `transformers=FOLDER`, `faster_whisper=FOLDER`, or a folder alone, whose files tell the kind.

    Raises:
        ConfigError: another kind.
    """
    kind, equals, where = text.partition("=")
    if equals and kind in _FOLDER_KINDS:
        return _FOLDER_KINDS[kind], Path(where)
    if equals and kind.isidentifier() and not Path(text).exists():
        raise ConfigError(
            f"recognizer {text!r}: {kind!r} is not opened from a folder",
            "",
            "give transformers=FOLDER, faster_whisper=FOLDER or the folder alone",
        )
    folder = Path(text)
    return ("faster_whisper" if is_ctranslate2(folder) else "transformers"), folder


def open_recognizer(text: str, language: str | None = None) -> FolderRecognizer:
    """Open a recognizer of `folder_recognizer` on the CPU.

    Args:
        language: of the speech; None: a multilingual Whisper detects it.

    Raises:
        ConfigError: another kind, or no such recognizer in the folder.
    """
    kind, folder = folder_recognizer(text)
    if kind == "faster_whisper":
        return CTranslate2Whisper(folder, WhisperDecoding(language))
    return SpeechRecognizer(folder, language)


def is_whisper(folder: Path) -> bool:
    """Whether a folder holds a Whisper, in either format. Raises: ConfigError: no config that can be read."""
    if is_ctranslate2(folder):
        return True
    with opening(folder, "speech recognizer"):
        return bool(read_json_file(folder / "config.json", dict).get("model_type") == "whisper")


def _is_ctc(folder: Path) -> bool:
    """Whether the config names a CTC head. Raises: ConfigError: no config that can be read."""
    with opening(folder, "speech recognizer"):
        heads = read_json_file(folder / "config.json", dict).get("architectures") or []
    return any(str(head).endswith("CTC") for head in heads)
