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
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from measure import bench_parser, parse_options, print_row

from audiollm.commands.run import untimed_plans
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from audiollm.data.records.shards import ShardWriter
from audiollm.families.qwen3_tts.new_model import write_qwen3_tts
from audiollm.families.registry import family_of
from audiollm.families.talkers.new_talker import NewTalkerFamily, TalkerShape
from audiollm.recipe.stages import load_recipe

BOOKS, CODES = 16, 2048
"""Codebooks of Qwen3-TTS's codec, and codes of each."""
TEXT = "one two three four five"
TARGETS = ["talker", "code_predictor", "text_projection"]
"""Adapted layers, as in recipes/finetune_qwen3_tts/lora.yaml."""
FORMATS = ("fp32", "bf16", "nf4")
QWEN3_TTS = {"Qwen3-TTS 0.6B": (1024, 28, 3072), "Qwen3-TTS 1.7B": (2048, 28, 6144)}
"""Width, layers and inner width of the published talkers."""


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


def write_random_samples(folder: Path, frames: int, count: int) -> Path:
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
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "audiollm.commands.cli",
        "run",
        str(recipe),
        "--name",
        "run",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, "--runs", str(folder)], stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError((folder / "log").read_text()[-2000:])
    stage = json.loads((folder / "run" / "train" / "stage.json").read_text())
    return Measurement(plan.parameters, plan.memory_mb, usage.ru_maxrss / 1024, stage["figures"])


def published_folders(folder: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """Write config.json of published models, of the sizes that are public; name, folder and adapted parts of each."""
    for name, fields in QWEN3_TTS.items():
        config = _new_config(folder / name, "qwen3_tts")
        talker = config["talker_config"]
        talker |= {
            **_layer_sizes(*fields, 16, 8),
            "text_hidden_size": 2048,
            "text_vocab_size": 151_936,
            "vocab_size": 3072,
        }
        talker["code_predictor_config"] |= _layer_sizes(1024, 5, 3072, 16, 8)
        yield name, _leave_config(folder / name, config), TARGETS
    config = _new_config(folder / "CSM-1B", "csm")
    config |= {**_layer_sizes(2048, 16, 8192, 32, 8, 64), "text_vocab_size": 128_256}
    config["depth_decoder_config"] |= {**_layer_sizes(1024, 4, 8192, 8, 2), "backbone_hidden_size": 2048}
    yield "CSM-1B", _leave_config(folder / "CSM-1B", config), ["backbone", "depth_decoder", "text_projection"]
    config = _new_config(folder / "Higgs Audio v3 TTS", "higgs_multimodal_qwen3")
    config["text_config"] |= {**_layer_sizes(2560, 36, 9728, 32, 8), "vocab_size": 151_936}
    config["audio_encoder_config"] |= {"out_dim": 2560}
    yield "Higgs Audio v3 TTS", _leave_config(folder / "Higgs Audio v3 TTS", config), ["backbone"]


def print_published(folder: Path) -> None:
    """Print what `audiollm plan` says of LoRA trainings of published shapes, with the settings of their recipes."""
    settings = {"batch_size": 16, "max_tokens": 4096, "precision": "bf16", "activation_checkpointing": True}
    for name, model, targets in published_folders(folder):
        for format in FORMATS:
            recipe = write_recipe(
                model,
                model,
                model / "none",
                frozen_weights=format,
                lora={"target_modules": targets},
                **settings,
            )
            plan = untimed_plans(load_recipe(recipe, name="run", runs=model, absent=[]))["train"]
            print(
                f"{name}: {plan.parameters / 1e6:,.0f} M, {format}, process {plan.memory_mb / 1024:.1f} GB",
                flush=True,
            )
        print("  " + "\n  ".join(plan.details(1, 1.0) if plan.details else ()), flush=True)


def _layer_sizes(
    width: int, layers: int, inner: int, heads: int, kv_heads: int, head_dim: int = 128
) -> dict[str, int]:
    return {
        "hidden_size": width, "num_hidden_layers": layers, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim,
    }  # fmt: skip


def _new_config(folder: Path, model_type: str) -> dict[str, Any]:
    family = family_of(model_type, folder)
    assert isinstance(family, NewTalkerFamily)
    folder.mkdir(parents=True)
    books = {"qwen3_tts": (16, 2048), "csm": (32, 2048), "higgs_multimodal_qwen3": (8, 1024)}[model_type]
    family.write_new(folder, TalkerShape(*books, 32, 1, 32, 1))
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _leave_config(folder: Path, config: dict[str, Any]) -> Path:
    """Leave a folder with this config.json, and without weights."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    return folder


def main() -> None:
    """Measure each shape in each format, or print the plans of published shapes."""
    parser = bench_parser(__doc__)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["small"])
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=FORMATS)
    parser.add_argument("--frames", type=int, default=12, help="of each sample")
    parser.add_argument("--settings", type=json.loads, default={}, help="of `train`, as JSON")
    parser.add_argument(
        "--published", action="store_true", help="plans of published shapes alone; nothing runs"
    )
    options = parse_options(parser, shapes=list(SHAPES))
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if options.published:
            return print_published(place)
        for shape in options.shapes:
            measure_shape(place / shape, shape, options)


def measure_shape(place: Path, name: str, options: argparse.Namespace) -> None:
    """Measure one shape in each format; a JSON line for each."""
    model = write_model(place / "model", SHAPES[name])
    samples = write_random_samples(place / "samples", options.frames, 8)
    for format in options.formats:
        folder = place / format
        folder.mkdir()
        recipe = write_recipe(folder, model, samples, frozen_weights=format, **options.settings)
        result = measure(folder, recipe)
        errors = {key: value for key, value in result.figures.items() if key.startswith("logit_error")}
        case = f"{name}, {result.parameters / 1e6:.0f} M, {format}"
        print_row(
            "plan_memory", case, result.planned_mb, result.measured_mb, "MB planned, measured", ratio=result.ratio,
            digits=0, **errors,
        )  # fmt: skip
        shutil.rmtree(folder)
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
