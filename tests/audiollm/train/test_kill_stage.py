"""The stage `train`, killed at random moments for real: it ends as if nothing had been; no process stays behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from audiollm.data.records.shards import ShardWriter
from audiollm.files.atomic import read_json, read_jsonl
from audiollm.recipe.runner import read_result, run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.supervised import run
from audiollm.supervised.corpus.batches import StepBatch
from audiollm.supervised.sft import SFTTask
from audiollm.train.loop import checkpoint
from audiollm.train.loop.checkpoint import read_state
from tests.audiollm.supervised.train_samples import SAMPLE
from tests.forked import forked

MOMENTS = ("data", "step", "write", "written", "evaluation")
STEPS, BATCH = 96, 6
SIZES = {"a": 17, "b": 6}
SHARES = {"a": 2 / 3, "b": 1 / 3}
FRAMES = 5
RECIPE = """
name: any
seed: 3
stages:
  - train:
      samples: [{{path: a, weight: 2}}, {{path: b, weight: 1}}]
      steps: {steps}
      batch_size: {batch}
      max_tokens: 100
      workers: {workers}
      ema_decay: 0.9
      evaluations: 18
      keep_best: true
      checkpoint_seconds: 0
      learning_rate: 0.01
      precision: fp32
      report_to: []
      shape: {{hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 64}}
"""


def write_sources(folder: Path) -> None:
    """Every code of a sample to train on is its number, over both sources; each has a held-out one, `b` a bad one."""
    number = 0
    for name, size in SIZES.items():
        writer = ShardWriter(folder / name, samples_per_shard=7)
        for place in range(size + 1):
            split = "test" if place == size else "train"
            sample = SAMPLE.model_copy(update={"id": f"{name}{place}", "metadata": {"split": split}})
            writer.write(place, sample, [[np.full((4, FRAMES), number % 32)]])
            number += split == "train"
        if name == "b":
            writer.write(size + 1, SAMPLE.model_copy(update={"id": "uncoded"}), [])
        writer.close({"codec": {"num_codebooks": 4, "codebook_size": 32}})


def attempt(folder: Path, name: str, told: Connection) -> None:
    """The whole recipe in a process of its own; it tells of each moment and then goes on for a little while."""
    torch.set_num_threads(1)
    os.chdir(folder)

    def say(moment: str) -> None:
        told.send(moment)
        time.sleep(0.001)

    def saving(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None) -> None:
        say("write")
        save_file(tensors, path, metadata)
        say("written")

    class Telling(SFTTask):
        def batch(self, step: int, *others: Any) -> StepBatch:
            say("data")
            batch = super().batch(step, *others)
            row = {"process": os.getpid(), "step": step, "samples": samples_in(batch)}
            with Path(f"{name}.jsonl").open("ab", buffering=0) as file:
                file.write(json.dumps(row).encode() + b"\n")
            return batch

        def updates(self, *given: Any) -> Iterator[Any]:
            say("step")
            yield from super().updates(*given)

        def evaluate(self, step: int) -> Any:
            say("evaluation")
            return super().evaluate(step)

    checkpoint.save_file = saving
    run.SFTTask = Telling  # type: ignore[misc]
    run_recipe(load_recipe(Path("recipe.yaml"), name=name, runs=folder), Console(quiet=True))
    told.send("end")


def samples_in(batch: StepBatch) -> list[int]:
    """The numbers of the samples that a step trains on, each as often as it comes."""
    frames: Counter[int] = Counter()
    for pack in batch.packs:
        frames.update(pack.audio_targets_XK[pack.audio_weights_XK[:, 0] > 0][:, 0].tolist())
    return [number for number in sorted(frames) if number < 32 for _ in range(frames[number] // FRAMES)]


@pytest.fixture
def start(tmp_path: Path) -> Callable[[str], tuple[BaseProcess, Connection]]:
    """Starts attempts in new processes, which a server that has torch loaded already forks."""

    def begin(name: str) -> tuple[BaseProcess, Connection]:
        with forked() as context:
            reads, writes = context.Pipe(duplex=False)
            process = context.Process(target=attempt, args=(tmp_path, name, writes))
            process.start()
        writes.close()
        return process, reads

    return begin


def left_behind(before: set[int]) -> set[int]:
    """Processes that the servers of this one have forked and that are not gone soon."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (found := grandchildren() - before):
        time.sleep(0.02)
    return found


