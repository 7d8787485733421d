"""Where figures, alarms, answers and sounds are drawn for people: TensorBoard, Weights & Biases, MLflow, Trackio.

All write to this machine unless their own environment variables say otherwise. A resumed stage goes on with its run on
the board; a step that the board has already is not drawn twice. A board that fails is left out with a warning, and the
training goes on.
"""

from __future__ import annotations

import csv
import io
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from audiollm.errors import ConfigError, error_line
from audiollm.files.atomic import read_whole_lines, write_text
from audiollm.recipe.plug_ins import Catalog, documented, import_named
from audiollm.train.loop.task import Board

BOARD_METHODS = ("scalars", "text", "table", "audio", "close")
PROJECT = "audiollm"
CONFIG, METRICS = "config.yaml", "metrics.jsonl"
"""Files of a stage that boards with a place for files keep."""
PERFORMANCE, ALARMS = "performance.jsonl", "alarms.jsonl"
Say = Callable[[str], None]


def open_boards(
    report_to: Sequence[str], folder: Path, resume_step: int = 0, say: Say = lambda text: None
) -> list[Board]:
    """Open the boards of `report_to`: a name of `BOARDS`, or `package.module:Class`.

    Args:
        say: told of a board that fails, which is then left out.

    Raises:
        ConfigError: a board is not installed, or one of a user's own cannot be imported.
    """
    classes = {name: board_class(name) for name in report_to}
    boards: list[Board] = []
    for name, kind in classes.items():
        try:
            boards.append(_Guarded(kind(folder, resume_step), name, say))
        except ConfigError:
            raise
        except Exception as error:  # whatever a tracker makes of its disk or network
            say(f"the board {name} does not open and is left out: {error_line(error)}")
    return boards


def board_class(name: str) -> type[Board]:
    """The class of a board by its name, or at an import path.

    Raises:
        ConfigError: it cannot be imported, or lacks a method.
    """
    if name in BOARDS:
        return BOARDS[name]
    remedy = "give a class with the methods of `Board`: see docs/extending.md"
    own: type[Board] = import_named(name, remedy)
    missing = [method for method in BOARD_METHODS if not hasattr(own, method)]
    if missing:
        raise ConfigError(f"has no method {missing[0]}", name, remedy)
    return own


