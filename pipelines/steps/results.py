"""Results of a run: counts that add up, the fate of every file, and rows in files that are whole or absent.

Rows of the walks are written as they come and read in the order of the input: no run holds all rows at once.
Beside them are facts for the report: the rules, those not applied, and the cost of every step.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel

from audiollm.files.atomic import atomic_path, read_jsonl, write_json, write_jsonl
from audiollm.files.set_aside import UNREADABLE, set_aside_row
from pipelines.execution.engine import Call, Outcome
from pipelines.steps.chain import Missing
from pipelines.steps.rules import Rule

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


FAILED = "failed"
"""Kind of a drop that an error caused."""

Place = tuple[int, int]
"""Identity of a part: (number of its file, number in the file)."""


@dataclass
class PartTally:
    """Counts over all parts, in one pass."""

    parts_found: int = 0
    parts_kept: int = 0
    seconds_found: float = 0.0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    dropped: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Number of dropped parts by (step, rule, kind)."""
    dropped_s: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    kept_of: Counter[int] = field(default_factory=Counter)
    kept_s_of: Counter[int] = field(default_factory=Counter)
    found_of: Counter[int] = field(default_factory=Counter)
    reasons_of: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    errors: Counter[str] = field(default_factory=Counter)
    """Number of failed measurements of kept parts, by step."""

    def add(self, file: int, row: Row, drop: Mapping[str, Any] | None) -> None:
        """Count a part of a file."""
        self.parts_found += 1
        self.found_of[file] += 1
        self.seconds_found += row["duration_s"]
        if drop is not None:
            key = (drop["step"], drop["rule"], drop["kind"])
            self.dropped[key] += 1
            self.dropped_s[key] += row["duration_s"]
            self.reasons[drop["kind"]] += 1
            self.reasons_of[file][drop["kind"]] += 1
            return
        self.parts_kept += 1
        self.kept_of[file] += 1
        self.seconds += row["duration_s"]
        self.kept_s_of[file] += row["duration_s"]
        self.errors.update(row.get("errors", {}))

    def stages(self, rules: Sequence[Rule], thresholds: BaseModel) -> list[Row]:
        """Count the parts and seconds before and after each rule that dropped any, in the order in which the rules are
        applied."""
        order = {rule.threshold: index for index, rule in enumerate(rules)}
        ordered_keys = sorted(self.dropped, key=lambda key: (order.get(key[1], len(order)), key))
        remaining, remaining_s, rows = self.parts_found, self.seconds_found, []
        for step, rule, kind in ordered_keys:
            count, seconds = self.dropped[step, rule, kind], self.dropped_s[step, rule, kind]
            rows.append(
                {
                    "step": step,
                    "rule": rule,
                    "title": kind,
                    "threshold": getattr(thresholds, rule, None) if rule else None,
                    "segments_in": remaining,
                    "segments_out": remaining - count,
                    "seconds_in": round(remaining_s, 3),
                    "seconds_out": round(remaining_s - seconds, 3),
                }
            )
            remaining, remaining_s = remaining - count, remaining_s - seconds
        return rows