def grandchildren() -> set[int]:
    """Processes that servers of this one have forked."""
    own = psutil.Process()
    return {each.pid for each in own.children(recursive=True)} - {each.pid for each in own.children()}


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "workers"), [(len(MOMENTS), 0), (20, 0), (20, 2)])
def test_kills_at_random_moments_change_nothing(
    tmp_path: Path, start: Callable[[str], tuple[BaseProcess, Connection]], kills: int, workers: int
) -> None:
    """SIGKILL while data is waited for, within steps, evaluations and checkpoint writes.

    With workers each of the attempts has a server of its own, which loads torch first.
    """
    write_sources(tmp_path)
    recipe = RECIPE.format(steps=STEPS, batch=BATCH, workers=workers)
    (tmp_path / "recipe.yaml").write_text(recipe)
    dice, before, saved = random.Random(0), grandchildren(), []
    for kill in range(kills):
        process, told = start("killed")
        moment = MOMENTS[kill % len(MOMENTS)]
        times = 1 if moment == "evaluation" else dice.randint(1, 4)
        while times:
            place = told.recv()
            assert place != "end", f"kill {kill} came too late"
            times -= place == moment
        time.sleep(dice.random() * 0.004)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not left_behind(before)
        state = read_state(tmp_path / "killed" / "train" / "checkpoint")
        saved.append(state["step"] if state else 0)
    for name in ("whole", "killed"):
        process, told = start(name)
        while told.recv() != "end":
            pass
        process.join()
        assert process.exitcode == 0 and not left_behind(before)
    assert saved == sorted(saved) and 0 < saved[-1] < STEPS
    assert_same(tmp_path / "killed" / "train", tmp_path / "whole" / "train")
    assert_none_lost_or_repeated(tmp_path, saved)


def assert_same(found: Path, expected: Path) -> None:
    """All files, to the byte, but for what tells of time."""
    names = {str(path.relative_to(expected)) for path in expected.rglob("*") if path.is_file()}
    assert {str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()} == names
    folders = ("checkpoint", "checkpoint.before", "best")
    weights = {"model/model.safetensors", *(f"{one}/modules.safetensors" for one in folders)}
    assert weights | {"metrics.jsonl", "set_aside.jsonl", "survey.safetensors"} < names
    for name in names - {"stage.json", "performance.jsonl"}:
        if name in ("checkpoint/state.json", "checkpoint.before/state.json"):
            states = [read_json(folder / name) for folder in (found, expected)]
            assert all(state.pop("cpu_seconds") > 0 and state.pop("state_sha256") for state in states)
            assert states[0] == states[1]
        else:
            assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    assert [row["id"] for row in read_jsonl(found / "set_aside.jsonl")] == ["uncoded"]
    figures = [result.figures for folder in (found, expected) if (result := read_result(folder))]
    assert all(each.pop("cpu_seconds") > 0 for each in figures) and figures[0] == figures[1]


def assert_none_lost_or_repeated(folder: Path, saved: list[int]) -> None:
    """Return the samples of each step in every attempt, and those of all steps that count."""
    whole = {row["step"]: row["samples"] for row in read_jsonl(folder / "whole.jsonl")}
    rows = read_jsonl(folder / "killed.jsonl")
    assert list(whole) == list(range(STEPS))
    assert all(row["samples"] == whole[row["step"]] for row in rows)
    attempts: dict[int, list[int]] = {}
    for row in rows:
        attempts.setdefault(row["process"], []).append(row["step"])
    for steps in attempts.values():
        assert steps == list(range(steps[0], steps[0] + len(steps))) and steps[0] in {0, *saved}
    assert len(rows) > STEPS, "a kill within a step has it made again"
    drawn = Counter(number for samples in whole.values() for number in samples)
    assert sum(drawn.values()) == STEPS * BATCH and set(drawn) == set(range(sum(SIZES.values())))
    for first, name in ((0, "a"), (SIZES["a"], "b")):
        counts = [drawn[first + place] for place in range(SIZES[name])]
        assert max(counts) - min(counts) <= 1, f"passes through {name} that are not whole"
        assert abs(sum(counts) - STEPS * BATCH * SHARES[name]) < 3


HANDING_OVER = """
import time
import numpy as np
from audiollm.data.records.loader import Loader


def make(step):
    return np.zeros(100_000)  # more than a pipe holds


if __name__ == "__main__":
    loader = Loader(make, workers=2)
    loader[0]
    print("begun", flush=True)
    time.sleep(60)
"""


def test_workers_that_nobody_takes_from_any_more_end(tmp_path: Path) -> None:
    """With a server of their own, as in a run; each waits to hand over a step when the training is killed."""
    (tmp_path / "trained.py").write_text(HANDING_OVER)
    command = [sys.executable, str(tmp_path / "trained.py")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    time.sleep(0.3)
    begun = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    process.stdout.close()
    _, alive = psutil.wait_procs(begun, timeout=20)
    for each in alive:
        each.kill()
    assert len(begun) >= 4 and not alive, "a server, a tracker and two workers are to end"
