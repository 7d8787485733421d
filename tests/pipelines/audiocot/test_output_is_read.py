"""`encode_latents`, `train_flow` and `train` take what `audiocot` writes, at a tiny size."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from audiollm.flow.sound_model import SoundModel
from audiollm.flow.stages import ENCODE_LATENTS, TRAIN_FLOW
from tests.audiollm.flow.toy import context_of, encode_config, train_config
from tests.audiollm.supervised.heard_samples import understanding
from tests.audiollm.supervised.train_samples import run_stage
from tests.pipelines.audiocot.cot_run import compose, rows, think


@pytest.mark.slow
def test_sound_models_and_models_that_hear_are_trained_on_the_output(tmp_path: Path) -> None:
    run = tmp_path / "run"
    think(run, compose(tmp_path), steps={"objects": {}}, samples_per_shard=3)
    figures = ENCODE_LATENTS.run(encode_config(run / "cot.jsonl"), context_of(tmp_path / "latents"))
    assert figures == {"samples": len(rows(run, "cot.jsonl")), "set_aside": 0}
    TRAIN_FLOW.run(train_config(tmp_path / "latents" / "shards", steps=10), context_of(tmp_path / "flow"))
    config = SoundModel.from_pretrained(tmp_path / "flow").config
    assert {"frames", "caption", "cot"} <= set(config.conditions) and "bell" in config.words
    trained = run_stage(tmp_path / "train", str(run / "shards"), **understanding(steps=10, batch_size=2))
    assert math.isfinite(trained["text_loss"])
