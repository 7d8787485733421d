"""Training figures as JSON lines (for programs) and TensorBoard events (for people)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from audiollm.files import read_jsonl, write_jsonl


class Monitor:
    """Writes `metrics.jsonl` and TensorBoard events into a folder.

    Args:
        folder: the stage's folder.
        resume_step: rows of an earlier attempt at or beyond this step are dropped, so a resumed run's
            file equals an uninterrupted one's.
    """

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        self._path = folder / "metrics.jsonl"
        if self._path.exists():
            write_jsonl(self._path, (row for row in _whole_rows(self._path) if row["step"] < resume_step))
        self._file = self._path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step or None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        rounded = {key: float(f"{value:.6g}") for key, value in values.items()}
        self._file.write(json.dumps({"step": step, **rounded}) + "\n")
        self._file.flush()
        for key, value in values.items():
            self._board.add_scalar(key, value, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()


def _whole_rows(path: Path) -> list[dict[str, float]]:
    try:
        return read_jsonl(path)
    except json.JSONDecodeError:  # the last line was cut short by a kill
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines[:-1]]
