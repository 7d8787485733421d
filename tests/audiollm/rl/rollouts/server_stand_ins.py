"""Lets processes of a server's side import the stand-ins for vLLM and SGLang; models as servers read them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from audiollm.files.atomic import read_json, write_json
from tests.audiollm.models.tiny_audio_llms import save_tiny

STAND_IN = Path(__file__).parent / "stand_in"


def use_stand_in(patch: pytest.MonkeyPatch) -> None:
    before = os.environ.get("PYTHONPATH")
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(STAND_IN), before])))
    patch.setenv("OMP_NUM_THREADS", "1")


def save_served(kind: str, folder: Path) -> None:
    """Write a tiny model whose tables of words are two, for transformers and for servers."""
    save_tiny(kind, folder)
    config = read_json(folder / "config.json")
    config.get("thinker_config", config)["text_config"]["tie_word_embeddings"] = False
    write_json(folder / "config.json", config)
