"""Each setting is declared once: the loop and the batches get what a recipe says, and finished runs stay done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from audiollm.supervised.corpus.batches import Batching
from audiollm.supervised.run import _batching
from audiollm.train.settings import LoopConfig, OptimizerSettings, ParameterRule, RunSettings, TimeBudget
from audiollm.train.supervised_settings import PackingSettings, TrainConfig

CHANGED: dict[str, Any] = {
    "minutes": 7.0, "precision": "fp32", "checkpoint_seconds": 3.0, "seed": 5,
    "rules": (ParameterRule("model.*", rate_factor=2.0),), "schedule": "wsd", "warmup_steps": 11,
    "weight_decay": 0.3, "clip_norm": 0.5, "ema_decay": 0.5, "strategy": "fsdp2", "activation_checkpointing": True,
    "compile": True, "spike_deviations": 4.0, "rollbacks": 9, "report_to": ("wandb",),
    "max_tokens": 640, "max_length": 320, "too_long": "refuse", "packing": "sorted", "normalization": "token",
    "audio_reduction": "sum", "text_dropout": 0.25, "speaker_dropout": 0.35, "corrupt_codes": 0.45,
    "silence_weight": 0.5,
}  # fmt: skip
SAVED = [
    "size", "steps", "passes", "minutes", "cpu_minutes", "batch_size", "learning_rate", "precision",
    "checkpoint_seconds", "seed", "trained", "lora", "rules", "schedule", "warmup_steps", "weight_decay",
    "clip_norm", "ema_decay", "strategy", "activation_checkpointing", "compile", "spike_deviations",
    "rollbacks", "report_to", "samples", "shape", "start", "text_tokenizer", "audio_in", "augment", "max_tokens",
    "max_length", "too_long", "packing", "normalization", "audio_reduction", "text_dropout", "speaker_dropout",
    "corrupt_codes", "text_weight", "audio_weight", "workers", "strict", "codec",
    "eval_audio_samples", "evaluations", "keep_best",
]  # fmt: skip
"""The order in which settings are saved; the fingerprints of finished runs were taken in it."""


def changed(folder: Path) -> TrainConfig:
    return TrainConfig(samples=[str(folder)], **CHANGED)


def test_the_loop_gets_every_setting_of_the_recipe(tmp_path: Path) -> None:
    config = changed(tmp_path)
    loop = config.loop_config(None)
    declared = [*TimeBudget.model_fields, *RunSettings.model_fields, *OptimizerSettings.model_fields]
    assert {name for name in declared if name != "cpu_minutes"} <= CHANGED.keys()
    for name in declared:
        assert getattr(loop, name) == getattr(config, name), name
    for name in CHANGED.keys() & set(declared):
        assert getattr(loop, name) != LoopConfig(steps=1, learning_rate=1.0).model_dump().get(name), name
    assert loop.evaluations == config.evaluations == 12


def test_the_batches_get_every_setting_of_the_recipe(tmp_path: Path) -> None:
    corpus = SimpleNamespace(sources=[SimpleNamespace(features=None)], encoder=None)
    batching = _batching(changed(tmp_path), corpus)
    default = Batching(batch_size=1, max_tokens=64, max_length=64)
    assert PackingSettings.model_fields.keys() <= CHANGED.keys()
    for name in PackingSettings.model_fields:
        assert getattr(batching, name) == CHANGED[name] != getattr(default, name), name


def test_settings_are_saved_in_the_order_of_before(tmp_path: Path) -> None:
    assert list(TrainConfig(samples=[str(tmp_path)]).model_dump()) == SAVED


def test_a_raised_limit_of_codes_begins_afresh(tmp_path: Path) -> None:
    """It decides which samples are trained on: a finished run, or one that has its survey, would ignore it."""
    default, raised = (TrainConfig(samples=[str(tmp_path)], max_codes_mb=size) for size in (64, 128))
    saved = [each.model_dump_json(exclude=set(each.incidental)) for each in (default, raised)]
    assert saved[0] != saved[1] and "max_codes_mb" not in saved[0]


def test_audio_of_evaluations_is_incidental(tmp_path: Path) -> None:
    assert TrainConfig(samples=[str(tmp_path)]).incidental >= {"eval_audio_samples"}


def test_an_unknown_setting_of_the_loop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="evaluationz"):
        changed(tmp_path).loop_config(None, evaluationz=3)


def test_a_source_without_a_path_is_left_out(tmp_path: Path) -> None:
    """So a recipe can name one that is optional; without any other there is nothing to train on."""
    config = TrainConfig(samples=cast(Any, [str(tmp_path), {"path": None, "weight": 0.1}]))
    assert [source.path for source in config.samples] == [str(tmp_path)]
    with pytest.raises(ValidationError, match="samples"):
        TrainConfig(samples=cast(Any, [{"path": None, "weight": 0.1}]))
    with pytest.raises(ValidationError, match=r"samples\.0\.path"):
        TrainConfig(samples=cast(Any, [{"weight": 0.1}]))
