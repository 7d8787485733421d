"""Both stages of `train_interpreter`, killed at random moments: they end as if nothing had been, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from audiollm.files.atomic import read_jsonl
from tests.audiollm.interpret.interpreter_tasks import ALL_REWARDS, PPO, STAGE_1
from tests.audiollm.interpret.toy_streams import save_toy_model, write_streams
from tests.audiollm.rl.online.killed_runs import KilledRuns, assert_same_files

MOMENTS = ("rollout", "reward", "reference", "update", "sync", "write", "written")
KILLS, STEPS = 20, 30


@pytest.mark.slow
def test_kills_at_random_moments_of_both_stages_change_nothing(tmp_path: Path) -> None:
    kill_both_stages(tmp_path, KILLS, STEPS)


def kill_both_stages(folder: Path, kills: int, steps: int) -> None:
    save_toy_model(folder / "llm")
    write_streams(folder, 12)
    stage: dict[str, Any] = {
        **PPO, "samples": "streams.jsonl", "steps": steps, "batch_size": 3, "max_answer_tokens": 2,
        "learning_rate": 3e-3, "precision": "fp32", "report_to": [], "evaluations": 1, "checkpoint_seconds": 0,
    }  # fmt: skip
    stages = [
        {"name": "stage_1", "train_interpreter": {**stage, "start": "llm", "rewards": STAGE_1}},
        {
            "name": "stage_2",
            "train_interpreter": {**stage, "start": "${stage_1.checkpoint}", "rewards": ALL_REWARDS},
        },
    ]
    (folder / "recipe.yaml").write_text(
        yaml.safe_dump({"name": "any", "size": "tiny", "seed": 2, "stages": stages})
    )
    runs = KilledRuns(folder, kills)
    for kill in range(kills):
        runs.kill(MOMENTS[(3 * kill + 1) % len(MOMENTS)])
    found, expected = runs.finish()
    names = assert_same_files(found, expected)
    for name in ("stage_1", "stage_2"):
        assert {
            f"{name}/model/model.safetensors",
            f"{name}/metrics.jsonl",
            f"{name}/rollouts/000009.jsonl",
        } < names
        figures = [row for row in read_jsonl(expected / name / "metrics.jsonl") if "kl_weight" in row]
        assert len({row["kl_weight"] for row in figures}) > 3  # the controller moves
