"""Measurements of a clip as evidence for and against what an answer says of it, and where a clip is loud.

Loudness is told by the curve of levels and the onsets: spans of sound, steady sound, and what lies behind.

Shapes: T steps of `LEVEL_STEP_S`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from audiollm.data.records.thoughts import ThoughtRecord
from audiollm.evaluate.judges.taggers import WindowScores
from pipelines.audiocot.answers.kinds import KINDS, kinds_of, kinds_of_class, word_forms
from pipelines.steps.step import Value

LEVEL_STEP_S = 0.1
"""Seconds of one value of the curve of levels."""
SURE, ABSENT = 0.5, 0.05
"""Highest scores of a kind in a clip from which it is taken for heard, and below which for not heard."""
_SILENT_DBFS, _LOUD_DBFS = -70.0, -50.0
_SMALL_WORDS = frozenset(
    [
        "a",
        "an",
        "the",
        "of",
        "and",
        "in",
        "on",
        "at",
        "to",
        "with",
        "from",
        "or",
        "other",
        "loud",
        "quiet",
        "steady",
        "sound",
        "sounds",
        "noise",
        "human",
    ]
)


@dataclass(frozen=True)
class Evidence:
    """Facts of a clip that an answer must not contradict.

    Args:
        labels: sounds that were surely heard, as the tagger names them.
        kinds: score of each of `KINDS`; empty without a tagger.
        curve_dbfs: level every `LEVEL_STEP_S`.
    """

    duration_s: float
    labels: tuple[str, ...] = ()
    kinds: Mapping[str, float] | None = None
    curve_dbfs: Sequence[float] = ()


def evidence_of(values: Mapping[str, Value], duration_s: float) -> Evidence:
    """Collect the evidence of the steps that ran."""
    tagged = values.get("tags")
    curve = values.get("levels", {}).get("curve_dbfs", ())
    if tagged is None:
        return Evidence(duration_s, curve_dbfs=curve)
    labels = dict.fromkeys(event["label"] for event in tagged["events"])
    return Evidence(duration_s, tuple(labels), tagged["kinds"], curve)


def kind_scores(window_scores: WindowScores) -> dict[str, float]:
    """The highest score of each kind in any window: a word in a long clip is a voice, and so is a singer in a band."""
    labels, scores_FK = window_scores
    peaks = zip(labels, scores_FK.max(axis=0, initial=0.0).tolist(), strict=True)
    scores = dict.fromkeys(KINDS, 0.0)
    for label, peak in peaks:
        for kind in kinds_of_class(label):
            scores[kind] = max(scores[kind], round(peak, 4))
    return scores


def name_words(sound: str) -> set[str]:
    """Return the words of a name that tell it from others, with and without the plural's s."""
    return word_forms(sound) - _SMALL_WORDS


def contradiction(record: ThoughtRecord, evidence: Evidence) -> str | None:
    """Say how a record contradicts the evidence; None: it does not.

    Names are compared by their words. A sound that no tag supports is no contradiction: taggers know few classes.
    A sound that shares a word with a class that was heard is what was heard.
    """
    named, label_words = _words_of_all(record.sounds()), _words_of_all(evidence.labels)
    for sound in record.avoid:
        clash = next((label for label in evidence.labels if name_words(label) & name_words(sound)), None)
        if clash is not None:
            return f"{sound!r} is to be avoided, and {clash!r} was heard"
    if evidence.labels and not named:
        return f"no sound is named, and {evidence.labels[0]!r} was heard"
    loudest_dbfs = max(evidence.curve_dbfs, default=_SILENT_DBFS)
    if not record.sounds() and loudest_dbfs >= _LOUD_DBFS:
        return f"no sound is named, and the clip has a level of {loudest_dbfs:.0f} dBFS"
    for kind, score in (evidence.kinds or {}).items():
        kind_sounds = _sounds_of_kind(record, kind)
        if score < ABSENT:
            wrong = next((sound for sound in kind_sounds if not name_words(sound) & label_words), None)
            if wrong is not None:
                return f"{wrong!r} is named, and no {kind} was heard (score {score:.2f})"
        elif score >= SURE and not kind_sounds:
            kind_labels = [label for label in evidence.labels if kind in kinds_of_class(label)]
            if not named & _words_of_all(kind_labels):
                return f"no {kind} is named, and it was heard (score {score:.2f})"
    for event in record.events:
        span = evidence.curve_dbfs[
            int(event.start_s / LEVEL_STEP_S) : max(1, round(event.end_s / LEVEL_STEP_S))
        ]
        if span and max(span) < _SILENT_DBFS:
            return (
                f"{event.sound!r} is said from {event.start_s:g} to {event.end_s:g} s, where there is silence"
            )
    return None


def _words_of_all(names: Iterable[str]) -> set[str]:
    return set[str]().union(*(name_words(name) for name in names))


def _sounds_of_kind(record: ThoughtRecord, kind: str) -> list[str]:
    events = [event.sound for event in record.events if kind in kinds_of(event.sound, event.source or "")]
    return [*events, *(sound for sound in record.background if kind in kinds_of(sound))]


