"""Peak memory of LoRA trainings of talkers, each in a process of its own, beside what `audiollm plan` says of it.

    make -C benchmarks plan-memory              # one small shape in every format
    make -C benchmarks plan-memory FULL=1       # three shapes of Qwen3-TTS's layout, 64 M to 410 M parameters

Models have random weights and samples random codes: memory depends on neither. The figure is the largest resident set
of the process (`ru_maxrss`), from its start to the saved model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from audiollm.commands.run import untimed_plans
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from audiollm.data.records.shards import ShardWriter
from audiollm.families.qwen3_tts.new_model import write_qwen3_tts
from audiollm.families.talkers.new_talker import TalkerShape
from audiollm.recipe.stages import load_recipe

BOOKS, CODES = 16, 2048
"""Codebooks of Qwen3-TTS's codec, and codes of each."""
TEXT = "one two three four five"
TARGETS = ["talker", "code_predictor", "text_projection"]
"""Adapted layers, as in recipes/finetune_qwen3_tts/lora.yaml."""
FORMATS = ("fp32", "bf16", "nf4")


class Shape(NamedTuple):
    """Sizes of a model, and of what it is trained on."""

    width: int
    layers: int
    depth_width: int
    depth_layers: int


SHAPES = {
    "small": Shape(512, 12, 256, 3),
    "middle": Shape(768, 14, 512, 5),
    "large": Shape(1024, 20, 1024, 5),
}


class Measurement(NamedTuple):
    """A training's peak memory as planned and as measured, in MB."""

    parameters: int
    planned_mb: float
    measured_mb: float
    figures: dict[str, Any]

    @property
    def ratio(self) -> float:
        """What was planned, relative to what was measured."""
        return self.planned_mb / self.measured_mb


def write_samples(folder: Path, frames: int, count: int) -> Path:
    """Write spoken samples of random codes."""
    writer, generator = ShardWriter(folder, samples_per_shard=64), torch.Generator().manual_seed(0)
    for number in range(count):
        messages = [
            Message(role="user", content=[TextPart(text=TEXT)]),
            Message(role="assistant", content=[AudioPart(path=f"{number}.wav")]),
        ]
        sample = Sample(id=f"clip{number}", messages=messages, task="tts", metadata={"split": "train"})
        codes_KT = torch.randint(1, CODES, (BOOKS, frames), generator=generator)
        writer.write(number, sample, [[codes_KT.numpy()]])
    writer.close({"codec": {"num_codebooks": BOOKS, "codebook_size": CODES}})
    return folder


def write_model(folder: Path, shape: Shape) -> Path:
    """Write a model with random weights."""
    folder.mkdir(parents=True)
    write_qwen3_tts(folder, TalkerShape(BOOKS, CODES, *shape))
    return folder


def write_recipe(folder: Path, model: Path, samples: Path, **settings: Any) -> Path:
    """Write a recipe of one training of an adapter."""
    stage = {
        "start": str(model), "samples": str(samples), "trained": "adapter", "lora": {"target_modules": TARGETS},
        "steps": 10, "batch_size": 2, "max_tokens": 4096, "precision": "fp32", "report_to": [], "ema_decay": 0,
        "checkpoint_seconds": 1000, "rollbacks": 0, "evaluations": 1, **settings,
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"name": "run", "size": "tiny", "stages": [{"train": stage}]}))
    return path


def measure(folder: Path, recipe: Path) -> Measurement:
    """Plan a recipe, and run it in a process of its own.

    Raises:
        RuntimeError: the run ended with an error.
    """
    plan = untimed_plans(load_recipe(recipe, name="run", runs=folder))["train"]
    command = [sys.executable, "-W", "ignore", "-m", "audiollm.commands.cli", "run", str(recipe), "--name", "run"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, "--runs", str(folder)], stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError((folder / "log").read_text()[-2000:])
    stage = json.loads((folder / "run" / "train" / "stage.json").read_text())
    return Measurement(plan.parameters, plan.memory_mb, usage.ru_maxrss / 1024, stage["figures"])


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--shapes", nargs="*", default=None)
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--work", type=Path, default=Path("runs/plan-memory"))
    parser.add_argument("--frames", type=int, default=40)
    parser.add_argument("--settings", type=json.loads, default={})
    options = parser.parse_args()
    for name in options.shapes or (SHAPES if options.full else ["small"]):
        place = options.work / name
        shutil.rmtree(place, ignore_errors=True)
        model = write_model(place / "model", SHAPES[name])
        samples = write_samples(place / "samples", options.frames, 8)
        for format in options.formats:
            folder = place / format
            folder.mkdir()
            recipe = write_recipe(folder, model, samples, frozen_weights=format, **options.settings)
            m = measure(folder, recipe)
            print(name, format, f"{m.parameters / 1e6:.1f} M", f"planned {m.planned_mb:.0f}", f"measured {m.measured_mb:.0f}",
                  f"{m.ratio:.2f}", {k: v for k, v in m.figures.items() if "error" in k}, flush=True)
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