@dataclass(frozen=True)
class FileFates:
    """Says how each file ended: kept, filtered or failed.

    Args:
        stage: its name in `set_aside.jsonl`.
        nothing_found: the reason of a file without parts.
        filtered_kinds: kinds of rejected files that count as filtered.
    """

    stage: str
    nothing_found: str
    filtered_kinds: Collection[str] = ()

    def rows(
        self, spool: Spool, rejected: Sequence[Row], tally: PartTally
    ) -> Iterator[tuple[Row, Row | None]]:
        """Yield the summary row of every file, and its row of `set_aside.jsonl` where it is set aside as a whole.

        Args:
            rejected: rows of `set_aside.jsonl` of files that no walk began with.
        """
        for number, file in enumerate(spool.files()):
            row: Row = {
                **{name: file[name] for name in ("name", "path", "digest")},
                "segments": tally.found_of[number],
                "kept": tally.kept_of[number],
                "duration_s": file["duration_s"],
                "kept_s": round(tally.kept_s_of[number], 3),
            }
            aside_row: Row | None = None
            if failed := file.get("failed"):
                status, reason = "failed", failed["reason"]
                aside_row = set_aside_row(
                    self.stage, file["path"], failed["kind"], reason, step=failed["step"]
                )
            elif filtered := file.get("filtered"):
                status, reason = "filtered", filtered["reason"]
                aside_row = set_aside_row(self.stage, file["path"], filtered["kind"], reason)
            elif repeats := file.get("repeats"):
                status, reason = "filtered", f"the same as {repeats}"
                aside_row = set_aside_row(self.stage, file["path"], "duplicate", reason)
            elif not row["segments"]:
                status, reason = "filtered", self._explain_nothing(file.get("length"))
                aside_row = set_aside_row(self.stage, file["path"], self.nothing_found, reason)
            elif not row["kept"]:
                reasons = tally.reasons_of[number]
                status = "failed" if set(reasons) <= {FAILED, UNREADABLE} else "filtered"
                reason = ", ".join(f"{count} {kind}" for kind, count in reasons.most_common())
            else:
                status, reason = "kept", ""
            facts = {"form": file.get("form"), "length": file.get("length")}
            yield {**row, "status": status, "reason": reason, **facts}, aside_row
        for rejection in rejected:
            yield (
                {
                    "name": Path(rejection["place"]).name,
                    "path": rejection["place"],
                    "digest": None,
                    "segments": 0,
                    "kept": 0,
                    "duration_s": None,
                    "kept_s": 0.0,
                    "status": "filtered" if rejection["kind"] in self.filtered_kinds else "failed",
                    "reason": rejection["reason"],
                    "form": None,
                    "length": None,
                },
                None,
            )

    def _explain_nothing(self, length: str | None) -> str:
        """Say why a file has no parts: also that not all of it could be decoded."""
        return f"{self.nothing_found} in what could be decoded: {length}" if length else self.nothing_found


def funnel_counts(
    num_accepted: int,
    num_others: int,
    files: Sequence[Row],
    set_aside: Sequence[Row],
    tally: PartTally,
    rules: Sequence[Rule],
    thresholds: BaseModel,
) -> Row:
    """Counts of `funnel.json` that every pipeline has.

    Args:
        num_accepted: files of the input that the pipeline takes.
        num_others: files that it does not take.
        files: rows of `FileFates.rows`.
        set_aside: rows of whole files.
    """
    status = Counter(row["status"] for row in files)
    file_reasons = Counter(row["kind"] for row in set_aside)
    reasons = tally.reasons + file_reasons
    return {
        "files_seen": num_accepted + num_others,
        "not_audio": num_others,
        "audio_files": num_accepted,
        "files_kept": status["kept"],
        "files_filtered": status["filtered"],
        "files_failed": status["failed"],
        "files_not_whole": sum(row["length"] is not None for row in files),
        "segments_found": tally.parts_found,
        "segments": tally.parts_kept,
        "seconds_seen": round(sum(row["duration_s"] or 0.0 for row in files), 3),
        "seconds_found": round(tally.seconds_found, 3),
        "seconds": round(tally.seconds, 3),
        "reasons": dict(sorted(reasons.items())),
        "file_reasons": dict(sorted(file_reasons.items())),
        "stages": tally.stages(rules, thresholds),
        "errors": dict(sorted(tally.errors.items())),
    }


def set_aside_sentence(funnel: Mapping[str, Any], part: str) -> str:
    """Say what was set aside, parts apart from whole files; empty: nothing.

    Args:
        funnel: as `funnel_counts` gives it.
        part: what a part is called, in the singular.
    """
    of_files = Counter(funnel["file_reasons"])
    of_parts = Counter(funnel["reasons"]) - of_files
    listed = [
        f"{count} {noun}{'s' * (count != 1)} ({kind})"
        for noun, counts in ((part, of_parts), ("file", of_files))
        for kind, count in counts.items()
    ]
    return f"; set aside: {', '.join(listed)}" if listed else ""


def not_whole_sentence(count: int) -> str:
    """Say on the console that files differ in length from their headers."""
    return f"files whose length is not what their headers promise: {count} (files.jsonl says which, under length)"


