"""The stage `train_preference` on a tiny Qwen2-Audio, from records with recordings to a folder of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
import yaml
from rich.console import Console

from audiollm.data.records.sample import AudioPart, Message, RatedAnswer, Sample, TextPart, write_samples
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from tests.audiollm.models.tiny_audio_llms import save_tiny


def tone(path: Path, hz: float, seconds: float = 0.5) -> None:
    times = torch.arange(int(16_000 * seconds)) / 16_000
    soundfile.write(path, (0.3 * torch.sin(2 * torch.pi * hz * times)).numpy(), 16_000)


def write_records(folder: Path, count: int = 24) -> Path:
    """Which of two tones is heard: the right answer and the wrong one."""
    samples = []
    for n in range(count):
        high = n % 2 == 1
        tone(folder / f"{n}.wav", (700.0 if high else 200.0) + 5 * n)
        question = [AudioPart(path=f"{n}.wav"), TextPart(text="High or low?")]
        answers = [
            RatedAnswer(content=[TextPart(text=word)], score=float((word == "high") == high))
            for word in ("high", "low")
        ]
        split = {"split": "test"} if n >= count - 8 else {}
        samples.append(
            Sample(
                id=f"tone{n}",
                messages=[Message(role="user", content=question)],
                task="question",
                metadata=split,
                answers=answers,
            )
        )
    write_samples(folder / "records.jsonl", samples)
    return folder / "records.jsonl"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    write_records(tmp_path / "data")
    save_tiny("qwen2_audio", tmp_path / "model")
    return tmp_path


def run(place: Path, name: str = "run", **settings: Any) -> dict[str, Any]:
    stage = {
        "samples": str(place / "data" / "records.jsonl"),
        "model": str(place / "model"),
        "objective": "dpo",
        "learning_rate": 1e-2,
        "steps": 30,
        "batch_size": 8,
        **settings,
    }
    recipe = place / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump({"name": name, "stages": [{"train_preference": stage}]}))
    loaded = load_recipe(recipe, runs=place / "runs")
    run_recipe(loaded, Console(quiet=True))
    figures: dict[str, Any] = json.loads((loaded.folder / "train_preference" / "stage.json").read_text())["figures"]
    return figures


def test_dpo_orders_held_out_pairs(place: Path) -> None:
    figures = run(place)
    print(figures)
    assert figures["evaluation/accuracy"] >= 0.9
