"""Measurements of a clip as evidence for and against what an answer says of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
