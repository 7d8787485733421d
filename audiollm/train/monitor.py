"""Training figures and alarms as JSON lines (for programs) and TensorBoard events (for people)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from audiollm.files import read_jsonl, write_jsonl


class Monitor:
    """Writes `metrics.jsonl`, `alarms.jsonl` (once there is an alarm) and TensorBoard events into a folder.

    Args:
        folder: the stage's folder.
        resume_step: rows of an earlier attempt at or beyond this step are dropped, so a resumed run's
            files equal an uninterrupted one's.
    """

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        path = folder / "metrics.jsonl"
        _rows_before(path, resume_step)
        self._file = path.open("a", encoding="utf-8")
        self._alarms_path = folder / "alarms.jsonl"
        self._alarms = _rows_before(self._alarms_path, resume_step)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step or None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        rounded = {key: float(f"{value:.6g}") for key, value in values.items()}
        self._file.write(json.dumps({"step": step, **rounded}) + "\n")
        self._file.flush()
        for key, value in values.items():
            self._board.add_scalar(key, value, step)

    def alarm(self, step: int, kind: str, text: str) -> bool:
        """Record an alarm; False where one of this kind is on record."""
        if any(row["kind"] == kind for row in self._alarms):
            return False
        self._alarms.append({"step": step, "kind": kind, "text": text})
        write_jsonl(self._alarms_path, self._alarms)
        self._board.add_text(f"alarm/{kind}", text, step)
        return True

    def close(self) -> None:
        self._file.close()
        self._board.close()


def _rows_before(path: Path, step: int) -> list[dict[str, Any]]:
    """The rows of the steps before `step`; the others leave the file."""
    if not path.exists():
        return []
    rows = [row for row in _whole_rows(path) if row["step"] < step]
    write_jsonl(path, rows)
    return rows


def _whole_rows(path: Path) -> list[dict[str, Any]]:
    try:
        return read_jsonl(path)
    except json.JSONDecodeError:  # the last line was cut short by a kill
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines[:-1]]
