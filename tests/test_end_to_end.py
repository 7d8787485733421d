"""The whole recipe at toy size: every stage runs, is skipped when done, and survives `kill -9`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from audiollm.files.atomic import read_json

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
STAGES = ("annotate", "compose", "train_tokenizer", "tokenize", "train", "generate", "evaluate", "report")
SMALL = (
    "annotate.corpus.words=[one,two,three]",
    "annotate.corpus.takes=6",
    "annotate.corpus.test_takes=2",
    "annotate.quality_sample=4",
    "compose.min_seconds=10",
    "train_tokenizer.steps=12",
    "train_tokenizer.hidden_size=64",
    "train_tokenizer.checkpoint_seconds=0",
    "tokenize.samples_per_shard=32",
    "train.steps=40",
    "train.batch_size=16",
    "train.checkpoint_seconds=0",
    "train.shape.hidden_size=64",
    "train.shape.num_layers=2",
    "generate.takes=1",
    "generate.batch_size=6",
    "evaluate.judge_steps=30",
    "report.samples=6",
)


def start(runs: Path, name: str, *overrides: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "audiollm.commands.cli",
        "run",
        str(RECIPE),
        "--runs",
        str(runs),
        "--name",
        name,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *SMALL, *overrides],
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
    finish(start(folder, "whole"))
    return folder


def test_it_ends_with_a_report_and_a_summary(runs: Path) -> None:
    figures = read_json(runs / "whole" / "summary.json")
    wanted = {"real_accuracy", "generated_accuracy", "tokenizer", "train", "seconds", "peak_memory_mb"}
    assert wanted <= set(figures)
    assert figures["n_generated"] == 18 and figures["failed"] is None
    assert 0 <= figures["generated_accuracy"] <= 1 and figures["real_accuracy"] > 0.5
    page = (runs / "whole" / "report.html").read_text()
    assert page.count("<audio") > 6


def test_a_second_run_does_nothing(runs: Path) -> None:
    output = finish(start(runs, "whole"))
    assert output.count("done before") == len(STAGES)


def test_too_little_audio_ends_with_code_2_and_a_report(tmp_path: Path) -> None:
    process = start(tmp_path, "little", "compose.min_seconds=9999")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "9999" in output.replace(",", "")
    assert (tmp_path / "little" / "report.html").exists()
    assert (tmp_path / "little" / "annotate" / "set_aside.jsonl").exists()
    assert read_json(tmp_path / "little" / "summary.json")["failed"] is not None


@pytest.mark.slow
def test_killed_in_every_stage_it_ends_with_the_same_summary(runs: Path) -> None:
    killed = []
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
