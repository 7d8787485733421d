"""Neither packs nor ranks change the loss of a step on fresh answers, or its gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from audiollm.files.atomic import read_jsonl
from audiollm.recipe.ranks import ALONE, Ranks
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.online.fresh_tasks import compare, one_step
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts
from tests.audiollm.train.two_ranks import on_two_ranks

REWARDS = {f"{OWN}brevity": 0.1, f"{OWN}evenness": 1.0}
KL = {"controller": {"name": "fixed", "coefficient": 0.3}}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"kl": {**KL, "gradient": "plain"}},
    "dapo": {"objective": "dapo", "correction": {"mode": "truncate", "cap": 2.0}},
    "gspo": {"objective": "gspo", "advantage": {"name": "grpo", "scale": "batch"}, "kl": KL},
    "rloo": {"objective": "rloo", "advantage": "rloo", "kl": {**KL, "place": "reward", "estimator": "k1"}},
    "reinforce": {"objective": "clip", "advantage": "reinforce_plus_plus", "kl": {**KL, "place": "reward"}},
    "remax": {"objective": "dr_grpo", "advantage": "remax"},
    "ppo": {
        "objective": "clip", "advantage": {"name": "gae", "score_clip": 5}, "critic": {"weight": 0.5},
        "kl": {"controller": {"name": "fixed", "coefficient": 0.1}, "place": "reward", "estimator": "k1"},
    },
    "stale-token": {"objective": "dapo", "correction": {"level": "token", "mode": "truncate", "cap": 1.05}, "kl": KL},
    "stale-sequence": {"correction": {"level": "sequence", "mode": "mask", "cap": 1.1}},
    "gdpo": {"advantage": "gdpo", "truncated": "leave_out", "entropy_weight": 0.01},
}  # fmt: skip


MOVED = 0.02
"""Noise on the weights between sampling and training, in the cases `stale-...`."""


def moved_by(case: str) -> float:
    return MOVED if case.startswith("stale") else 0.0


def settings_of(case: str, folder: Path) -> dict[str, Any]:
    beside = {"ptx": {"samples": str(folder / "prompts.jsonl"), "weight": 0.7}} if case == "ppo" else {}
    return {"rewards": REWARDS, **CASES[case], **beside}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("exact")
    save_tiny("qwen2_audio", made / "llm")
    save_model(made / "dual", "features")
    write_prompts(made)
    return made


@pytest.mark.parametrize("model", ["llm", "dual"])
@pytest.mark.parametrize("case", CASES)
def test_packs_change_nothing(folder: Path, model: str, case: str) -> None:
    given, moved = settings_of(case, folder), moved_by(case)
    one_step(folder, ALONE, model, given, 100_000, "whole", moved)
    one_step(folder, ALONE, model, given, 300 if model == "dual" else 64, "parts", moved)
    both = compare(folder, "parts", "whole")
    beside = 1 if case == "ppo" else 0  # of supervised samples
    assert both["other"]["packs"] == 1 + beside < both["one"]["packs"]
    assert both["one"]["figures"]["ratio"] == 1.0
    if moved:
        assert (
            0.0 < both["one"]["figures"]["mismatch_beyond"] < 1.0
            and both["one"]["figures"]["mismatch_kl"] > 1e-5
        )
    rows = [read_jsonl(folder / place / "000001.jsonl") for place in ("whole", "parts")]
    assert len(rows[0]) == 4 * 3
    for row, other in zip(*rows, strict=True):
        assert row["answer"] == other["answer"] and row["rewards"] == other["rewards"]
        assert row["advantages"] == pytest.approx(other["advantages"], abs=1e-4)
        if not moved:  # sampled from what is trained
            assert row["old"] == pytest.approx(row["behaviour"], abs=2e-4)
        assert len(row["old"]) == row["tokens"]


def two_ranks(folder: Path, ranks: Ranks) -> None:
    for case in CASES:
        one_step(folder, ranks, "llm", settings_of(case, folder), 100, f"two-{case}", moved_by(case))


@pytest.mark.slow
def test_two_ranks_are_one(folder: Path) -> None:
    on_two_ranks(two_ranks, folder)
    for case in CASES:
        one_step(folder, ALONE, "llm", settings_of(case, folder), 100_000, f"one-{case}", moved_by(case))
        compare(folder, f"two-{case}", f"one-{case}")
