"""Encoded scenes and a model trained on them, for the tests of stages and commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from audiollm.flow.generator import SoundGenerator
from audiollm.flow.stages import ENCODE_LATENTS, TRAIN_FLOW
from tests.audiollm.flow.toy import AUTOENCODER, context_of, encode_config, train_config, write_scenes


@pytest.fixture(scope="session")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Encoded scenes with pictures, words, and an edit of each."""
    folder = tmp_path_factory.mktemp("flow")
    samples = write_scenes(folder)
    figures = ENCODE_LATENTS.run(encode_config(samples, edits_per_sample=1), context_of(folder / "encode"))
    assert figures == {"samples": 16, "set_aside": 0}
    return folder


@pytest.fixture(scope="session")
def trained(encoded: Path) -> Path:
    figures = TRAIN_FLOW.run(
        train_config(encoded / "encode" / "shards", steps=40), context_of(encoded / "train")
    )
    assert figures["sounds"] == 12 and 0 < figures["loss"] < 3
    return encoded / "train"


@pytest.fixture(scope="session")
def generator(trained: Path) -> SoundGenerator:
    return SoundGenerator.load(trained, AUTOENCODER)
