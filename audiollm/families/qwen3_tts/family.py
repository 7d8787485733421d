"""The family of Qwen3-TTS: Base, CustomVoice and VoiceDesign, 0.6B and 1.7B.

Source: the published package `qwen-tts` 0.1.1, whose class is the oracle of the tests.
"""

from __future__ import annotations

from pathlib import Path

from audiollm.families.family import ModelFamily, ModelFolder
from audiollm.families.talkers.folder import TalkerFolder
from audiollm.families.talkers.new_talker import TalkerShape


class Qwen3TTSFamily:
    """A `ModelFamily`."""

    def open(self, folder: Path) -> ModelFolder:
        """See `ModelFamily.open`."""
        return TalkerFolder(folder, _qwen3_tts_kind)

    def write_new(self, folder: Path, shape: TalkerShape) -> int:
        """See `NewTalkerFamily.write_new`."""
        from audiollm.families.qwen3_tts.new_model import write_qwen3_tts

        return write_qwen3_tts(folder, shape)


def _qwen3_tts_kind(folder: Path) -> object:
    from audiollm.families.qwen3_tts.kind import Qwen3TTSKind

    return Qwen3TTSKind(folder)


FAMILY: ModelFamily = Qwen3TTSFamily()
