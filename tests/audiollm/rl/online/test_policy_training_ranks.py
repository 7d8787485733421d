"""`train_policy` on two ranks follows the curve of one rank, with every strategy: they sample the same answers."""

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
from audiollm.rl.online.run import train_policy
from audiollm.rl.online.settings import PolicyTrainingConfig
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts
from tests.audiollm.train.two_ranks import on_two_ranks

LORA = {"trained": "adapter", "lora": {"rank": 2, "alpha": 4}}
PPO = {"advantage": "gae", "objective": "clip", "critic": {"learning_rate": 2e-3}, "updates": 2}
LAGGED = {
    "ahead": 1, "correction": {"level": "token", "mode": "truncate"}, "refresh_reference": {"every": 3, "mix": 0.6},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp-lora": {"strategy": "ddp", **LORA},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2-lora": {"strategy": "fsdp2", **LORA},
    "ddp-ppo": {"strategy": "ddp", **PPO},
    "fsdp2-ppo-lora": {"strategy": "fsdp2", **PPO, **LORA},
    "zero2-ppo-lora": {"strategy": "zero2", **PPO, **LORA},
    "zero3-ppo": {"strategy": "zero3", **PPO},
    "ddp-lagged": {"strategy": "ddp", **LAGGED},
    "fsdp2-lagged-lora": {"strategy": "fsdp2", **LAGGED, **LORA},
    "zero2": {"strategy": "zero2"},
    "zero2-lagged-lora": {"strategy": "zero2", **LAGGED, **LORA},
    "zero3-lagged": {"strategy": "zero3", **LAGGED},
    "zero3": {"strategy": "zero3"},
    "zero3-lora": {"strategy": "zero3", **LORA},
}

QUICK = {"llm": ("fsdp2-lora",), "dual": ("ddp-ppo",)}
"""The others are slow proofs."""


def train_case(folder: Path, ranks: Ranks, name: str, model: str, **settings: Any) -> None:
    if "critic" in settings:
        settings = {"ptx": {"samples": str(folder / "prompts.jsonl"), "weight": 0.5}, **settings}
    config = PolicyTrainingConfig(
        samples=str(folder / "prompts.jsonl"), start=folder / model, rewards={f"{OWN}brevity": 1.0}, steps=10,  # type: ignore[arg-type]
        batch_size=3, group_size=3, max_answer_tokens=6, max_tokens=200, learning_rate=1e-3, precision="fp32",
        report_to=(), seed=4, evaluations=1, eval_prompts=2,
        kl={"controller": {"name": "proportional", "coefficient": 0.1, "target": 0.5}}, **settings,
    )  # fmt: skip
    place = folder / name
    place.mkdir(exist_ok=True)
    recipe = Recipe("test", Path("test.yaml"), "tiny", 4, place, (), {})
    train_policy(config, Context(place, recipe, Console(quiet=True), {}, ranks))


def curve(folder: Path) -> list[dict[str, float]]:
    keys = (
        "loss",
        "reward",
        "kl",
        "kl_weight",
        "gradient_norm",
        "answer_length",
        "value_error",
        "evaluation/reward",
    )
    rows = [{key: row[key] for key in keys if key in row} for row in read_jsonl(folder / "metrics.jsonl")]
    return [row for row in rows if row]


def all_cases(folder: Path, ranks: Ranks, names: tuple[str, ...], model: str) -> None:
    for name in names:
        train_case(folder, ranks, f"{model}-{name}", model, **CASES[name])


@pytest.mark.parametrize("model", [pytest.param("llm", marks=pytest.mark.slow), "dual"])
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_ranks_follow_one(tmp_path: Path, quick: bool, model: str) -> None:
    write_prompts(tmp_path)
    if model == "llm":
        save_tiny("qwen2_audio", tmp_path / "llm")
    else:
        save_model(tmp_path / "dual", "features")
    names = tuple(name for name in CASES if (name in QUICK[model]) == quick)
    on_two_ranks(partial(all_cases, names=names, model=model), tmp_path)
    for kind in sorted({name.partition("-")[2] for name in names}):
        alone = {**(LORA if "lora" in kind else {}), **(PPO if "ppo" in kind else {})}
        alone |= LAGGED if "lagged" in kind else {}
        train_case(tmp_path, ALONE, f"one-{kind}", model, **alone)
        expected = curve(tmp_path / f"one-{kind}")
        assert len(expected) > 10 and expected[9]["kl"] > 0
        assert ("value_error" in expected[9]) == ("ppo" in kind)
        for name in (name for name in names if name.partition("-")[2] == kind):
            found = curve(tmp_path / f"{model}-{name}")
            for row, wanted in zip(found, expected, strict=True):
                assert row == pytest.approx(wanted, rel=1e-5, abs=1e-5), name
            rows = [
                read_jsonl(tmp_path / place / "rollouts" / "000009.jsonl")
                for place in (f"{model}-{name}", f"one-{kind}")
            ]
            told = [{(row["id"], row["number"]): row["answer"] for row in each} for each in rows]
            assert told[0] == told[1], name
            assert (tmp_path / f"{model}-{name}" / "model" / "model.safetensors").exists()
