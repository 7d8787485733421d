"""Aligners of offline pairs: for each unit of a translation, the time at which the source that it needs is over."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Protocol

from audiollm.data.records.aligned_recording import AlignedRecording, target_units
from audiollm.errors import BadSample
from audiollm.json_process import JsonProcess, ProcessFailed

NOT_ALIGNED = "cannot be aligned"
"""Kind of a recording that is set aside because its translation could not be aligned."""


class Aligner(Protocol):
    """Aligns the translation of a whole recording with its source."""

    def source_ends(self, recording: AlignedRecording, path: Path) -> list[float]:
        """Return for each of `target_units` the time in seconds at which its source is over; not in order by need.

        Args:
            path: the recording.

        Raises:
            BadSample: it cannot be aligned.
        """


class CommandAligner:
    """An aligner in another process (SimAlign, awesome-align, an endpoint), asked in JSON lines (`json_process.py`).

    A question is `{"audio", "text", "words": [{"text", "start_s", "end_s"}], "target", "units": [...]}`; the answer is
    a list of seconds, one for each unit, or `{"ends": [...]}`, or `{"error": why it cannot}`. Where the program dies
    or hangs, the recording is set aside, and the next one starts it again.
    """

    def __init__(self, command: str, timeout_s: float) -> None:
        self._process = JsonProcess(command, timeout_s, "align.command")

    def source_ends(self, recording: AlignedRecording, path: Path) -> list[float]:
        units = target_units(recording.target)
        question = {
            "audio": str(path),
            "text": recording.text,
            "words": [word.model_dump(include={"text", "start_s", "end_s"}) for word in recording.words],
            "target": recording.target,
            "units": [unit.text for unit in units],
        }
        try:
            (line,) = self._process.ask([question])
        except ProcessFailed as failure:
            raise BadSample(recording.audio, recording.id, f"the aligner {failure}", NOT_ALIGNED) from None
        try:
            ends = _parse_ends(line)
        except ValueError as error:
            self.close()  # the line may have been no answer, and the answer may still come
            raise BadSample(recording.audio, recording.id, str(error), NOT_ALIGNED) from None
        if isinstance(ends, str):
            raise BadSample(recording.audio, recording.id, ends, NOT_ALIGNED)
        if len(ends) != len(units):
            reason = f"the aligner gave {len(ends)} times for {len(units)} units"
            raise BadSample(recording.audio, recording.id, reason, NOT_ALIGNED)
        return ends

    def close(self) -> None:
        """End the process."""
        self._process.close()


def _parse_ends(line: str) -> list[float] | str:
    """The times of an answer, or the program's reason why there are none.

    Raises:
        ValueError: it is neither.
    """
    wrong = f"the aligner answered {line.strip()[:80]!r}, which is no list of seconds"
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        raise ValueError(wrong) from None
    if isinstance(value, dict) and value.get("error"):
        return f"the aligner: {value['error']}"
    value = value.get("ends") if isinstance(value, dict) else value
    if not isinstance(value, list) or not all(map(_is_time, value)):
        raise ValueError(wrong)
    return [float(seconds) for seconds in value]


def _is_time(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    )
