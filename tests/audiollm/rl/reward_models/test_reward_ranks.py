"""`train_reward` on two ranks follows the curve of one rank, with every strategy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from audiollm.files.atomic import read_json, read_jsonl
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from audiollm.rl.reward_models.run import train_reward
from audiollm.rl.reward_models.settings import RewardConfig
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.reward_models.step_records import write_steps
from tests.audiollm.train.two_ranks import on_two_ranks

LORA = {"trained": "adapter", "lora": {"rank": 2, "alpha": 4}}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp-lora": {"strategy": "ddp", **LORA},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2-lora": {"strategy": "fsdp2", **LORA},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "zero3-lora": {"strategy": "zero3", **LORA},
}

QUICK = ("ddp-lora", "fsdp2")
"""The others are slow proofs."""


def train_case(folder: Path, ranks: Ranks, name: str, **settings: Any) -> None:
    config = RewardConfig(
        samples=str(folder / "steps.jsonl"),  # type: ignore[arg-type]
        start=folder / "llm",
        objective=["process"],  # type: ignore[list-item]
        steps=10,
        batch_size=5,
        max_tokens=200,
        learning_rate=2e-3,
        precision="fp32",
        report_to=(),
        seed=4,
        **settings,
    )
    place = folder / name
    place.mkdir(exist_ok=True)
    recipe = Recipe("test", Path("test.yaml"), "tiny", 4, place, (), {})
    train_reward(config, Context(place, recipe, Console(quiet=True), {}, ranks))


def all_cases(folder: Path, ranks: Ranks, names: tuple[str, ...]) -> None:
    for name in names:
        train_case(folder, ranks, name, **CASES[name])


def curve(folder: Path) -> list[dict[str, float]]:
    keys = ("loss", "gradient_norm", "evaluation/loss", "evaluation/accuracy", "evaluation/calibration_error")
    rows = [{key: row[key] for key in keys if key in row} for row in read_jsonl(folder / "metrics.jsonl")]
    return [row for row in rows if row]


@pytest.mark.slow
@pytest.mark.parametrize("quick", [True, False])
def test_two_ranks_follow_one(tmp_path: Path, quick: bool) -> None:
    write_steps(tmp_path, 20)
    save_tiny("qwen2_audio", tmp_path / "llm")
    names = tuple(name for name in CASES if (name in QUICK) == quick)
    on_two_ranks(partial(all_cases, names=names), tmp_path)
    for lora in (False, True):
        train_case(tmp_path, ALONE, f"one-{lora}", **(LORA if lora else {}))
        expected = curve(tmp_path / f"one-{lora}")
        held_out = [row["evaluation/loss"] for row in expected if "evaluation/loss" in row]
        assert len(held_out) >= 3 and held_out[-1] < held_out[0]
        for name in (name for name in names if ("lora" in name) == lora):
            for row, wanted in zip(curve(tmp_path / name), expected, strict=True):
                assert row == pytest.approx(wanted, rel=1e-4, abs=1e-5), name
            assert read_json(tmp_path / name / "model" / "reward.json") == {"scored": "steps"}
            error = read_json(tmp_path / f"one-{lora}" / "reliability.json")["error"]
            assert read_json(tmp_path / name / "reliability.json")["error"] == pytest.approx(error, abs=1e-4)
