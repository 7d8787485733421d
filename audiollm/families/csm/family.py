"""The family of CSM: a Llama over text and frames, and a small one over the codebooks of a frame.

Source: transformers' `models/csm`, whose class is the oracle of the tests.
"""

from __future__ import annotations

from pathlib import Path

from audiollm.families.family import ModelFamily, ModelFolder
from audiollm.families.talkers.folder import TalkerFolder
from audiollm.families.talkers.new_talker import TalkerShape


class CsmFamily:
    """A `ModelFamily`."""

    def open(self, folder: Path) -> ModelFolder:
        """See `ModelFamily.open`."""
        return TalkerFolder(folder, _csm_kind)

    def write_new(self, folder: Path, shape: TalkerShape) -> int:
        """See `NewTalkerFamily.write_new`."""
        from audiollm.families.csm.new_model import write_csm

        return write_csm(folder, shape)


def _csm_kind(folder: Path) -> object:
    from audiollm.families.csm.kind import CsmKind

    return CsmKind(folder)


FAMILY: ModelFamily = CsmFamily()
