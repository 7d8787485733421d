"""Held-out sounds that a training makes at its evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from audiollm.audio import load
from audiollm.errors import ConfigError
from audiollm.files.atomic import read_jsonl
from audiollm.flow.corpus import open_corpus, read_sound
from audiollm.flow.generator import SoundGenerator
from audiollm.flow.model.sampling import SamplerSettings
from audiollm.flow.stages import TRAIN_FLOW
from tests.audiollm.flow.toy import AUTOENCODER, ToyAutoencoder, context_of, train_config


def another_autoencoder() -> ToyAutoencoder:
    made = ToyAutoencoder()
    made.digest = "another"
    return made


def test_held_out_sounds_are_made_at_every_evaluation(encoded: Path, tmp_path: Path) -> None:
    """The last ones are those of the saved model."""
    shards = encoded / "encode" / "shards"
    config = train_config(shards, autoencoder=AUTOENCODER, eval_sounds=2)
    TRAIN_FLOW.run(config, context_of(tmp_path))
    rows = list(read_jsonl(tmp_path / "listening" / "prompts.jsonl"))
    assert [row["id"] for row in rows] == ["scene-3", "scene-7"], "edits are left out"
    assert rows[0]["text"] == "first a high tone, at 0.0 s"
    evaluated = [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl") if "evaluation/loss" in row]
    steps = sorted(each.name for each in (tmp_path / "listening").glob("step-*"))
    assert steps == [f"step-{step + 1:06d}" for step in evaluated] and len(steps) > 2
    generator = SoundGenerator.load(tmp_path, AUTOENCODER)
    sources, facts = open_corpus([shards])
    for row in rows:
        place = next(n for n in range(len(sources[0])) if sources[0][n].sample.id == row["id"])
        sound = read_sound(sources[0][place], facts, generator.model.words)
        latents = generator.sample_latents(sound.conditions, len(sound), SamplerSettings(), row["id"])
        made = load(tmp_path / "listening" / steps[-1] / f"{row['name']}.wav")
        torch.testing.assert_close(made.samples_CN, generator.decode(latents, 8000), atol=1e-3, rtol=0)


def test_another_autoencoder_is_refused(encoded: Path, tmp_path: Path) -> None:
    config = train_config(
        encoded / "encode" / "shards", autoencoder=f"{__name__}:another_autoencoder", eval_sounds=1
    )
    with pytest.raises(ConfigError, match="is not the one whose latents"):
        TRAIN_FLOW.run(config, context_of(tmp_path))
