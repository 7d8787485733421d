"""Sweeps that are killed: the trials are those of an undisturbed sweep, and what has finished is not run again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from audiollm.sweep import sweeping
from audiollm.sweep.command import sweep
from audiollm.sweep.ledger import SweepLedger
from audiollm.sweep.study import Sampler
from tests.audiollm.sweep.inline_run import InlineRun

COMMAND = "import typer; from audiollm.sweep.command import sweep; typer.run(sweep)"
SPACES = {
    "random": ("fit.learning_rate=log(1e-5,1e-1)", "fit.width=int(4,32)", "fit.bias=[true,false]"),
    "grid": ("fit.learning_rate=[1e-4,1e-3,1e-2]", "fit.width=int(14,17)", "fit.bias=[true,false]"),
}


def start_sweep(sampler: str, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    """The command in a process of its own; its output goes to `NAME.txt`."""
    options = ("--minimize", "fit.loss", "--sampler", sampler, "--runs", name, *arguments)
    with open(f"{name}.txt", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, "toy.yaml", *SPACES[sampler], *options], stdout=log, stderr=log
        )


Undisturbed = Callable[[str, Sequence[str]], None]


@pytest.fixture
def undisturbed() -> Undisturbed:
    """Runs a sweep without a kill, in the process of the tests."""

    def run(sampler: str, options: Sequence[str]) -> None:
        app = typer.Typer()
        app.command()(sweep)
        words = ["toy.yaml", *SPACES[sampler], "--minimize", "fit.loss", "--sampler", sampler, *options]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sweeping, "RunProcess", InlineRun)
            result = CliRunner().invoke(app, [*words, "--runs", "undisturbed"])
        assert result.exception is None, result.output

    return run


def trials_of(name: str) -> list[tuple[Any, ...]]:
    """What has to be the same, bit for bit."""
    record = SweepLedger(Path(name, "toy/sweep/ledger.jsonl")).record
    return [(t.number, t.parameters, t.state, t.figures, t.error) for t in record.in_state("done", "failed")]


def finished_stages(name: str) -> dict[str, int]:
    """Folders of finished stages, and when they finished."""
    times = {}
    for path in Path(name).glob("**/stage.json"):
        if json.loads(path.read_text())["state"] == "done":
            times[str(path)] = path.stat().st_mtime_ns
    return times


def compare_killed(
    sampler: Sampler, options: Sequence[str], kills: int, workers: int, seed: int, wait_s: float
) -> None:
    """Kill a sweep again and again, at random times, and compare it with an undisturbed one."""
    draws, disturbed = random.Random(seed), (*options, f"fit.wait_s={wait_s}", "--workers", str(workers))
    finished: dict[str, int] = {}
    count = 0
    while count < kills:
        process = start_sweep(sampler, "disturbed", *disturbed)
        ledger = Path("disturbed/toy/sweep/ledger.jsonl")
        size = ledger.stat().st_size if ledger.exists() else 0
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if ledger.exists() and ledger.stat().st_size > size:  # it works on its trials again
                break
            time.sleep(0.02)
        time.sleep(draws.uniform(0, 1.5 * wait_s))
        if process.poll() is not None:  # it was faster than its killer
            assert process.returncode == 0, Path("disturbed.txt").read_text()
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        count += 1
        now = finished_stages("disturbed")
        assert {path: now.get(path) for path in finished} == finished
        finished = now
    assert count >= min(kills, 3)
    process = start_sweep(sampler, "disturbed", *disturbed)
    assert process.wait() == 0, Path("disturbed.txt").read_text()
    now = finished_stages("disturbed")
    assert {path: now.get(path) for path in finished} == finished
    assert trials_of("disturbed") == trials_of("undisturbed")
    assert trials_of("disturbed")
    finals = [
        SweepLedger(Path(name, "toy/sweep/ledger.jsonl")).record for name in ("disturbed", "undisturbed")
    ]
    assert finals[0].final == finals[1].final and finals[0].confirmations == finals[1].confirmations


def test_a_random_sweep_survives_three_kills(toy: Path, undisturbed: Undisturbed) -> None:
    undisturbed("random", options := ("--trials", "3"))
    compare_killed("random", options, kills=3, workers=2, seed=1, wait_s=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("sampler", ["random", "grid"])
def test_a_sweep_survives_twenty_kills(
    toy: Path, undisturbed: Undisturbed, sampler: Sampler, workers: int
) -> None:
    options = ("--trials", "24", "--confirm", "1", "--final", "score_test")
    undisturbed(sampler, options)
    compare_killed(sampler, options, kills=20, workers=workers, seed=workers, wait_s=0.5)


def test_a_killed_worker_is_started_again(toy: Path) -> None:
    process = start_sweep("random", "runs", "--trials", "1", "fit.wait_s=0.8")
    stage = Path("runs/toy/sweep/trial_0000/fit/metrics.jsonl")
    while not stage.exists():
        assert process.poll() is None
        time.sleep(0.05)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(children) == 1
    os.kill(int(children[0]), signal.SIGKILL)
    assert process.wait() == 0
    assert [state for _, _, state, _, _ in trials_of("runs")] == ["done"]
    assert Path("log.txt").read_text().split().count("trial_0000/fit") == 2


@pytest.mark.slow
def test_a_trial_that_falls_behind_is_ended_while_it_runs(toy: Path) -> None:
    """Two trials, one after the other: the second of `halving` has to be as good at its first evaluation."""
    arguments = ("fit.learning_rate=[1e-3,1e-1]", "--sampler", "grid", "--minimize", "fit.loss")
    pruning = ("--prune", "halving", "--prune-by", "fit.evaluation/loss", "--seed", "0")
    command = [sys.executable, "-c", COMMAND, "toy.yaml", *arguments, *pruning, "fit.wait_s=2"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ledger = SweepLedger(Path("runs/toy/sweep/ledger.jsonl"))
    done, pruned = ledger.record.in_state("done"), ledger.record.in_state("pruned")
    assert [trial.parameters["fit.learning_rate"] for trial in done] == ["0.001"], output
    assert len(pruned) == 1 and len(pruned[0].evaluations) == 1
    assert not Path(f"runs/toy/sweep/trial_{pruned[0].number:04d}/fit/model.json").exists()
