"""Rows of measurements, keyed by their inputs and appended to a JSONL file, so that none is computed twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from audiollm.files.atomic import read_whole_lines, write_jsonl

Row = dict[str, Any]


class RowStore:
    """Finished rows of a folder; an interrupted run resumes from them.

    Args:
        path: the file; a last line that was cut short is dropped. None: nothing is kept.
        read_only_paths: files of the same form, which are only read: those of other stages, or of other ranks.
    """

    def __init__(self, path: Path | None, read_only_paths: Iterable[Path] = ()) -> None:
        self.path = path
        self._rows: dict[str, Row] = {}
        self._read_only_rows: dict[str, Row] = {}
        for read_only_path in read_only_paths:
            self._read_only_rows |= {
                row["key"]: row for row in read_whole_lines(read_only_path, {"key": str}).rows
            }
        if path is not None and path.exists():
            self._rows = {row["key"]: row for row in read_whole_lines(path, {"key": str}).rows}
            write_jsonl(path, self._rows.values())

    def get(self, *depends_on: Any) -> Row | None:
        """The finished row with exactly these inputs (plain data); None if there is none."""
        key = key_of(*depends_on)
        return (self._rows.get(key) if self.path else None) or self._read_only_rows.get(key)

    def add(self, row: Row, *depends_on: Any) -> None:
        """Store a row under its inputs."""
        if self.path is None:
            return
        key = key_of(*depends_on)
        self._rows[key] = row = {"key": key, **row}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def key_of(*depends_on: Any) -> str:
    """SHA-256 of the inputs of a row."""
    return hashlib.sha256(json.dumps(list(depends_on)).encode()).hexdigest()
