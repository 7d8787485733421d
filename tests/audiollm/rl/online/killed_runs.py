"""Runs of recipes that are killed at moments which they tell of, and compared with runs that are not."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.files.atomic import read_json
from audiollm.interpret.training.run import StreamMaker
from audiollm.interpret.training.stream_rewarder import StreamRewarder
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.rl.online import rollout_step, run, weight_copies
from audiollm.rl.online.task import PolicyTask
from audiollm.rl.rewards.scoring import RewardSuite
from audiollm.train.loop import checkpoint, loop
from pipelines.answers import replay, sample, select

MOMENTS = ("rollout", "reward", "reference", "update", "sync", "write", "written")
RARE = ("replay", "refresh")
PRELOADED = [
    "tests.audiollm.rl.online.killed_runs", "torch._dynamo", "pytest", "webdataset", "peft", "safetensors.torch",
    "audiollm.evaluate.report.suite", "audiollm.rl.reward_models.run",
]  # fmt: skip
NOT_COMPARED = ("stage.json", "performance.jsonl", "config.yaml")


def attempt(folder: Path, name: str, told: Connection) -> None:
    """The whole recipe in a process of its own; it tells of each moment and then goes on for a little while."""
    torch.set_num_threads(1)
    os.chdir(folder)

    def say(moment: str) -> None:
        told.send(moment)
        time.sleep(0.001)

    def telling(place: Any, function: str, moment: str, after: str = "") -> None:
        own: Callable[..., Any] = getattr(place, function)

        @wraps(own)
        def told_of(*given: Any, **named: Any) -> Any:
            say(moment)
            found = own(*given, **named)
            if after:
                say(after)
            return found

        setattr(place, function, told_of)

    class Telling(PolicyTask):
        def _losses(self, *given: Any) -> Iterator[Any]:
            say("update")
            yield from super()._losses(*given)

    run.PolicyTask = Telling  # type: ignore[misc]
    telling(rollout_step, "sample_groups", "rollout")
    telling(RewardSuite, "score", "reward")
    telling(StreamMaker, "_sample_step", "rollout")
    telling(StreamRewarder, "__call__", "reward")
    telling(DualFFNPolicy, "_of_reference", "reference")
    telling(ListenerPolicy, "_reference_logits", "reference")
    telling(loop, "announce_weights", "sync")
    telling(weight_copies.SamplesAhead, "_fill", "ahead")
    telling(weight_copies.ReferenceRefresh, "after", "refresh")
    telling(checkpoint, "save_file", "write", "written")
    telling(replay, "draw_replayed", "replay")
    telling(select, "_select", "select")
    telling(sample, "_with_answers", "answers")
    run_recipe(load_recipe(Path("recipe.yaml"), name=name, runs=folder), Console(quiet=True))
    told.send("end")


class KilledRuns:
    """Starts the recipe of a folder, and kills it.

    Args:
        folder: with `recipe.yaml`.
        seed: of the times at which it is killed.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._dice = folder, random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def kill(self, moment: str) -> None:
        """Run until a moment comes for one of the first times, go on for up to 10 ms, and kill."""
        process, told = self._start("killed")
        times = 1 if moment in RARE else self._dice.randint(1, 4)
        while times:
            place = told.recv()
            assert place != "end", f"the run ended before {moment}"
            times -= place == moment
        time.sleep(self._dice.random() * 0.01)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL

    def finish(self) -> tuple[Path, Path]:
        """Run to the end, and once more without a kill. Returns the two folders."""
        for name in ("whole", "killed"):
            process, told = self._start(name)
            while told.recv() != "end":
                pass
            process.join()
            assert process.exitcode == 0
        return self._folder / "killed", self._folder / "whole"

    def _start(self, name: str) -> tuple[BaseProcess, Connection]:
        reads, writes = self._context.Pipe(duplex=False)
        process = self._context.Process(target=attempt, args=(self._folder, name, writes))
        process.start()
        writes.close()
        return process, reads


def assert_same_files(found: Path, expected: Path, not_compared: Sequence[str] = ()) -> set[str]:
    """Check that two folders have the same files with the same bytes, but for times; return their names.

    A kill in the midst of a write may leave a temporary file, whose name begins with a dot.
    """
    names, others = (
        {
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        }
        for folder in (expected, found)
    )
    assert others == names
    for name in sorted(names):
        if Path(name).name in (*NOT_COMPARED, *not_compared):
            continue
        if name.endswith("state.json"):
            states = [read_json(folder / name) for folder in (found, expected)]
            assert all(state.pop("cpu_seconds") > 0 and state.pop("state_sha256") for state in states)
            assert states[0] == states[1], name
        else:
            assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    return names
