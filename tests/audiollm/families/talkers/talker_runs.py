"""Runs of stages on a talker of random weights, and shards of random codes for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from torch import Tensor

from audiollm.data.records.sample import AudioPart, Message, RatedAnswer, Sample, TextPart
from audiollm.data.records.shards import ShardWriter
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe

FAST = {"batch_size": 4, "precision": "fp32", "report_to": [], "learning_rate": 1e-2, "evaluations": 2}


def random_codes(books: int, size: int, frames: int, seed: int) -> Tensor:
    """Codes `[K, T]` that stand for no sound."""
    return torch.randint(1, size, (books, frames), generator=torch.Generator().manual_seed(seed))


def write_clips(
    folder: Path, clips: Mapping[str, Sequence[Tensor]], books: int, size: int, held_out: int = 0
) -> Path:
    """Write a sample per text; of several clips, the first is the best answer to it, of one it is what is said."""
    writer = ShardWriter(folder, samples_per_shard=64)
    for number, (text, takes) in enumerate(clips.items()):
        question = Message(role="user", content=[TextPart(text=text)])
        speech = [[AudioPart(path=f"{take}.wav")] for take in range(len(takes))]
        answers = [RatedAnswer(content=part, score=-take) for take, part in enumerate(speech)]
        messages = [question] if len(takes) > 1 else [question, Message(role="assistant", content=speech[0])]
        split = {"split": "test" if number >= len(clips) - held_out else "train"}
        sample = Sample(
            id=f"clip{number}",
            messages=messages,
            task="tts",
            metadata=split,
            answers=answers if len(takes) > 1 else [],
        )
        writer.write(number, sample, [[codes_KT.numpy() for codes_KT in takes]])
    writer.close({"codec": {"num_codebooks": books, "codebook_size": size}})
    return folder


def run_stage(
    folder: Path, name: str, stage: str, fast: Mapping[str, Any] = FAST, **settings: Any
) -> dict[str, Any]:
    """Run a recipe of one stage; return its figures."""
    recipe = {"name": "any", "size": "tiny", "seed": 1, "stages": [{stage: {**fast, **settings}}]}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    run_recipe(load_recipe(path, name=name, runs=folder), Console(quiet=True))
    figures: dict[str, Any] = json.loads((folder / name / stage / "stage.json").read_text())["figures"]
    return figures


def curve_of(folder: Path, name: str, stage: str, key: str) -> list[float]:
    """A figure of a stage, step by step."""
    rows = map(json.loads, (folder / name / stage / "metrics.jsonl").read_text().splitlines())
    return [row[key] for row in rows if key in row]
