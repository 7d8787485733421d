"""Memory that a plan tells, beside what a process takes, and its arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from audiollm.commands.run import untimed_plans
from audiollm.families.qwen3_tts.new_model import write_qwen3_tts
from audiollm.families.talkers.new_talker import TalkerShape
from audiollm.families.training_memory import (
    PROCESS_MB,
    BatchWork,
    StackWork,
    WeightSizes,
    gpu_mb,
    process_mb,
    smallest_gpu,
)
from audiollm.models.decoder import DualFFNConfig
from audiollm.recipe.stages import StagePlan, load_recipe
from tests.audiollm.families.talkers.talker_runs import random_codes, write_clips

TARGETS = ["talker", "code_predictor", "text_projection"]
SHAPE = DualFFNConfig(
    vocab_size=1, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=16,
    audio_ffn_layers=(), qk_norm=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    (folder / "model").mkdir()
    write_qwen3_tts(folder / "model", TalkerShape(8, 512, 384, 8, 192, 2))
    write_clips(folder / "clips", {f"text {n}": [random_codes(8, 512, 20, n)] for n in range(4)}, 8, 512)
    return folder


def write_recipe(place: Path, name: str, **settings: Any) -> Path:
    stage = {
        "start": str(place / "model"), "samples": str(place / "clips"), "trained": "adapter",
        "lora": {"target_modules": TARGETS}, "steps": 10, "batch_size": 2, "precision": "fp32", "report_to": [],
        "ema_decay": 0, "evaluations": 1, **settings,
    }  # fmt: skip
    path = place / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"name": name, "size": "tiny", "stages": [{"train": stage}]}))
    return path


def plan(place: Path, name: str, **settings: Any) -> StagePlan:
    recipe = write_recipe(place, name, **settings)
    return untimed_plans(load_recipe(recipe, name=name, runs=place / "runs"))["train"]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["fp32", "bf16", "nf4"])
def test_a_process_takes_what_the_plan_says(place: Path, format: str) -> None:
    planned = plan(place, format, frozen_weights=format)
    arguments = ["run", str(place / f"{format}.yaml"), "--name", format, "--runs", str(place / "runs")]
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-m", "audiollm.commands.cli", *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    assert planned.memory_mb == pytest.approx(usage.ru_maxrss / 1024, rel=0.15)
    figures = json.loads((place / "runs" / format / "train" / "stage.json").read_text())["figures"]
    assert figures["parameters"] == planned.parameters
    assert ("logit_error_start" in figures and "logit_error_saved" in figures) == (format != "fp32")


def test_a_plan_needs_config_json_alone(place: Path, tmp_path: Path) -> None:
    whole = plan(place, "whole", frozen_weights="nf4")
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_bytes((place / "model" / "config.json").read_bytes())
    bare = plan(place, "bare", frozen_weights="nf4", start=str(folder))
    assert bare.memory_mb == whole.memory_mb and bare.parameters == whole.parameters > 0
    assert bare.details is not None
    (line,) = bare.details(1, 1.0)
    assert all(f"{format} " in line for format in ("fp32", "bf16", "nf4")) and "fits 8 GB" in line


def test_fewer_bytes_and_fewer_rows_take_less(place: Path) -> None:
    formats = [plan(place, "any", frozen_weights=format).details for format in ("fp32", "nf4")]
    assert formats[0] is not None and formats[1] is not None
    assert formats[0](1, 1.0) == formats[1](1, 1.0)  # all formats, whatever the recipe's
    once = plan(place, "once").memory_mb
    assert plan(place, "again", activation_checkpointing=True).memory_mb < once
    assert plan(place, "more", batch_size=4).memory_mb > once


def test_kept_values_of_a_layer() -> None:
    """Two residual sums; then norms, gates, queries, keys, values and outputs in the type of the products."""
    stack = StackWork(SHAPE, 10)
    assert stack.kept_bytes(4) == 10 * 4 * (2 * 8 + 2 * 8 + 4 * 16 + 4 * 8 + 3 * 4)
    assert stack.kept_bytes(2) == 10 * (4 * 2 * 8 + 2 * (2 * 8 + 4 * 16 + 4 * 8 + 3 * 4))
    work = BatchWork([stack], 100)
    assert work.num_bytes(4, is_recomputed=False) == pytest.approx(2.3 * stack.kept_bytes(4) + 800)
    assert work.num_bytes(4, is_recomputed=True) == pytest.approx(
        1.3 * stack.kept_bytes(4) + 2 * 10 * 4 * 8 + 800
    )


def test_peaks_of_loading_a_step_and_saving() -> None:
    mega = 2**20
    whole = WeightSizes(100 * mega, mega, 10 * mega)
    assert process_mb(whole, 0, is_averaged=False) == PROCESS_MB + 440  # saved by tensors
    assert process_mb(whole, 50 * mega, is_averaged=True) == PROCESS_MB + 400 + 16 + 50
    small = WeightSizes(100 * mega, mega, 10 * mega, 90 * mega, 45 * mega)
    assert process_mb(small, 0, is_averaged=False) == PROCESS_MB + 85 + 400  # whole ones are loaded beside
    assert gpu_mb(small, 0, False, False, False) - gpu_mb(whole, 0, False, False, False) == 85 - 400
    assert gpu_mb(whole, 0, False, False, True) - gpu_mb(whole, 0, False, False, False) == 200


def test_sizes_count_what_is_stored_in_fewer_bytes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False), torch.nn.Linear(32, 4, bias=False))
    model[0].requires_grad_(False)
    sizes = WeightSizes.of(model, "bf16")
    assert (sizes.total, sizes.trained, sizes.largest) == (64 * 32 + 128, 128, 64 * 32)
    assert (sizes.small, sizes.small_bytes, sizes.num_bytes) == (2048, 4096, 4096 + 512)


@pytest.mark.parametrize(
    ("needed_mb", "words"), [(6_900, "fits 8 GB"), (8_000, "fits 12 GB"), (30_000, "more than 24 GB")]
)
def test_the_smallest_gpu(needed_mb: float, words: str) -> None:
    assert smallest_gpu(needed_mb) == words
