"""Boards: each point once although a run is killed and resumed, and no training ends because a board fails."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from audiollm.errors import ConfigError
from audiollm.train.loop.boards import open_boards
from audiollm.train.loop.monitor import Monitor

STEPS = 12
MLFLOW, TRACKIO = (importlib.util.find_spec(name) is not None for name in ("sqlalchemy", "trackio"))
MLFLOW = MLFLOW and importlib.util.find_spec("mlflow") is not None
TRAINING = """
import os, sys
from pathlib import Path
from audiollm.train.loop.monitor import Monitor
folder, begin, end, board = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
monitor = Monitor(folder, begin, report_to=(board,), say=print)
for step in range(begin, end):
    monitor.write(step, {"loss": 1.0 / (1 + step)})
    monitor.performance(step, {"seconds_per_step": 0.5})
    if step == 4:
        monitor.alarm(step, "collapse", "few codes")
if end < int(sys.argv[5]):
    os._exit(9)  # killed: nothing is closed
monitor.close()
"""


def run_with_kills(folder: Path, board: str) -> None:
    """A training that is killed, and each time goes on from two steps before."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("train: {learning_rate: 0.002, lora: {rank: 16}}\n")
    begin = 0
    for end in (4, 7, 9, STEPS):
        command = [sys.executable, "-c", TRAINING, str(folder), str(begin), str(end), board, str(STEPS)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == (0 if end == STEPS else 9), result.stderr
        assert "is left out" not in result.stdout, result.stdout
        begin = end - 2


@pytest.mark.slow
@pytest.mark.skipif(not MLFLOW, reason="MLflow is not installed: pip install 'audiollm[trackers]'")
def test_mlflow_has_each_point_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "runs" / "mine" / "train"
    run_with_kills(folder, "mlflow")
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    run_id = (folder / "mlflow_run").read_text()
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "mine-train"
    assert run.data.params["train.lora.rank"] == "16"
    for key in ("loss", "performance/seconds_per_step"):
        assert [point.step for point in client.get_metric_history(run_id, key)] == list(range(STEPS))
    names = {file.path for file in client.list_artifacts(run_id)}
    assert {"metrics.jsonl", "config.yaml", "alarm"} <= names


@pytest.mark.slow
@pytest.mark.skipif(not TRACKIO, reason="Trackio is not installed: pip install 'audiollm[trackers]'")
def test_trackio_has_each_point_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    folder = tmp_path / "runs" / "mine" / "train"
    run_with_kills(folder, "trackio")
    program = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S;"
        "print(json.dumps(S.get_logs('audiollm', sys.argv[1])))"
    )
    command = [sys.executable, "-c", program, (folder / "trackio_run").read_text()]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for key in ("loss", "performance/seconds_per_step"):
        assert sorted(row["step"] for row in rows if key in row) == list(range(STEPS))
    assert [row["step"] for row in rows if "alarm/collapse" in row] == [4]


class Failing:
    """A board that opens, and fails at its second call."""

    calls = 0

    def __init__(self, folder: Path, resume_step: int) -> None:
        pass

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        type(self).calls += 1
        if self.calls == 2:
            raise OSError("no space left")

    def text(self, *rest: Any) -> None: ...

    table = audio = text

    def close(self) -> None: ...


class NotOpening(Failing):
    def __init__(self, folder: Path, resume_step: int) -> None:
        raise ConnectionError("no network")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("board_parts")
    module.Failing, module.NotOpening = Failing, NotOpening  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "board_parts", module)


def test_a_board_that_fails_is_left_out_and_the_training_goes_on(tmp_path: Path, parts: None) -> None:
    told: list[str] = []
    Failing.calls = 0
    report_to = ("board_parts:Failing", "board_parts:NotOpening", "tensorboard")
    monitor = Monitor(tmp_path, report_to=report_to, say=told.append)
    for step in range(4):
        monitor.write(step, {"loss": 1.0})
    monitor.close()
    assert Failing.calls == 2 and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert told == [
        "the board board_parts:NotOpening does not open and is left out: ConnectionError: no network",
        "the board board_parts:Failing fails and is left out: OSError: no space left",
    ]
    assert list((tmp_path / "tensorboard").glob("events*"))


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_a_board_that_is_not_installed_ends_the_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"report_to names {name}, which is not installed"):
        open_boards((name,), tmp_path)


@pytest.mark.skipif(not (MLFLOW and TRACKIO), reason="pip install 'audiollm[trackers]'")
def test_sounds_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    told: list[str] = []
    folder = tmp_path / "runs" / "mine" / "train"
    folder.mkdir(parents=True)
    for board in open_boards(("mlflow",), folder, say=told.append):
        board.audio(3, "voice", torch.zeros(1, 800), 16_000)
        board.table(3, "answers", ("id", "answer"), [("a", "one, two")])
        board.close()
    written = sorted(path.name for path in (tmp_path / "runs" / "mlruns").rglob("step-3.*"))
    assert written == ["step-3.csv", "step-3.wav"] and not told
