"""The ledger of a run: the outcome of every call, by its key, in an SQLite file that survives a `kill -9`.

A transaction per outcome takes longer than many calls. The newest outcomes are therefore lines of JSON in a file beside
the database, which takes them over some hundreds at a time; the file is absent after an undisturbed run.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from audiollm.files.atomic import read_whole_lines

_TABLE = """
create table if not exists calls (
  key text primary key, step text not null, value text, error text, seconds real not null
) without rowid
"""
_OUTCOMES_PER_TRANSACTION = 256

DAMAGED_REMEDY = "the ledger is damaged: delete it, and its calls are done again"


@dataclass(frozen=True)
class Outcome:
    """Result of a call: either a `value` or an `error`."""

    value: dict[str, Any] | None = None
    error: str | None = None
    seconds: float = 0.0
    """CPU time that the call took when it was done."""
    halts: bool = False
    """Whether the error may pass: it is not recorded, and the run stops, to be continued later."""


class LedgerError(Exception):
    """A ledger that cannot be read or written; the message names the file and the remedy."""


class Ledger:
    """Outcomes by key. One process writes; no kill undoes an outcome once `put` has returned.

    Args:
        path: made with its folder where it is absent.

    Raises:
        LedgerError: the file is no ledger, or another run writes to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path, isolation_level=None, timeout=2.0)
        try:
            # exclusive: of two runs in one folder the second is refused, and no shared memory file is needed
            self._database.execute("pragma locking_mode = exclusive")
            self._database.execute("pragma journal_mode = wal")
            self._database.execute("pragma synchronous = normal")
            self._database.execute(_TABLE)
            # takes the lock now and not with the first outcome
            self._database.execute("delete from calls where key is null")
            self._recent: dict[str, dict[str, Any]] = {}
            self._recent_path = path.with_name(f"{path.name}-recent")
            self._recover()
        except sqlite3.DatabaseError as error:
            self._database.close()
            remedy = (
                "another run works in this folder: wait for it or choose another folder"
                if "locked" in str(error)
                else DAMAGED_REMEDY
            )
            raise LedgerError(f"{path}: {error}; {remedy}") from None

    def get(self, key: str) -> Outcome | None:
        """Return the recorded outcome of a call; None: not recorded.

        Raises:
            LedgerError: the file is damaged.
        """
        query = "select value, error, seconds from calls where key = ?"
        try:
            if (recent := self._recent.get(key)) is not None:
                value, error, seconds = recent["value"], recent["error"], recent["seconds"]
            else:
                row = self._database.execute(query, (key,)).fetchone()
                if row is None:
                    return None
                value, error, seconds = row
            return Outcome(None if value is None else json.loads(value), error, seconds)
        except (sqlite3.DatabaseError, ValueError) as error:
            raise LedgerError(f"{self._path}: {error}; {DAMAGED_REMEDY}") from None

    def put(self, key: str, step: str, outcome: Outcome) -> None:
        """Store an outcome.

        Raises:
            LedgerError: the disk is full or fails.
        """
        row = {
            "key": key,
            "step": step,
            "value": None if outcome.value is None else json.dumps(outcome.value, ensure_ascii=False),
            "error": outcome.error,
            "seconds": outcome.seconds,
        }
        line = json.dumps(row).encode() + b"\n"
        try:
            if self._recent_file.write(line) < len(line):
                raise OSError(f"{self._recent_path} cannot grow")
            self._recent[key] = row
            if len(self._recent) >= _OUTCOMES_PER_TRANSACTION:
                self._commit()
        except (sqlite3.DatabaseError, OSError) as error:
            raise LedgerError(f"{self._path}: {error}") from None

    def learn(self, source: Ledger) -> int:
        """Copy the outcomes that only another ledger has, but no failures; return their number."""
        try:
            self._commit()
            source._commit()
            before = self._database.total_changes
            rows = source._database.execute("select * from calls where error is null")
            self._database.execute("begin")
            self._database.executemany("insert or ignore into calls values (?, ?, ?, ?, ?)", rows)
            self._database.execute("commit")
        except sqlite3.DatabaseError as error:
            raise LedgerError(f"{self._path}, learning from {source._path}: {error}") from None
        return self._database.total_changes - before

    def forget_errors(self) -> int:
        """Delete failed calls, so that they are tried again; return their number."""
        try:
            self._commit()
            return self._database.execute("delete from calls where error is not null").rowcount
        except sqlite3.DatabaseError as error:
            raise LedgerError(f"{self._path}: {error}; {DAMAGED_REMEDY}") from None

    def close(self) -> None:
        """
        Raises:
            LedgerError: the disk is full or fails; the next run finds the newest outcomes beside the database.
        """
        try:
            self._commit()
            self._recent_path.unlink(missing_ok=True)
        except (sqlite3.DatabaseError, OSError) as error:
            raise LedgerError(f"{self._path}: {error}") from None
        finally:
            self._recent_file.close()
            self._database.close()

    def _commit(self) -> None:
        if self._recent:
            self._insert(self._recent.values())
            self._recent = {}
            self._recent_file.truncate(0)

    def _recover(self) -> None:
        """Take over the outcomes that a killed run left beside the database; a last line that is cut is ignored."""
        self._recent_file = self._recent_path.open("ab", buffering=0)
        self._insert(read_whole_lines(self._recent_path, {"key": str, "step": str}).rows)
        self._recent_file.truncate(0)

    def _insert(self, rows: Iterable[dict[str, Any]]) -> None:
        insert = "insert or replace into calls values (:key, :step, :value, :error, :seconds)"
        self._database.execute("begin")
        self._database.executemany(insert, rows)
        self._database.execute("commit")

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
