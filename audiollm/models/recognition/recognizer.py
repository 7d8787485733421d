"""The one way to call a speech recognizer of transformers: clips in, transcripts out, whatever its class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from audiollm.files.json_files import read_json_file
from audiollm.files.transformers_folders import opening
from audiollm.models.recognition.transcript import RecognizedSpeech

if TYPE_CHECKING:
    from audiollm.models.recognition.ctc import CtcRecognizer
    from audiollm.models.recognition.decoder import DecoderRecognizer

MAX_TOKENS = 224
"""Most tokens per 30 s: half of Whisper's context, as its authors decode."""


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


def _is_ctc(folder: Path) -> bool:
    """Whether the config names a CTC head. Raises: ConfigError: no config that can be read."""
    with opening(folder, "speech recognizer"):
        heads = read_json_file(folder / "config.json", dict).get("architectures") or []
    return any(str(head).endswith("CTC") for head in heads)
