"""SimulEval's `instances.log`: one line of JSON per source, with the times of its output, for text and for speech.

Times are milliseconds of a spoken source, or words of a written one. Keys of SimulEval are read and written as they are
there; keys of ours stand beside them, and others are kept.

Units: `word` (between spaces), `character` (without spaces), `segment` (a piece of speech as it came out, which is what
SimulEval counts for speech), `frame` (a fixed duration of speech, at the time at which it is heard).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from audiollm.data.tables.rows import read_json_rows
from audiollm.data.tables.table import BadRow
from audiollm.errors import BadSample, ConfigError, first_problem
from audiollm.evaluate.interpret.latency import EmissionTimes, Revision
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.text_errors import CHARACTER_LANGUAGES
from audiollm.files.atomic import write_jsonl


@dataclass(frozen=True)
class Playback:
    """The intervals in which pieces of speech are heard, in the unit of their times."""

    intervals: tuple[tuple[float, float], ...]
    """(start, duration) of each piece."""

    @classmethod
    def of(cls, times: Sequence[float], durations: Sequence[float]) -> Playback:
        """Play pieces that came out at these times."""
        intervals: list[tuple[float, float]] = []
        end = 0.0
        for time, duration in zip(times, durations, strict=True):
            start = max(end, time)
            intervals.append((start, duration))
            end = start + duration
        return cls(tuple(intervals))

    @property
    def end(self) -> float:
        """End of the last piece; 0 without one."""
        return sum(self.intervals[-1]) if self.intervals else 0.0

    @property
    def gaps(self) -> list[float]:
        """Silences between pieces, where the output ran out."""
        ends = [start + duration for start, duration in self.intervals]
        starts = [start for start, _ in self.intervals[1:]]
        return [start - end for end, start in zip(ends, starts, strict=False) if start > end]

    def frames(self, length: float) -> list[float]:
        """Return the time at which each frame of this length begins to be heard."""
        return [
            start + place * length
            for start, duration in self.intervals
            for place in range(round(duration / length))
        ]


LOG_NAME = "instances.log"
Unit = Literal["word", "character", "segment", "frame"]
UNITS: tuple[Unit, ...] = ("word", "character", "segment", "frame")
FRAME_MS = 40.0
"""Duration of a frame of speech: one frame of a codec of 25 Hz."""


class LoggedSentence(BaseModel):
    """A sentence of a long source, with times from the source's beginning."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    start: float
    end: float
    reference: str


class LoggedOutput(BaseModel):
    """A line of the log: what was said for one source, and when."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    index: int
    """Number of the source."""
    prediction: str
    """The text, or the path of the sound."""
    delays: list[float]
    """Source that had been read when each unit came out."""
    elapsed: list[float] = []
    """Time on the clock when each unit came out; empty where it was not measured."""
    prediction_length: float = 0
    """Units of the text, or seconds of sound."""
    reference: str = ""
    source: Any = ""
    """The written source, the path of the sound, or what SimulEval says of it."""
    source_length: float = Field(gt=0)
    durations: list[float] = []
    """Duration of each piece of speech; empty for text."""
    prediction_offset: float | None = None
    """Time at which the sound of `prediction` begins."""
    intervals: list[tuple[float, float]] = []
    """(start, duration) of each piece of speech as it is heard."""
    transcript: str | None = None
    """Words of the speech, as they were meant."""
    revisions: list[tuple[float, str]] = []
    """(time, whole text) of everything that was shown, of a system that rewrites."""
    onset: float = 0.0
    """Time at which the source's speech begins."""
    recording_end: float | None = None
    """End of the recording that the source is a part of, from the source's beginning."""
    reference_duration: float | None = None
    """Duration of the reference as speech."""
    segments: list[LoggedSentence] = []
    """Sentences of a long source, for latencies of sentences."""

    @property
    def is_speech(self) -> bool:
        return bool(self.durations)

    @property
    def text(self) -> str:
        """The words of the output; empty for speech without a transcript.

        An output with a transcript that has no piece of speech is speech of nothing, and `prediction` its path.
        """
        return (self.transcript or "") if self.is_speech or self.transcript is not None else self.prediction

    def playback(self) -> Playback:
        """Return the playback of the speech."""
        return Playback.of(self.delays, self.durations)


def counted_unit(language: str) -> Unit:
    """Return what the text of a language is counted by: characters where words have no spaces between, else words."""
    return "character" if language.split("-")[0].lower() in CHARACTER_LANGUAGES else "word"


def split_units(text: str, unit: Unit) -> list[str]:
    """Split a text into words, or into characters without spaces."""
    return list("".join(text.split())) if unit == "character" else text.split()


def join_units(units: Sequence[str], unit: Unit) -> str:
    """Return the text of units, as `split_units` splits it."""
    return ("" if unit == "character" else " ").join(units)


def revisions_of(output: LoggedOutput, unit: Unit) -> list[Revision]:
    """Return the revisions of an output in units."""
    return [(time, split_units(text, unit)) for time, text in output.revisions]


