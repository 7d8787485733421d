"""The ledger of a sweep: what was begun and what came of it, a line of JSON each, appended and never changed.

It is the one record of a sweep. A line is on the disk before anything that follows from it is done, and a line that a
kill cut short counts as none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from audiollm.errors import ConfigError
from audiollm.files.atomic import DamagedFile, line_numbers, read_whole_lines, sync
from audiollm.sweep.spaces import Parameter

State = Literal["running", "done", "pruned", "failed"]
Event = dict[str, Any]
STAGES = "stages"
"""Key of the header: fingerprints of the stages that the figures depend on."""


@dataclass
class Trial:
    """A trial: its parameters, its state, and what it ended with."""

    number: int
    parameters: dict[str, Parameter]
    state: State = "running"
    figures: dict[str, float] = field(default_factory=dict)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """Step and value of each evaluation that pruning looked at."""
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    error: str = ""


@dataclass
class SweepRecord:
    """Everything that a ledger says."""

    header: Event = field(default_factory=dict)
    trials: dict[int, Trial] = field(default_factory=dict)
    confirmations: dict[int, dict[int, Event]] = field(default_factory=dict)
    """Of a trial, by its number: the ends of its runs with further seeds, by seed."""
    final: Event | None = None
    """The end of the final run."""

    def in_state(self, *states: State) -> list[Trial]:
        """The trials in these states, in their order."""
        return [trial for _, trial in sorted(self.trials.items()) if trial.state in states]

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all trials that have ended."""
        return sum(trial.cpu_seconds for trial in self.trials.values())

    def apply(self, event: Event) -> None:
        """Take in a line of the ledger."""
        kind = event["event"]
        if (
            kind == "sweep"
        ):  # the first line, or a later one before any trial ended: a figure's name was wrong
            self.header = event
            self.trials.clear()
        elif kind == "final":
            self.final = event
        elif kind == "confirmation":
            self.confirmations.setdefault(event["trial"], {})[event["seed"]] = event
        elif kind == "begin":
            self.trials[event["trial"]] = Trial(event["trial"], event["parameters"])
        elif kind == "retry":
            self.trials[event["trial"]] = Trial(event["trial"], self.trials[event["trial"]].parameters)
        else:
            trial = self.trials[event["trial"]]
            trial.state, trial.error = event["state"], event["error"]
            trial.figures, trial.evaluations = event["figures"], [(s, v) for s, v in event["evaluations"]]
            trial.cpu_seconds, trial.seconds = event["cpu_seconds"], event["seconds"]


class SweepLedger:
    """Events of a sweep in a file of JSON lines, and what they come to. One process writes.

    Args:
        path: made with its folder when the first event is written.

    Raises:
        DamagedFile: a line is no event.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.record = path, SweepRecord()
        self.events: list[Event] = []
        self._whole_bytes: int | None = None
        if not path.is_file():
            return
        content = read_whole_lines(path, {"event": str})
        text = path.read_bytes()
        if not text.endswith(b"\n"):  # a kill cut this line short: nothing followed from it
            self._whole_bytes = text.rfind(b"\n") + 1
            is_broken = content.broken[-1:] == [text.count(b"\n") + 1]
            (content.broken if is_broken else content.rows).pop()
        if content.broken:
            raise DamagedFile(
                path, f"{line_numbers(content.broken)}: no event of a sweep", "remove that line"
            )
        for event in content.rows:
            self._take(event)

    def write(self, event: str, **values: Any) -> None:
        """Append an event, and wait until it is on the disk."""
        row = {"event": event, **values}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(row, ensure_ascii=False) + "\n"
        if self._whole_bytes is not None:
            os.truncate(self.path, self._whole_bytes)
            self._whole_bytes = None
        with open(self.path, "ab", buffering=0) as file:
            file.write(line.encode())
            os.fsync(file.fileno())
        if not self.events:
            sync(self.path.parent)
        self._take(json.loads(line))

    def begin(self, header: Mapping[str, Any]) -> None:
        """Write the header of a new sweep, or compare it with that of the sweep that is in the file.

        A sweep of which no trial has ended gives way to the new one.

        Raises:
            ConfigError: the sweep in the file is another one.
        """
        if not self.record.header:
            self.write("sweep", **header)
            return
        for key, value in json.loads(json.dumps(header)).items():
            before = self.record.header.get(key)
            if before != value and not self.record.in_state("done", "pruned", "failed"):
                self.write("sweep", **header)
                return
            if before != value:
                remedy = "--sweep-name begins another sweep beside it"
                raise ConfigError(_describe_change(key, value, before), str(self.path), remedy)

    def _take(self, event: Event) -> None:
        self.events = [event] if event["event"] == "sweep" else [*self.events, event]
        self.record.apply(event)


def _describe_change(key: str, value: Any, before: Any) -> str:
    """What is another one than when the sweep began."""
    if key == STAGES and isinstance(before, dict):
        names = [name for name in {**before, **value} if before.get(name) != value.get(name)]
        return f"{', '.join(names)}: settings, inputs or source changed since this sweep began"
    values = [json.dumps(item, ensure_ascii=False) for item in (value, before)]
    return f"{key}: {values[0]}, and was {values[1]} when this sweep began"
