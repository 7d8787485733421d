"""Measurements of a clip as evidence for and against what an answer says of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from audiollm.data.records.thoughts import ThoughtRecord
from pipelines.steps.step import Value

_VOICE = (
    "speech voice voices talk talking speak speaking speaker conversation narration monologue sing singing singer song "
    "vocals shout shouting yell laughter laugh man woman child person people whisper whispering choir"
)
_MUSIC = (
    "music musical song melody guitar piano drums violin orchestra instrument singing choir bass synthesizer trumpet "
    "flute jazz beat"
)
KIND_WORDS: Mapping[str, frozenset[str]] = {
    "voice": frozenset(_VOICE.split()),
    "music": frozenset(_MUSIC.split()),
}
"""Words by which sounds of a kind are named."""
LEVEL_STEP_S = 0.1
"""Seconds of one value of the curve of levels."""
SURE, ABSENT = 0.5, 0.05
"""Scores of a kind from which it is taken for heard, and below which for not heard."""
_SILENT_DBFS = -70.0
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
        "other",
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
        heard: sounds that were surely heard, as the tagger names them.
        kinds: score of each kind of `KIND_WORDS`; empty without a tagger.
        curve_dbfs: level every `LEVEL_STEP_S`.
    """

    duration_s: float
    heard: tuple[str, ...] = ()
    kinds: Mapping[str, float] | None = None
    curve_dbfs: Sequence[float] = ()


def evidence_of(values: Mapping[str, Value], duration_s: float) -> Evidence:
    """Collect the evidence of the steps that ran."""
    tagged = values.get("tags")
    curve = values.get("levels", {}).get("curve_dbfs", ())
    if tagged is None:
        return Evidence(duration_s, curve_dbfs=curve)
    heard = dict.fromkeys(event["label"] for event in tagged["events"])
    return Evidence(duration_s, tuple(heard), tagged["kinds"], curve)


def kind_scores(events: Sequence[Mapping[str, Any]], tags: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The highest score of each kind among events and tags."""
    found = dict.fromkeys(KIND_WORDS, 0.0)
    for each in (*events, *tags):
        for kind in kinds_of(str(each["label"])):
            found[kind] = max(found[kind], float(each["score"]))
    return found


def kinds_of(sound: str) -> list[str]:
    """Return the kinds that a sound's name belongs to."""
    words = name_words(sound)
    return [kind for kind, known in KIND_WORDS.items() if words & known]


def name_words(sound: str) -> set[str]:
    """Return the words of a name that tell it from others, without the plural's s."""
    found = re.findall(r"[^\W\d_]+", sound.casefold())
    words = {word for word in found if word not in _SMALL_WORDS}
    return words | {word[:-1] for word in words if word.endswith("s") and len(word) > 3}


def contradiction(record: ThoughtRecord, evidence: Evidence) -> str | None:
    """Say how a record contradicts the evidence; None: it does not.

    Names are compared by their words. A sound that no tag supports is no contradiction: taggers know few classes.
    """
    named = set[str]().union(*(name_words(sound) for sound in record.sounds()))
    for sound in record.avoid:
        clash = next((label for label in evidence.heard if name_words(label) & name_words(sound)), None)
        if clash is not None:
            return f"{sound!r} is to be avoided, and {clash!r} was heard"
    if evidence.heard and not named:
        return f"no sound is named, and {evidence.heard[0]!r} was heard"
    for kind, score in (evidence.kinds or {}).items():
        says = bool(named & KIND_WORDS[kind])
        if says and score < ABSENT:
            sound = next(each for each in record.sounds() if name_words(each) & KIND_WORDS[kind])
            return f"{sound!r} is named, and no {kind} was heard (score {score:.2f})"
        if not says and score >= SURE:
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