def emissions_of(output: LoggedOutput, unit: Unit, frame: float = FRAME_MS) -> EmissionTimes:
    """Return the times of an output's units, with the lengths of source and reference.

    Args:
        frame: duration of a frame, for the unit `frame`.

    Raises:
        MetricError: there is no output, or the log was not written in this unit.
    """
    if not output.delays:
        raise MetricError("no output")
    if unit == "frame":
        times = _frame_times(output, frame)
        reference = reference_units(output, unit, frame) if output.reference_duration else len(times)
    else:
        times = output.delays if output.is_speech or unit == "segment" else text_times(output, unit)
        reference = reference_units(output, unit)
    return EmissionTimes(tuple(times), output.source_length, reference, output.recording_end)


def text_times(output: LoggedOutput, unit: Unit) -> list[float]:
    """Return a time for each word or character of a text; the characters of a log of words came out with their word.

    Raises:
        MetricError: the log was not written in this unit.
    """
    times, words = output.delays, output.prediction.split()
    if unit == "character" and len(times) != len(split_units(output.prediction, unit)):
        if len(times) == len(words):
            return [time for time, word in zip(times, words, strict=True) for _ in word]
        raise MetricError(f"{len(times)} times are neither of the characters nor of the words")
    if unit == "word" and len(times) != len(words):
        raise MetricError(f"{len(times)} times for {len(words)} words: is the log by character?")
    return times


def reference_units(output: LoggedOutput, unit: Unit, frame: float = FRAME_MS) -> int:
    """Return the number of units of the reference, at least 1; frames of a reference of unknown duration: 1."""
    if unit == "frame":
        return max(1, round((output.reference_duration or 0) / frame))
    return max(1, len(split_units(output.reference, "character" if unit == "character" else "word")))


def read_log(path: Path) -> tuple[list[LoggedOutput], list[BadSample]]:
    """Read a log: the file, or the folder that holds `instances.log`.

    Returns:
        The outputs, and the lines that are none: a key of the wrong type, times out of order, numbers that do not fit.

    Raises:
        ConfigError: the file cannot be read, or holds no line that is an output.
    """
    path = path / LOG_NAME if path.is_dir() else path
    outputs, bad, seen_indices = [], [], set()
    for where, values in read_json_rows(path).rows:
        if isinstance(values, BadRow):
            bad.append(BadSample(where, "", values.reason, "not an output"))
            continue
        try:
            output = LoggedOutput.model_validate(values)
        except ValidationError as error:
            bad.append(BadSample(where, _name_of_output(values), first_problem(error), "not an output"))
            continue
        reason = _contradiction(output)
        if not reason and output.index in seen_indices:
            reason = "an index that is used twice"
        if reason:
            bad.append(BadSample(where, str(output.index), reason))
            continue
        seen_indices.add(output.index)
        outputs.append(output)
    if not outputs:
        reason = f"no output that can be used: {bad[0].reason}" if bad else "the log is empty"
        raise ConfigError(reason, str(path), "give the instances.log of SimulEval or of `audiollm interpret`")
    return outputs, bad


def write_log(path: Path, outputs: Iterable[LoggedOutput]) -> None:
    """Write a log that SimulEval can score: `simuleval --score-only --output FOLDER`."""
    write_jsonl(path, (output.model_dump(exclude_unset=True) | _simuleval_keys(output) for output in outputs))


def _simuleval_keys(output: LoggedOutput) -> dict[str, Any]:
    """The keys that SimulEval reads of every line."""
    keys = (
        "index",
        "prediction",
        "delays",
        "elapsed",
        "prediction_length",
        "reference",
        "source",
        "source_length",
    )
    return {key: getattr(output, key) for key in keys}


def _frame_times(output: LoggedOutput, frame: float) -> list[float]:
    if not output.is_speech:
        raise MetricError("text has no frames")
    times = output.playback().frames(frame)
    if not times:
        raise MetricError("the speech is shorter than a frame")
    return times


def _contradiction(output: LoggedOutput) -> str:
    """Why the numbers of a line cannot be; empty where they can."""
    for name in ("delays", "elapsed"):
        times = getattr(output, name)
        if any(after < before for before, after in itertools.pairwise(times)):
            return f"{name} are out of order"
        if any(not math.isfinite(time) or time < 0 for time in times):
            return f"{name} must be finite and not negative"
    if output.elapsed and len(output.elapsed) != len(output.delays):
        return f"{len(output.elapsed)} elapsed for {len(output.delays)} delays"
    if output.durations and len(output.durations) != len(output.delays):
        return f"{len(output.durations)} durations for {len(output.delays)} delays"
    if any(duration < 0 for duration in output.durations):
        return "a duration is negative"
    return ""


def _name_of_output(values: Any) -> str:
    return str(values.get("index", "")) if isinstance(values, dict) else ""
