"""`set_aside.jsonl`: what could not be used and why, in the one form that every stage and command writes.

A row: `place` (the file, and the line, the member or the byte in it), `id` (of the sample or segment, as far as it is
known), `stage` (who could not use it), `kind` (the few words that are counted by) and `reason` (for a person).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from audiollm.errors import BadSample
from audiollm.files.atomic import read_whole_lines, write_jsonl

Row = dict[str, Any]
UNREADABLE = "cannot be read"
"""The kind of a recording that cannot be decoded, whoever meets it."""
NAME_IS_NOT_UTF8 = "its name is not valid UTF-8: rename it"
"""The reason why a file is set aside whose name JSON cannot hold."""
TEXTS = ("place", "id", "stage", "kind", "reason")


def set_aside_row(
    stage: str, place: str, kind: str, reason: str = "", id: str = "", **figures: float | None
) -> Row:
    """A row of the file.

    Args:
        stage: the stage or command that could not use it.
        reason: by default the kind itself.
        figures: numbers that a program may want beside: a span in seconds, a value and its threshold.
    """
    return {"place": place, "id": id, "stage": stage, "kind": kind, "reason": reason or kind, **figures}


def row_of(bad: BadSample, stage: str) -> Row:
    """The row of a bad sample."""
    return set_aside_row(stage, bad.place, bad.kind, bad.reason, bad.id)


def read_set_aside(path: Path) -> list[Row]:
    """The rows of a file, none where there is no file; a last line that a kill cut short is left out."""
    rows = []
    for row in read_whole_lines(path).rows if path.exists() else ():
        if all(isinstance(row.get(key), str) for key in TEXTS):
            rows.append(row)
    return rows


class SetAside:
    """Writes the file line by line, so that a kill loses none, and each bad sample once.

    Args:
        path: the file; it comes into being with the first row.
        stage: whose rows are added.
        rows: what the file begins with, in place of what is in it: those of an earlier attempt that still hold.
        strict: raise at the first one that is added.
    """

    def __init__(self, path: Path, stage: str, rows: Iterable[Row] = (), strict: bool = False) -> None:
        self._path, self._stage, self._strict = path, stage, strict
        self.rows: list[Row] = []
        self.counts: Counter[str] = Counter()
        """Rows by kind."""
        self._keys: set[tuple[str, str, str]] = set()
        for row in rows:
            self._keep(row)
        if self.rows or path.exists():
            write_jsonl(path, self.rows)

    def add(self, bad: Iterable[BadSample]) -> None:
        """Write down those that are not there yet.

        Raises:
            BadSample: the first one, where `strict` is set; it is written down all the same.
        """
        for sample in bad:
            row = row_of(sample, self._stage)
            if self._keep(row):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
            if self._strict:
                raise sample

    def remedy(self) -> str:
        """Where to look when nothing can be used, with the reason of the first row."""
        if not self.rows:
            return f"see {self._path}"
        return f"see {self._path}; its first row, {self.rows[0]['place']}: {self.rows[0]['reason']}"

    def _keep(self, row: Row) -> bool:
        key = (row["place"], row["id"], row["kind"])
        if key in self._keys:
            return False
        self._keys.add(key)
        self.rows.append(row)
        self.counts[row["kind"]] += 1
        return True