class TensorBoard:
    """Events below the stage's folder, each in its file at once: a kill would lose those that wait to be written."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step or None)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def text(self, step: int, key: str, text: str) -> None:
        self._writer.add_text(key, text, step)
        self._writer.flush()

    def table(self, step: int, key: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        lines = [headings, ["---"] * len(headings), *rows]
        self._writer.add_text(key, "\n".join(map(_markdown_row, lines)), step)
        self._writer.flush()

    def audio(self, step: int, key: str, samples_1N: Tensor, sample_rate: int) -> None:
        self._writer.add_audio(key, samples_1N, step, sample_rate=sample_rate)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, kept on this machine unless WANDB_MODE says `online`.

    Its id is kept in `wandb_id`: a resumed stage goes on with its run, one that begins afresh has a new one. A kill
    loses what W&B had not written yet: a run on this machine is then written anew from the stage's own files, and what
    there was before is renamed, so that `wandb sync` sends each point once.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        wandb = _imported("wandb", "wandb", folder)
        id_path, mode = folder / "wandb_id", os.environ.get("WANDB_MODE", "offline")
        if not id_path.exists():
            write_text(id_path, secrets.token_hex(8))
        run_id = id_path.read_text()
        earlier = sorted((folder / "wandb").glob(f"offline-run-*-{run_id}"))
        for path in earlier:
            path.rename(path.with_name(f"replaced-{path.name}"))
        self._run = wandb.init(
            project=PROJECT, name=_run_name(folder), id=run_id, dir=str(folder), resume="allow", mode=mode,
            config=_settings(folder),
        )  # fmt: skip
        if earlier:
            for step, values in _recorded_points(folder, resume_step):
                self.scalars(step, values)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def text(self, step: int, key: str, text: str) -> None:
        self._run.alert(title=key, text=text)

    def table(self, step: int, key: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        import wandb

        shown = wandb.Table(columns=list(headings), data=[list(row) for row in rows])
        self._run.log({key: shown}, step=step)

    def audio(self, step: int, key: str, samples_1N: Tensor, sample_rate: int) -> None:
        import wandb

        self._run.log({key: wandb.Audio(samples_1N[0].numpy(), sample_rate=sample_rate)}, step=step)

    def close(self) -> None:
        self._run.finish()


def _recorded_points(folder: Path, before: int) -> list[tuple[int, dict[str, float]]]:
    """The figures of the steps before one, by the names that boards have for them."""
    points: dict[int, dict[str, float]] = {}
    for name, prefix in (("metrics.jsonl", ""), ("performance.jsonl", "performance/")):
        path = folder / name
        for row in read_whole_lines(path, {"step": int}).rows if path.exists() else ():
            step = row.pop("step")
            if step < before:
                points.setdefault(step, {}).update({f"{prefix}{key}": value for key, value in row.items()})
    return sorted(points.items())


class MLflow:
    """A run of MLflow, in `mlflow.db` and `mlruns` beside the runs unless MLFLOW_TRACKING_URI names a place."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        client = _imported("mlflow", "mlflow", folder).MlflowClient
        runs = folder.parent.parent.resolve()
        place = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = client(tracking_uri=place or f"sqlite:///{runs / 'mlflow.db'}")
        id_path = folder / "mlflow_run"
        if not id_path.exists():
            known = self._client.get_experiment_by_name(PROJECT)
            files = None if place else (runs / "mlruns").as_uri()
            experiment = (
                known.experiment_id
                if known
                else self._client.create_experiment(PROJECT, artifact_location=files)
            )
            run = self._client.create_run(experiment, run_name=_run_name(folder))
            write_text(id_path, run.info.run_id)
            for key, value in _settings(folder).items():
                self._client.log_param(run.info.run_id, key, value)
        self._run = id_path.read_text()
        self._client.update_run(self._run, status="RUNNING")
        self._folder, self._last_steps = folder, dict[str, int]()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            if step > self._last_step(key):
                self._client.log_metric(self._run, key, value, step=step)
                self._last_steps[key] = step

    def _last_step(self, key: str) -> int:
        """The last step of a figure that the run has already."""
        if key not in self._last_steps:
            history = self._client.get_metric_history(self._run, key)
            self._last_steps[key] = max((point.step for point in history), default=-1)
        return self._last_steps[key]

    def text(self, step: int, key: str, text: str) -> None:
        self._client.log_text(self._run, text, f"{key}/step-{step}.txt")

    def table(self, step: int, key: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        written = io.StringIO()
        csv.writer(written).writerows([headings, *rows])
        self._client.log_text(self._run, written.getvalue(), f"{key}/step-{step}.csv")

    def audio(self, step: int, key: str, samples_1N: Tensor, sample_rate: int) -> None:
        from audiollm.audio import save

        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / f"step-{step}.wav"
            save(path, samples_1N, sample_rate)
            self._client.log_artifact(self._run, str(path), key)

    def close(self) -> None:
        for name in (CONFIG, METRICS):
            if (self._folder / name).exists():
                self._client.log_artifact(self._run, str(self._folder / name))
        self._client.set_terminated(self._run)


class Trackio:
    """A run of Trackio, in its folder of this machine (TRACKIO_DIR).

    It sends behind the training: what a killed one had not sent yet is drawn again from the stage's files.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        self._library = _imported("trackio", "trackio", folder)
        id_path = folder / "trackio_run"
        if not id_path.exists():
            write_text(id_path, f"{_run_name(folder)}-{secrets.token_hex(4)}")
        name = id_path.read_text()
        self._last_steps = _trackio_steps(name)
        self._run = self._library.init(
            project=PROJECT, name=name, config=_settings(folder), resume="allow", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        for name, prefix in ((METRICS, ""), (PERFORMANCE, "performance/")):
            for row in _rows(folder / name, resume_step):
                step = row.pop("step")
                self.scalars(step, {f"{prefix}{key}": value for key, value in row.items()})
        for row in _rows(folder / ALARMS, resume_step):
            self.text(row["step"], f"alarm/{row['kind']}", row["text"])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        new = {key: value for key, value in values.items() if step > self._last_steps.get(key, -1)}
        if new:
            self._run.log(new, step=step)

    def text(self, step: int, key: str, text: str) -> None:
        self._show(step, key, self._library.Markdown(text))

    def table(self, step: int, key: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._show(step, key, self._library.Table(columns=list(headings), data=[list(row) for row in rows]))

    def audio(self, step: int, key: str, samples_1N: Tensor, sample_rate: int) -> None:
        samples_N = samples_1N[0].clamp(-1, 1).mul(32767).short().numpy()
        self._show(step, key, self._library.Audio(samples_N, sample_rate=sample_rate, format="wav"))

    def _show(self, step: int, key: str, value: Any) -> None:
        if step > self._last_steps.get(key, -1):
            self._run.log({key: value}, step=step)

    def close(self) -> None:
        self._run.finish()


def _trackio_steps(name: str) -> dict[str, int]:
    """The last step of each figure that a run has already."""
    from trackio.sqlite_storage import SQLiteStorage

    last_steps: dict[str, int] = {}
    if name in SQLiteStorage.get_runs(PROJECT):
        for row in SQLiteStorage.get_logs(PROJECT, name):
            last_steps |= {key: max(last_steps.get(key, -1), row.get("step") or 0) for key in row}
    return last_steps


def _rows(path: Path, resume_step: int) -> list[dict[str, Any]]:
    """The rows of the steps before `resume_step`, of an earlier attempt."""
    rows = read_whole_lines(path, {"step": int}).rows if path.exists() and resume_step else []
    return [dict(row) for row in rows if row["step"] < resume_step]


class _Guarded:
    """A board whose failures are told once, and end it; the training goes on."""

    def __init__(self, board: Board, name: str, say: Say) -> None:
        self.board, self._name, self._say = board, name, say
        self._failed = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.board, name)
        if not callable(method):
            return method

        @wraps(method)
        def call(*arguments: Any) -> Any:
            if self._failed:
                return None
            try:
                return method(*arguments)
            except Exception as error:  # whatever a tracker makes of its disk or network
                self._failed = True
                self._say(f"the board {self._name} fails and is left out: {error_line(error)}")
                return None

        return call


def _imported(module: str, package: str, folder: Path) -> Any:
    """Import a board's library. Raises: ConfigError: it is not installed."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        problem = f"report_to names {module}, which is not installed"
        raise ConfigError(problem, str(folder), f"pip install {package}") from None


def _run_name(folder: Path) -> str:
    return f"{folder.parent.name}-{folder.name}"


def _settings(folder: Path) -> dict[str, str]:
    """The settings of the stage, one by one (`lora.rank`)."""
    path = folder / CONFIG
    if not path.exists():
        return {}
    flat: dict[str, str] = {}

    def add(value: Any, name: str) -> None:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                add(inner, f"{name}.{key}" if name else str(key))
        else:
            flat[name] = str(value)[:500]

    add(yaml.safe_load(path.read_text(encoding="utf-8")), "")
    return flat


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(' '.join(cell.replace('|', chr(92) + '|').split()) for cell in cells)} |"


BOARDS: Mapping[str, type[Board]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""Boards by the name that `report_to` gives them."""


def board_catalog() -> Catalog:
    """Boards of `report_to`."""
    return Catalog(documented(BOARDS), "Your own: `package.module:Class` with the methods of `Board`.")
