"""The state of a run, read from what its stages write: which one is at work, how far it is, and what went wrong."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from audiollm.files.atomic import DamagedFile, read_json, read_whole_lines

StageProgress = Literal["running", "done", "failed", "interrupted"]
SILENT_S = 30.0
"""Seconds after which a stage that has not written its record counts as interrupted: it writes it every five."""


class StageAlarm(NamedTuple):
    """A warning of a training for a person."""

    step: int
    kind: str
    text: str


@dataclass(frozen=True)
class StageStatus:
    """A stage of a run."""

    name: str
    state: StageProgress
    seconds: float
    """Wall time of all its attempts."""
    error: str = ""
    step: int | None = None
    """Steps that are done; None: it counts none."""
    steps: int | None = None
    """Steps of the whole stage; None: not known before its end."""
    remaining_s: float | None = None
    """Seconds to its end at the present rate; None: not known."""
    alarms: tuple[StageAlarm, ...] = ()


def stage_statuses(folder: Path, now_s: float | None = None) -> list[StageStatus]:
    """The stages of a run that have begun, in the order in which they did.

    Args:
        now_s: seconds since the epoch; None: now.
    """
    now_s = time.time() if now_s is None else now_s
    records = []
    for path in folder.glob("*/stage.json"):
        try:
            record, written_s = read_json(path), path.stat().st_mtime
            records.append(
                (written_s - float(record["seconds"]), _status(path.parent, record, now_s - written_s))
            )
        except (OSError, DamagedFile, KeyError, TypeError, ValueError):
            continue  # a stage that is being cleared, or one that another version of the program has written
    return [status for _, status in sorted(records, key=lambda record: record[0])]


# Private


def _status(folder: Path, record: Mapping[str, Any], silent_s: float) -> StageStatus:
    state = str(record["state"])
    if state not in ("running", "done", "failed"):
        raise ValueError(state)
    progress: Any = "interrupted" if state == "running" and silent_s > SILENT_S else state
    settings = record.get("settings") or {}
    last = _last_row(folder / "performance.jsonl")
    step = last.get("step")
    done = step + 1 if isinstance(step, int) else None
    steps = settings.get("steps")
    steps = steps if isinstance(steps, int) and not isinstance(steps, bool) else None
    seconds = float(record["seconds"])
    remaining_s = None
    if progress == "running":
        remaining_s = _remaining_s(settings, record, done, steps, last.get("seconds_per_step"))
    alarms = _alarms(folder / "alarms.jsonl")
    return StageStatus(
        folder.name, progress, seconds, str(record.get("error") or ""), done, steps, remaining_s, alarms
    )


def _remaining_s(
    settings: Mapping[str, Any],
    record: Mapping[str, Any],
    done: int | None,
    steps: int | None,
    seconds_per_step: Any,
) -> float | None:
    """By the steps that are left; else by the stage's budget of minutes, or of minutes of a processor."""
    if steps is not None and done is not None and isinstance(seconds_per_step, (int, float)):
        return max(0.0, (steps - done) * float(seconds_per_step))
    seconds, cpu_seconds = float(record["seconds"]), float(record.get("cpu_seconds") or 0.0)
    if isinstance(minutes := settings.get("minutes"), (int, float)):
        return max(0.0, 60.0 * minutes - seconds)
    if isinstance(cpu_minutes := settings.get("cpu_minutes"), (int, float)) and cpu_seconds > 0:
        return max(0.0, (60.0 * cpu_minutes - cpu_seconds) * seconds / cpu_seconds)
    return None


def _last_row(path: Path) -> Mapping[str, Any]:
    rows = [row for row in _read_state_rows(path) if isinstance(row.get("step"), int)]
    return rows[-1] if rows else {}


def _alarms(path: Path) -> tuple[StageAlarm, ...]:
    return tuple(
        StageAlarm(row["step"], str(row.get("kind", "")), str(row.get("text", "")))
        for row in _read_state_rows(path)
        if isinstance(row.get("step"), int)
    )


def _read_state_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [row for row in read_whole_lines(path).rows if isinstance(row, dict)]
