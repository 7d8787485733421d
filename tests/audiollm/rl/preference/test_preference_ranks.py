"""`train_preference` on two ranks follows the curve of one rank, with every strategy and placement of the reference."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from audiollm.files.atomic import read_jsonl
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from audiollm.rl.preference.run import train_preference
from audiollm.rl.preference.settings import PreferenceConfig
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import write_lists
from tests.audiollm.train.two_ranks import on_two_ranks

LORA = {"trained": "adapter", "lora": {"rank": 2, "alpha": 4}}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp-sharded": {"strategy": "ddp", "reference_placement": "sharded"},
    "ddp-lora": {"strategy": "ddp", **LORA},
    "fsdp2-cpu": {"strategy": "fsdp2", "reference_placement": "cpu"},
    "fsdp2-sharded": {"strategy": "fsdp2", "reference_placement": "sharded"},
    "fsdp2-lora": {"strategy": "fsdp2", **LORA},
    "zero2-cpu": {"strategy": "zero2", "reference_placement": "cpu"},
    "zero3-sharded": {"strategy": "zero3", "reference_placement": "sharded"},
    "zero3-lora": {"strategy": "zero3", **LORA},
}

QUICK = ("ddp-sharded", "fsdp2-cpu", "fsdp2-lora")
"""The others are slow proofs."""


def train_case(folder: Path, ranks: Ranks, name: str, **settings: Any) -> None:
    config = PreferenceConfig(
        samples=str(folder / "records.jsonl"),  # type: ignore[arg-type]
        start=folder / "llm",
        objective=[{"name": "dpo", "beta": 0.3}],  # type: ignore[list-item]
        steps=10,
        batch_size=5,
        max_tokens=200,
        learning_rate=2e-3,
        precision="fp32",
        report_to=(),
        seed=4,
        evaluations=1,
        **settings,
    )
    place = folder / name
    place.mkdir(exist_ok=True)
    recipe = Recipe("test", Path("test.yaml"), "tiny", 4, place, (), {})
    train_preference(config, Context(place, recipe, Console(quiet=True), {}, ranks))


def curve(folder: Path) -> list[dict[str, float]]:
    return [
        {key: row[key] for key in ("loss", "margin", "gradient_norm") if key in row}
        for row in read_jsonl(folder / "metrics.jsonl")
        if "loss" in row
    ]


def all_cases(folder: Path, ranks: Ranks, names: tuple[str, ...]) -> None:
    for name in names:
        train_case(folder, ranks, name, **CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("quick", [True, False])
def test_two_ranks_follow_one(tmp_path: Path, quick: bool) -> None:
    write_lists(tmp_path)
    save_tiny("qwen2_audio", tmp_path / "llm")
    names = tuple(name for name in CASES if (name in QUICK) == quick)
    on_two_ranks(partial(all_cases, names=names), tmp_path)
    for lora in (False, True):
        train_case(tmp_path, ALONE, f"one-{lora}", **(LORA if lora else {}))
        expected = curve(tmp_path / f"one-{lora}")
        assert expected and expected[-1]["margin"] > 0.01
        for name in (name for name in names if ("lora" in name) == lora):
            found = curve(tmp_path / name)
            for row, wanted in zip(found, expected, strict=True):
                assert row == pytest.approx(wanted, rel=1e-4, abs=1e-5), name
            assert (tmp_path / name / "model" / "model.safetensors").exists()