SILENT_DBFS = -60.0
"""A clip that nowhere exceeds this level is silent."""
_STEADY_RANGE_DB = 17.0
"""Largest range of a steady sound's level, without the quietest and the loudest tenth. In ESC-10's folds 1 and 2, 77 of
80 clips of rain, sea waves, helicopters, chainsaws and fires are steady by this, and none of 64 of dogs, cries, sneezes
and roosters."""
_RISE_DB = 6.0
"""A sound rises this much above a steady one, or above the sound before it."""
_ABOVE_FLOOR_DB, _BELOW_LOUDEST_DB = 10.0, 25.0
"""Sound that is not steady: so far above the quietest tenth of a clip, and no further below its loudest moment."""
_BED_DBFS, _BED_S = -50.0, 0.5
"""Sound between the others, that lasts so long, is heard from this level on."""
_NEAR_ONSET_S = 0.15
_MIN_SPAN_S = 0.05


class LoudSpan(NamedTuple):
    """A span of a clip that is louder than what lies around it."""

    start_s: float
    end_s: float


class Loudness(NamedTuple):
    """The loud spans of a clip.

    Args:
        is_silent: nothing is heard.
        is_steady: one sound, about as loud from the beginning to the end; spans rise above it.
        bed_dbfs: level of the steady sound, or of what is heard between the spans; None: nothing is.
    """

    spans: tuple[LoudSpan, ...]
    is_silent: bool
    is_steady: bool
    bed_dbfs: float | None


def loudness_of(curve_dbfs: Sequence[float], onsets_s: Sequence[float], duration_s: float) -> Loudness:
    """Find the loud spans of a clip, in order of time."""
    curve_T = np.asarray(curve_dbfs)
    if curve_T.max(initial=SILENT_DBFS) <= SILENT_DBFS:
        return Loudness((), True, False, None)
    floor_dbfs, high_dbfs = np.percentile(curve_T, [10, 90])
    is_steady = bool(floor_dbfs >= SILENT_DBFS and high_dbfs - floor_dbfs <= _STEADY_RANGE_DB)
    if is_steady:
        threshold_dbfs = float(np.median(curve_T)) + _RISE_DB
    else:
        limits_dbfs = (curve_T.max() - _BELOW_LOUDEST_DB, floor_dbfs + _ABOVE_FLOOR_DB, SILENT_DBFS)
        threshold_dbfs = float(max(limits_dbfs))
    is_loud_T = curve_T >= threshold_dbfs
    starts = _risen_onsets(curve_T, is_loud_T, onsets_s)
    spans = [
        span for run in _find_loud_runs(is_loud_T) for span in _spans_of(run, starts, onsets_s, duration_s)
    ]
    bed_dbfs = float(np.median(curve_T)) if is_steady else _bed(curve_T, is_loud_T)
    return Loudness(tuple(spans), False, is_steady, bed_dbfs)


# Private


def _find_loud_runs(is_loud_T: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Runs `[first, end)` of loud steps; one quiet step between two loud ones does not end a run."""
    runs: list[tuple[int, int]] = []
    for step in np.flatnonzero(is_loud_T).tolist():
        if runs and step - runs[-1][1] <= 1:
            runs[-1] = (runs[-1][0], step + 1)
        else:
            runs.append((step, step + 1))
    return runs


def _risen_onsets(
    curve_T: NDArray[np.float64], is_loud_T: NDArray[np.bool_], onsets_s: Sequence[float]
) -> list[float]:
    """The onsets within loud sound at which another one begins: the level rises against the steps before."""
    risen = []
    for onset_s in onsets_s:
        step = min(int(onset_s / LEVEL_STEP_S), len(curve_T) - 1)
        before_T, after_T = curve_T[max(0, step - 2) : step], curve_T[step : step + 2]
        if len(before_T) and is_loud_T[step : step + 2].any() and after_T.max() >= before_T.min() + _RISE_DB:
            risen.append(onset_s)
    return risen


def _spans_of(
    run: tuple[int, int], risen_s: Sequence[float], onsets_s: Sequence[float], duration_s: float
) -> list[LoudSpan]:
    """The spans of a run: it begins at the onset that is near, and a further sound begins at each risen onset."""
    start_s, end_s = run[0] * LEVEL_STEP_S, min(run[1] * LEVEL_STEP_S, duration_s)
    near = [onset_s for onset_s in onsets_s if abs(onset_s - start_s) <= _NEAR_ONSET_S and onset_s < end_s]
    start_s = min(near, key=lambda onset_s: abs(onset_s - start_s), default=start_s)
    inside = [onset_s for onset_s in risen_s if start_s + _NEAR_ONSET_S < onset_s < end_s - _MIN_SPAN_S]
    borders = [max(0.0, min(start_s, end_s - _MIN_SPAN_S)), *inside, end_s]
    return [LoudSpan(round(begin_s, 3), round(until_s, 3)) for begin_s, until_s in pairwise(borders)]


def _bed(curve_T: NDArray[np.float64], is_loud_T: NDArray[np.bool_]) -> float | None:
    """The level of the longest stretch between the loud spans; None: it is short or not heard."""
    first, end = max(_find_loud_runs(~is_loud_T), key=lambda run: run[1] - run[0], default=(0, 0))
    if (end - first) * LEVEL_STEP_S < _BED_S:
        return None
    level_dbfs = float(np.median(curve_T[first:end]))
    return level_dbfs if level_dbfs >= _BED_DBFS else None
