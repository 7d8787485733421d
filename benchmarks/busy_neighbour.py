"""CPU-seconds and time of a training, alone on the machine and beside a busy process.

    python benchmarks/busy_neighbour.py [--steps 60] [--full] [--pairs 1] [--waiting default passive active]

Each case is a run of `audiollm` in a process of its own: the stage `train` of size tiny on random codes. Threads of a
parallel region that wait for the others sleep after a moment (`default`, what `audiollm` sets), at once (`passive`) or
spin on (`active`); beside a process that takes a core, those that spin take the time of the one that they wait for.
`ours` is beside the busy process, `peer` alone, in turns; medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml
from measure import bench_parser, parse_options, print_row

from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from audiollm.data.records.shards import ShardWriter

WAITING: dict[str, dict[str, str]] = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "active": {"OMP_WAIT_POLICY": "active"},
}
"""Settings of OpenMP's threads that wait."""


def write_recipe(folder: Path, steps: int) -> Path:
    random, writer = np.random.default_rng(0), ShardWriter(folder / "shards", samples_per_shard=64)
    for number in range(256):
        messages = [
            Message(role="user", content=[TextPart(text=f"say {number % 10}")]),
            Message(role="assistant", content=[AudioPart(path="a.wav")]),
        ]
        split = {"split": "train" if number else "test"}
        codes_KT = random.integers(1024, size=(8, int(random.integers(10, 30)))).astype(np.int16)
        writer.write(
            number, Sample(id=f"s{number}", messages=messages, task="tts", metadata=split), [[codes_KT]]
        )
    writer.close({"codec": {"num_codebooks": 8, "codebook_size": 1024}})
    stage = {"train": {"samples": str(folder / "shards"), "steps": steps, "evaluations": 1}}
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"name": "busy", "size": "tiny", "seed": 0, "stages": [stage]}))
    return recipe


def run_seconds(recipe: Path, waiting: str, busy: bool) -> tuple[float, float]:
    """User and system time of one run, all its threads together, and the time that it took."""
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))
    }
    try:
        with tempfile.TemporaryDirectory() as runs:
            command = [sys.executable, "-m", "audiollm.commands.cli", "run", str(recipe), "--runs", runs]
            started = time.monotonic()
            process = subprocess.Popen(
                command, env={**environment, **WAITING[waiting]}, stdout=subprocess.DEVNULL
            )
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.monotonic() - started
    finally:
        if neighbour is not None:
            neighbour.kill()
            neighbour.wait()
    if status:
        sys.exit(f"the training ended with status {status}")
    return usage.ru_utime + usage.ru_stime, seconds


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--waiting", nargs="+", default=["default", "active"], choices=list(WAITING))
    options = parse_options(parser, pairs=3)
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_recipe(Path(folder), options.steps)
        for waiting in options.waiting:
            pairs = [
                (run_seconds(recipe, waiting, busy=False), run_seconds(recipe, waiting, busy=True))
                for _ in range(options.pairs)
            ]
            for part, unit, suffix in ((0, "CPU-seconds", ""), (1, "seconds", ", time")):
                alone, beside = (
                    statistics.median(run[part] for run in runs) for runs in zip(*pairs, strict=True)
                )
                case = f"{options.steps} steps, {waiting}{suffix}"
                print_row("busy_neighbour", case, beside, alone, f"{unit} beside / alone", digits=1)


if __name__ == "__main__":
    main()
