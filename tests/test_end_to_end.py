"""The whole recipe at toy size: every stage runs, is skipped when done, and survives `kill -9`.

Where nothing is killed, the command runs in this process, and fits the codebooks to fewer frames after the last step.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from audiollm.commands import cli
from audiollm.files.atomic import read_json
from tokenizer.training import task as tokenizer_task

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
STAGES = ("annotate", "compose", "train_tokenizer", "tokenize", "train", "generate", "evaluate", "report")
SMALL = (
    "annotate.corpus.words=[one,two,three]",
    "annotate.corpus.takes=4",
    "annotate.corpus.test_takes=1",
    "annotate.quality_sample=4",
    "compose.min_seconds=10",
    "train_tokenizer.steps=10",
    "train_tokenizer.batch_size=8",
    "train_tokenizer.hidden_size=64",
    "train_tokenizer.checkpoint_seconds=0",
    "tokenize.samples_per_shard=32",
    "tokenize.encodings=2",
    "train.steps=40",
    "train.batch_size=16",
    "train.evaluations=3",
    "train.checkpoint_seconds=0",
    "train.shape.hidden_size=64",
    "train.shape.num_layers=2",
    "generate.takes=1",
    "generate.batch_size=6",
    "evaluate.judge_steps=30",
    "report.samples=6",
)


def arguments(runs: Path, name: str, *overrides: str) -> list[str]:
    return ["run", str(RECIPE), "--runs", str(runs), "--name", name, *SMALL, *overrides]


def code_of(runs: Path, name: str, *overrides: str) -> int:
    """Run the recipe in this process; the command's exit code."""
    few_frames = patch.multiple(tokenizer_task, REFIT_FRAMES_PER_CODE=1, FRAMES_FITTED=100)
    with few_frames, patch.object(sys, "argv", ["audiollm", *arguments(runs, name, *overrides)]):
        try:
            cli.main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


def start(runs: Path, name: str, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "audiollm.commands.cli", *arguments(runs, name, *overrides)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def summary(runs: Path, name: str) -> dict[str, Any]:
    """The summary without what may differ: times, memory and the run's own name."""
    kept: dict[str, Any] = read_json(runs / name / "summary.json")
    return {k: v for k, v in kept.items() if k not in ("seconds", "peak_memory_mb", "memory_mb", "name")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one whole run in it."""
    folder = tmp_path_factory.mktemp("runs")
    assert code_of(folder, "whole") == 0
    return folder


def test_it_ends_with_a_report_and_a_summary(runs: Path) -> None:
    figures = read_json(runs / "whole" / "summary.json")
    wanted = {"real_accuracy", "generated_accuracy", "tokenizer", "train", "seconds", "peak_memory_mb"}
    assert wanted <= set(figures)
    assert figures["n_generated"] == 18 and figures["failed"] is None
    assert 0 <= figures["generated_accuracy"] <= 1 and figures["real_accuracy"] > 0.5
    page = (runs / "whole" / "report.html").read_text()
    assert page.count("<audio") > 6


def test_a_second_run_does_nothing(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(runs, "whole") == 0
    assert capsys.readouterr().out.count("done before") == len(STAGES)


def test_too_little_audio_ends_with_code_2_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    little = ("annotate.corpus.words=[one]", "annotate.corpus.takes=2", "compose.min_seconds=9999")
    assert code_of(tmp_path, "little", *little) == 2
    told = capsys.readouterr()
    assert "9999" in (told.out + told.err).replace(",", "")
    assert (tmp_path / "little" / "report.html").exists()
    assert (tmp_path / "little" / "annotate" / "set_aside.jsonl").exists()
    assert read_json(tmp_path / "little" / "summary.json")["failed"] is not None


@pytest.mark.slow
def test_killed_in_every_stage_it_ends_with_the_same_summary(tmp_path: Path) -> None:
    runs, killed = tmp_path, []
    finish(start(runs, "whole"))
    for stage in STAGES:
        process = start(runs, "killed")
        deadline = time.monotonic() + 300
        marker = runs / "killed" / stage / "stage.json"
        while not marker.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(1.5 if stage in ("annotate", "train_tokenizer", "train", "evaluate") else 0.2)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if marker.exists() and read_json(marker)["state"] == "running":
            killed.append(stage)
    output = finish(start(runs, "killed"))
    assert len(killed) >= 6, (killed, output)
    assert summary(runs, "killed") == summary(runs, "whole")
