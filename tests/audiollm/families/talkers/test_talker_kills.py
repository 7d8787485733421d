"""The stage `train` on talkers, killed 20 times at random moments for real: it ends bit for bit as if never killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
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

from audiollm.files.tensors import load_tensors
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.supervised.answers import run
from audiollm.supervised.answers.task import AnswerTask
from audiollm.train.loop import checkpoint
from audiollm.train.loop.checkpoint import read_state
from tests.audiollm.families.higgs_v3_tts.tiny_higgs_v3 import write_tiny_higgs_v3
from tests.audiollm.families.talkers.talker_runs import random_codes, write_clips
from tests.audiollm.families.talkers.tiny_csm import write_tiny_csm
from tests.audiollm.families.talkers.tiny_qwen3_tts import write_tiny_qwen3_tts
from tests.forked import forked

MOMENTS = ("data", "step", "write", "written")
KILLS, STEPS = 20, 60
FAMILIES: dict[str, tuple[Callable[..., Path], int, dict[str, Any]]] = {
    "csm": (write_tiny_csm, 4, {}),
    "qwen3_tts": (
        write_tiny_qwen3_tts,
        4,
        {"trained": "adapter", "lora": {"rank": 2, "target_modules": ["talker"]}},
    ),
    "higgs_v3_tts": (write_tiny_higgs_v3, 8, {}),
}
"""By family: what writes its tiny model, codebooks, and what is trained."""


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

    class Telling(AnswerTask):
        def batch(self, *settings: Any) -> Any:
            say("data")
            return super().batch(*settings)

        def updates(self, *settings: Any) -> Iterator[Any]:
            say("step")
            yield from super().updates(*settings)

    checkpoint.save_file = saving
    run.AnswerTask = Telling  # type: ignore[misc]
    run_recipe(load_recipe(Path("recipe.yaml"), name=name, runs=folder), Console(quiet=True))
    told.send("end")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_kills_at_random_moments_change_nothing(tmp_path: Path, family: str) -> None:
    write_model, books, trained = FAMILIES[family]
    write_model(tmp_path / "model")
    clips = {f"{frames} clip": [random_codes(books, 16, frames, frames)] for frames in range(2, 9)}
    write_clips(tmp_path / "clips", clips, books, 16, held_out=2)
    stage = {
        "start": "model", "samples": "clips", "steps": STEPS, "batch_size": 3, "learning_rate": 1e-3, "evaluations": 6,
        "checkpoint_seconds": 0, "report_to": [], "precision": "fp32", **trained,
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump({"name": "any", "seed": 2, "stages": [{"train": stage}]})
    )
    dice, steps = random.Random(family), []
    with forked() as context:

        def start(name: str) -> tuple[BaseProcess, Connection]:
            reads, writes = context.Pipe(duplex=False)
            process = context.Process(target=attempt, args=(tmp_path, name, writes))
            process.start()
            writes.close()
            return process, reads

        for kill in range(KILLS):
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
            state = read_state(tmp_path / "killed" / "train" / "checkpoint")
            steps.append(state["step"] if state else 0)
        for name in ("whole", "killed"):
            process, told = start(name)
            while told.recv() != "end":
                pass
            process.join()
            assert process.exitcode == 0
    assert steps == sorted(steps) and 0 < steps[-1] < STEPS
    killed, whole = (tmp_path / name / "train" for name in ("killed", "whole"))
    names = {str(path.relative_to(whole)) for path in whole.rglob("*.safetensors")}
    assert names == {str(path.relative_to(killed)) for path in killed.rglob("*.safetensors")} and names
    for name in names:
        before, after = load_tensors(whole / name), load_tensors(killed / name)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before), name
