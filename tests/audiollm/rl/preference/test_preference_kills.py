"""`train_preference`, killed at random moments for real: it ends as if nothing had been, with state and adapter."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from audiollm.families.listener.policy import ListenerPolicy
from audiollm.files.atomic import read_json
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.rl.preference import run
from audiollm.rl.preference.task import PreferenceTask
from audiollm.train.loop import checkpoint
from audiollm.train.loop.checkpoint import read_state
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import write_lists

MOMENTS = ("data", "reference", "step", "write", "written")
CASES: dict[str, dict[str, Any]] = {
    "bco": {"objective": "bco", "trained": "adapter", "lora": {"rank": 2, "alpha": 4}},
    "beta_dpo": {"objective": {"name": "beta_dpo", "beta": 0.5}, "pairs": "all"},
}


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

    class Telling(PreferenceTask):
        def batch(self, *given: Any) -> Any:
            say("data")
            return super().batch(*given)

        def updates(self, *given: Any) -> Iterator[Any]:
            say("step")
            yield from super().updates(*given)

    reference_logits = ListenerPolicy._reference_logits

    def telling(policy: ListenerPolicy, *given: Any) -> Tensor:
        say("reference")
        return reference_logits(policy, *given)

    checkpoint.save_file = saving
    run.PreferenceTask = Telling  # type: ignore[misc]
    ListenerPolicy._reference_logits = telling  # type: ignore[method-assign]
    run_recipe(load_recipe(Path("recipe.yaml"), name=name, runs=folder), Console(quiet=True))
    told.send("end")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kills", "steps"), [("bco", 2, 12), ("bco", 20, 60), ("beta_dpo", 20, 60)])
def test_kills_at_random_moments_change_nothing(tmp_path: Path, case: str, kills: int, steps: int) -> None:
    write_lists(tmp_path, held_out=3)
    save_tiny("qwen2_audio", tmp_path / "llm")
    stage = {
        "samples": "records.jsonl", "start": "llm", "steps": steps, "batch_size": 3, "learning_rate": 1e-3,
        "checkpoint_seconds": 0, "report_to": [], "precision": "fp32", "evaluations": steps // 5, **CASES[case],
    }  # fmt: skip
    recipe = {"name": "any", "seed": 2, "stages": [{"train_preference": stage}]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["audiollm.rl.preference.run", "torch._dynamo", "pytest", "webdataset"])

    def start(name: str) -> tuple[BaseProcess, Connection]:
        reads, writes = context.Pipe(duplex=False)
        process = context.Process(target=attempt, args=(tmp_path, name, writes))
        process.start()
        writes.close()
        return process, reads

    dice, saved = random.Random(kills), []
    for kill in range(kills):
        process, told = start("killed")
        moment, times = MOMENTS[kill % len(MOMENTS)], dice.randint(1, 4)
        while times:
            place = told.recv()
            assert place != "end", f"kill {kill} came too late"
            times -= place == moment
        time.sleep(dice.random() * 0.01)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        state = read_state(tmp_path / "killed" / "train_preference" / "checkpoint")
        saved.append(state["step"] if state else 0)
    for name in ("whole", "killed"):
        process, told = start(name)
        while told.recv() != "end":
            pass
        process.join()
        assert process.exitcode == 0
    assert saved == sorted(saved) and 0 < saved[-1] < steps
    found, expected = (tmp_path / name / "train_preference" for name in ("killed", "whole"))
    names = {str(path.relative_to(expected)) for path in expected.rglob("*") if path.is_file()}
    assert {str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()} == names
    assert {"model/model.safetensors", "checkpoint/modules.safetensors", "metrics.jsonl"} < names
    assert {"answers.jsonl", "pairs.jsonl"} < names
    for name in names - {"stage.json", "performance.jsonl"}:
        if name.endswith("state.json"):
            states = [read_json(folder / name) for folder in (found, expected)]
            assert all(state.pop("cpu_seconds") > 0 and state.pop("state_sha256") for state in states)
            assert states[0] == states[1]
        else:
            assert (found / name).read_bytes() == (expected / name).read_bytes(), name
