"""Rows of the walks, written as they come and read in the order of the input: no run holds all rows at once."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Spool:
    """Rows of files and of their parts, in one SQLite file that lives as long as the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        for stale in (path, path.with_name(f"{path.name}-journal")):
            stale.unlink(missing_ok=True)
        self._database = sqlite3.connect(path, isolation_level=None)
        # the next run makes the spool anew: nothing needs to survive this run
        self._database.execute("pragma journal_mode = off")
        self._database.execute("pragma synchronous = off")
        self._database.execute("create table files (file integer primary key, row text)")
        self._database.execute(
            "create table parts (file integer, number integer, row text, primary key (file, number)) without rowid"
        )
        self._database.execute("begin")  # one transaction: a write for each row takes longer than the row

    def put_file(self, file: int, row: Row) -> None:
        self._put("files", (file,), row)

    def put_part(self, file: int, number: int, row: Row) -> None:
        self._put("parts", (file, number), row)

    def read_part(self, file: int, number: int) -> Row:
        query = "select row from parts where file = ? and number = ?"
        row: Row = json.loads(self._database.execute(query, (file, number)).fetchone()[0])
        return row

    def files(self) -> Iterator[Row]:
        """Yield the files in the order of the input."""
        for (text,) in self._database.execute("select row from files order by file"):
            yield json.loads(text)

    def parts(self) -> Iterator[tuple[int, int, Row]]:
        """Yield (file, number in it, row), in order."""
        for file, number, text in self._database.execute("select * from parts order by file, number"):
            yield file, number, json.loads(text)

    def close(self) -> None:
        self._database.execute("commit")
        self._database.close()
        self._path.unlink(missing_ok=True)

    def _put(self, table: str, key: tuple[int, ...], row: Row) -> None:
        marks = ", ".join("?" * (len(key) + 1))
        self._database.execute(
            f"insert or replace into {table} values ({marks})", (*key, json.dumps(row, ensure_ascii=False))
        )
