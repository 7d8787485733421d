"""Boards: each point once although a run is killed and resumed, and no training ends because a board fails."""

from __future__ import annotations

import importlib.util
import json
import struct
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

KILLS = 10
STEPS = 3 * KILLS + 6
MLFLOW, TRACKIO = (importlib.util.find_spec(name) is not None for name in ("sqlalchemy", "trackio"))
WANDB = importlib.util.find_spec("wandb") is not None
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
    """A training that is killed ten times, and each time goes on from two steps before."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("train: {learning_rate: 0.002, lora: {rank: 16}}\n")
    begin = 0
    for end in (*range(4, 4 + 3 * KILLS, 3), STEPS):
        command = [sys.executable, "-c", TRAINING, str(folder), str(begin), str(end), board, str(STEPS)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == (0 if end == STEPS else 9), result.stderr
        assert "is left out" not in result.stdout, result.stdout
        begin = end - 2


def tensorboard_steps(folder: Path, key: str) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [point.step for point in events.Scalars(key)]


@pytest.mark.slow
def test_tensorboard_has_each_point_once(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine" / "train"
    run_with_kills(folder, "tensorboard")
    for key in ("loss", "performance/seconds_per_step"):
        assert tensorboard_steps(folder, key) == list(range(STEPS))


def test_tensorboard_has_a_point_before_the_next_one_is_made(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, 0, report_to=("tensorboard",), say=print)
    for step in range(3):
        monitor.write(step, {"loss": 1.0})
        assert tensorboard_steps(tmp_path, "loss") == list(range(step + 1))
    monitor.close()


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


def wandb_history(folder: Path) -> list[tuple[int, set[str]]]:
    """Steps and names of figures of the runs that `wandb sync` would send: records in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        content, place, record = path.read_bytes(), 7, b""
        while place + 7 <= len(content):
            if 32768 - place % 32768 < 7:
                place += 32768 - place % 32768
                continue
            _, length, kind = struct.unpack("<IHB", content[place : place + 7])
            record += content[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # whole, or the last part of one
                entry = wandb_internal_pb2.Record.FromString(record)
                if entry.HasField("history"):
                    names = {item.key or "/".join(item.nested_key) for item in entry.history.item}
                    rows.append((entry.history.step.num, names))
                record = b""
    return rows


@pytest.mark.slow
@pytest.mark.skipif(not WANDB, reason="W&B is not installed: pip install 'audiollm[trackers]'")
def test_wandb_has_each_point_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    folder = tmp_path / "runs" / "mine" / "train"
    run_with_kills(folder, "wandb")
    rows = wandb_history(folder)
    assert [step for step, _ in rows] == list(range(STEPS))
    assert all({"loss", "performance/seconds_per_step"} <= names for _, names in rows)


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
