"""Stages of a toy recipe, which tests copy beside it: data, a fit with a known optimum, and its scores."""

from __future__ import annotations

import json
import math
import os
import time
from typing import Any

from pydantic import Field

from audiollm.errors import StageError
from audiollm.files.atomic import write_json
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig


def note(context: Context) -> None:
    """A line for each start of a stage."""
    with open(os.environ["TOY_LOG"], "a") as file:
        file.write(f"{context.folder.parent.name}/{context.folder.name}\n")


class DataConfig(StageConfig):
    size: int = 3
    seed: int = 0


def make_data(config: DataConfig, context: Context) -> dict[str, Any]:
    note(context)
    write_json(context.folder / "data.json", {"size": config.size})
    return {"size": config.size}


class FitConfig(StageConfig):
    data: InputPath
    learning_rate: float = 1e-2
    width: int = Field(default=8, ge=1)
    bias: bool = True
    highest_rate: float = 1.0
    wait_s: float = 0.0
    incidental = frozenset({"wait_s"})
    seed: int = 0


def fit(config: FitConfig, context: Context) -> dict[str, Any]:
    note(context)
    if config.learning_rate > config.highest_rate:
        raise StageError("the loss is not finite", "a smaller learning rate")
    loss = (math.log10(config.learning_rate) + 3) ** 2 + (config.width - 16) ** 2 / 100
    loss += 0.5 * config.bias + 0.01 * config.seed
    with open(context.folder / "metrics.jsonl", "w") as file:
        for step in range(1, 9):
            time.sleep(config.wait_s / 8)
            file.write(json.dumps({"step": step, "evaluation/loss": loss + 4 / step}) + "\n")
            file.flush()
    write_json(context.folder / "model.json", {"loss": loss})
    return {"loss": loss, "cost": {"width": config.width}}


class ScoreConfig(StageConfig):
    model: InputPath
    split: str = "dev"


def score(config: ScoreConfig, context: Context) -> dict[str, Any]:
    note(context)
    return {"quality": -json.loads(config.model.read_text())["loss"], "held_out": int(config.split == "test")}


DATA = Stage("toy_data", DataConfig, make_data, {"data": "data.json"}, "makes data")
FIT = Stage("toy_fit", FitConfig, fit, {"model": "model.json"}, "fits")
SCORE = Stage("toy_score", ScoreConfig, score, {}, "scores")
