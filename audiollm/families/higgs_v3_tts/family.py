"""The family of Higgs Audio v3 TTS: a Qwen3 over text and delayed rows of codes, whose table of codes is its head.

Source: the package mlx-audio 0.6.2 (`tts/models/higgs_audio_v3`), the oracle of the tests.
"""

from __future__ import annotations

from pathlib import Path

from audiollm.families.family import ModelFamily, ModelFolder
from audiollm.families.talkers.folder import TalkerFolder
from audiollm.families.talkers.new_talker import TalkerShape


class HiggsV3Family:
    """A `ModelFamily`."""

    def open(self, folder: Path) -> ModelFolder:
        """See `ModelFamily.open`."""
        return TalkerFolder(folder, _higgs_v3_kind)

    def write_new(self, folder: Path, shape: TalkerShape) -> int:
        """See `NewTalkerFamily.write_new`."""
        from audiollm.families.higgs_v3_tts.new_model import write_higgs_v3

        return write_higgs_v3(folder, shape)


def _higgs_v3_kind(folder: Path) -> object:
    from audiollm.families.higgs_v3_tts.kind import HiggsV3Kind

    return HiggsV3Kind(folder)


FAMILY: ModelFamily = HiggsV3Family()
