"""Runs of a recipe with the stage `train_policy` on a tiny model, its errors, and runs that are killed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from audiollm.errors import ConfigError, StageError
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from tests.audiollm.rl.online.prompt_records import OWN
from tests.forked import start_command


def write_recipe(folder: Path, **settings: Any) -> Path:
    stage = {
        "samples": "prompts.jsonl", "start": "llm", "rewards": {f"{OWN}brevity": 1.0}, "steps": 12, "batch_size": 3,
        "group_size": 4, "max_answer_tokens": 12, "learning_rate": 3e-3, "precision": "fp32", "report_to": [],
        "evaluations": 2, **settings,
    }  # fmt: skip
    recipe = {"name": "any", "size": "tiny", "seed": 1, "stages": [{"train_policy": stage}]}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def run(folder: Path, name: str = "r", **settings: Any) -> Path:
    run_recipe(load_recipe(write_recipe(folder, **settings), name=name, runs=folder), Console(quiet=True))
    return folder / name / "train_policy"


def error_of(folder: Path, **settings: Any) -> str:
    with pytest.raises((ConfigError, StageError)) as caught:
        run(folder, "bad", **settings)
    return str(caught.value)


def check_killed_run(folder: Path, settings: Mapping[str, Any], kills: Sequence[int]) -> Path:
    """Check that a run which is killed after each of these steps leaves the files of one that is not, whose folder
    is returned."""
    settings = {"checkpoint_seconds": 0, **settings}
    whole = run(folder, "whole", **settings)
    recipe = folder / "recipe.yaml"
    for step in kills:
        process = start_command("run", str(recipe), "--name", "killed", "--runs", str(folder))
        awaited = folder / "killed" / "train_policy" / "rollouts" / f"{step:06d}.jsonl"
        until = time.monotonic() + 120
        while not awaited.exists() and time.monotonic() < until:
            assert process.is_alive()
            time.sleep(0.01)
        process.kill()
        process.join()
    killed = run(folder, "killed", **settings)
    names = {str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()}
    assert {str(path.relative_to(killed)) for path in killed.rglob("*") if path.is_file()} == names
    for name in names - {"stage.json", "performance.jsonl", "config.yaml"}:
        if not name.endswith("state.json"):
            assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    return whole
