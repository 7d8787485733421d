"""hibari: one American English voice of 8 MB in a package, at 24 kHz (extra `voices`).

Shapes: N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipelines.annotate.synthesizers.phonemes import open_hibari, phoneme_pieces
from pipelines.annotate.synthesizers.pieces import join_speech
from pipelines.annotate.synthesizers.synthesizer import (
    SynthesizedSpeech,
    Synthesizer,
    package_missing,
    pick_named_voices,
)

VOICE = "heart"
MAX_PHONEMES = 400
"""Where the package itself cuts sentences."""


class HibariSynthesizer(Synthesizer):
    """The voice that is in the package."""

    language = "en"
    characters_per_cpu_s = 700.0

    def __init__(self) -> None:
        self._hibari: Any = None

    def missing(self) -> str | None:
        return package_missing("hibari", "voices")

    def pick_voices(self, voices: int | Sequence[str] | None, seed: int) -> list[str]:
        return pick_named_voices(voices, [VOICE], "hibari")

    def fingerprint(self) -> str:
        from importlib.metadata import version

        return f"hibari {version('hibari-tts')}"

    def speak(self, text: str, voice: str, *, rate: float, seed: int) -> SynthesizedSpeech:
        if self._hibari is None:
            self._hibari = open_hibari()
        pieces = [
            self._hibari.from_phonemes(phonemes, rate, seed)
            for phonemes in phoneme_pieces(self._hibari, text, MAX_PHONEMES)
        ]
        return join_speech([np.asarray(piece, np.float32) for piece in pieces], self._hibari.sample_rate)