def part_ids(places: Sequence[Place], names: Mapping[int, str]) -> dict[Place, str]:
    """Unique names of letters, digits, `_` and `-` for all parts of the files with these names.

    A file with several parts numbers them; where two files would get the same name, each carries a hash of its own.
    """
    counts = Counter(file for file, _ in places)
    stems = {file: _safe_name(names[file]) for file in counts}
    numbered = {(file, number): f"{stems[file]}--{number:05d}" for file, number in places if counts[file] > 1}
    name_counts = Counter(name.casefold() for name in (*stems.values(), *numbered.values()))
    ids = {}
    for file, number in places:
        stem = stems[file]
        if name_counts[stem.casefold()] > 1 or len(stem) > 100:
            stem = f"{stem[:100]}-{sha256(names[file].encode()).hexdigest()[:10]}"
        ids[file, number] = f"{stem}--{number:05d}" if counts[file] > 1 else stem
    return ids


def kind_and_reason(error: str) -> tuple[str, str]:
    """Split an outcome's error into the kind that it is counted by, and its reason."""
    prefix = f"{UNREADABLE}: "
    return (UNREADABLE, error.removeprefix(prefix)) if error.startswith(prefix) else (FAILED, error)


def dropped_part_row(stage: str, row: Row, drop: Mapping[str, Any]) -> Row:
    """Return the row of `set_aside.jsonl` of a dropped part."""
    where = f"from {row['start_s']:.2f} to {row['end_s']:.2f} s"
    reason = f"{drop['reason']}; {where}" if drop["reason"] else where
    figures = {"start_s": row["start_s"], "end_s": row["end_s"]}
    details = {
        name: drop[name] for name in ("step", "rule", "value", "threshold") if drop[name] not in (None, "")
    }
    return set_aside_row(stage, row["path"], drop["kind"], reason, row["id"], **figures, **details)


def merge_set_aside(folder: Path, parts: Path, file_rows: Sequence[Row]) -> None:
    """Write `set_aside.jsonl` by place.

    Args:
        parts: file of the rows of parts, which is removed.
        file_rows: rows of whole files.
    """
    rows = [*file_rows, *read_jsonl(parts)]
    rows.sort(key=lambda row: (row["place"], row.get("start_s", 0.0)))
    write_jsonl(folder / "set_aside.jsonl", rows)
    parts.unlink()


@contextmanager
def open_lines(path: Path) -> Iterator[IO[str]]:
    """Open a file that appears under its name only when it is complete."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        yield file


def put_line(file: IO[str], row: Mapping[str, Any]) -> None:
    """Write a row as a line of JSON."""
    file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _safe_name(file: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", re.sub(r"\.[^./]*$", "", file)).strip("-") or "recording"


@dataclass
class StepCosts:
    """Seconds of CPU by step: this run's and, for what the ledger knew, those of the run that did it."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    audio_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_cached: int = 0

    def add(self, call: Call, outcome: Outcome, is_cached: bool) -> None:
        self.seconds[call.step] += outcome.seconds
        self.calls[call.step] += 1
        self.audio_s[call.step] += call.size
        self.num_cached += is_cached


def write_rules(
    folder: Path, rules: Sequence[Rule], requested: BaseModel, applied: BaseModel, lacking: Sequence[Missing]
) -> None:
    """Write `rules.json` and `not_applied.json`.

    Args:
        requested, applied: thresholds by name; some of those asked for may not be applied.
    """
    limits, requested_limits = applied.model_dump(), requested.model_dump()
    rows = [rule.as_row(limits[rule.threshold]) for rule in rules if limits[rule.threshold] is not None]
    write_json(folder / "rules.json", rows)
    skipped = [
        {
            "threshold": rule.threshold,
            "value": requested_limits[rule.threshold],
            "scorer": missing.step,
            "reason": missing.reason,
        }
        for missing in lacking
        for rule in missing.rules
    ]
    write_json(folder / "not_applied.json", skipped)


def write_timings(folder: Path, costs: StepCosts, heard_by: str, run: dict[str, Any]) -> None:
    """Write `timings.json`.

    Args:
        heard_by: the step that hears all of the audio.
        run: wall-clock seconds, workers, engine.
    """
    steps = {
        name: {
            "seconds": round(costs.seconds[name], 3),
            "calls": count,
            "audio_s": round(costs.audio_s[name], 3),
        }
        for name, count in costs.calls.items()
    }
    heard_s = round(costs.audio_s.get(heard_by, 0.0), 3)
    write_json(
        folder / "timings.json", {"steps": steps, "audio_s": heard_s, "known": costs.num_cached, **run}
    )
