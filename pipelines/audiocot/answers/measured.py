"""The answerer `measured`: it writes only from measurements, or from the truth of composed scenes.

Its records have times from onsets and levels, names from a tagger, places from movement in the pictures. It needs no
model that writes, so that everything runs without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from audiollm.data.records.thoughts import NO_OTHERS, ThoughtEvent, ThoughtRecord
from pipelines.audiocot.answers.evidence import ABSENT, LEVEL_STEP_S
from pipelines.audiocot.answers.kinds import kinds_of_class
from pipelines.steps.step import Value

_NEAR_ONSET_S = 0.6
"""An onset this near to the beginning of a tagged event is its beginning: half a window of YAMNet, and a hop."""
_NEAR_MOTION_S = 0.2
_QUIET_DB, _LOUD_DB = -12.0, 6.0
"""Levels of an event against the clip's, at which it is called quiet or loud."""
_BACKGROUND_SHARE = 0.8
_TOGETHER_S = 0.1
"""Two events that begin and end within this are one sound by two names."""
_LEAST_S = 0.05
_SAME_BEGINNING_S = 0.1
"""A record names an event of a scene where it has its name and begins within this."""
_END_DROP_DB = 25.0
_AVOIDED = {"voice": "human voice", "music": "music"}


def true_record(truth: Mapping[str, Any], start_s: float, end_s: float) -> ThoughtRecord:
    """The record of a clip of a composed scene, from the scene's metadata: events, backdrop, and nothing else."""
    events = list(true_events(truth, start_s, end_s).values())
    behind = truth.get("backdrop")
    return ThoughtRecord(events=events, background=[str(behind["name"])] if behind else [], avoid=[NO_OTHERS])


def scene_events(truth: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The events of a composed scene in order of time."""
    return sorted(truth["events"], key=lambda event: event["start_s"])


def true_events(truth: Mapping[str, Any], start_s: float, end_s: float) -> dict[int, ThoughtEvent]:
    """The events of a composed scene that are heard in a clip, by their numbers among `scene_events`.

    Times are those of the clip. An event is cut at its ends; one of which less than 0.05 s is left is not heard.
    """
    found, length_s = dict[int, ThoughtEvent](), end_s - start_s
    for number, event in enumerate(scene_events(truth)):
        begins_s, ends_s = (round(float(event[name]) - start_s, 6) for name in ("start_s", "end_s"))
        if min(ends_s, length_s) - max(begins_s, 0.0) < min(_LEAST_S, ends_s - begins_s):
            continue
        found[number] = ThoughtEvent(
            sound=str(event["name"]),
            start_s=max(begins_s, 0.0),
            end_s=ends_s if ends_s <= length_s + _LEAST_S else length_s,
            place=event.get("where"),
        )
    return found


def numbers_in_scene(
    record: ThoughtRecord, truth: Mapping[str, Any], start_s: float, end_s: float
) -> dict[int, int]:
    """For each event of a clip's record that is one of the scene, its number among `scene_events`.

    A model that writes may leave events out, and name others.
    """
    found: dict[int, int] = {}
    for number, event in true_events(truth, start_s, end_s).items():
        near = [
            (abs(other.start_s - event.start_s), place)
            for place, other in enumerate(record.events)
            if other.sound == event.sound and place not in found
        ]
        if near and min(near)[0] <= _SAME_BEGINNING_S:
            found[min(near)[1]] = number
    return found


def heard_record(values: Mapping[str, Value], duration_s: float) -> ThoughtRecord:
    """The record of what a tagger, levels and onsets tell of a clip."""
    levels, tagged = values["levels"], values.get("tags")
    if tagged is None:
        return _unnamed(levels, duration_s)
    found: list[tuple[float, ThoughtEvent]] = []
    background: list[str] = []
    for event in tagged["events"]:
        if event["end_s"] - event["start_s"] >= _BACKGROUND_SHARE * duration_s:
            background.append(_name(event["label"]))
            continue
        start_s, end_s = _refined(event, levels, duration_s)
        manner = _manner(levels, start_s, end_s)
        named_event = ThoughtEvent(sound=_name(event["label"]), start_s=start_s, end_s=end_s, manner=manner)
        found.append((event["score"], named_event))
    events = sorted(_one_by_name(found), key=lambda event: (event.start_s, event.sound))[:32]
    background = [name for name in dict.fromkeys(background) if name not in {e.sound for e in events}]
    absent = [_AVOIDED[kind] for kind, score in tagged["kinds"].items() if score < ABSENT]
    named = {kind for event in tagged["events"] for kind in kinds_of_class(event["label"])}
    avoid = [name for kind, name in _AVOIDED.items() if name in absent and kind not in named]
    return ThoughtRecord(events=events, background=background[:8], avoid=avoid)


def placed_record(record: ThoughtRecord, moments: Sequence[Mapping[str, Any]]) -> ThoughtRecord:
    """The record with the place of a movement for each event that begins when something moves."""
    events = []
    for event in record.events:
        near = [m for m in moments if abs(m["at_s"] - event.start_s) <= _NEAR_MOTION_S]
        seen = max(near, key=lambda moment: moment["strength"], default=None)
        if seen is None or event.place is not None:
            events.append(event)
        else:
            events.append(event.model_copy(update={"place": seen["place"]}))
    return record.model_copy(update={"events": events})


# Private


def _unnamed(levels: Value, duration_s: float) -> ThoughtRecord:
    """Without a tagger: sounds without a name, where the energy rises."""
    events = []
    for onset_s in levels["onsets_s"][:32]:
        end_s = _end_of(levels["curve_dbfs"], onset_s, duration_s)
        manner = _manner(levels, onset_s, end_s)
        events.append(ThoughtEvent(sound="a sound", start_s=onset_s, end_s=end_s, manner=manner))
    return ThoughtRecord(events=events)


def _refined(event: Mapping[str, Any], levels: Value, duration_s: float) -> tuple[float, float]:
    """Beginning at the nearest onset, and the end where the level has fallen."""
    start_s, end_s = float(event["start_s"]), min(float(event["end_s"]), duration_s)
    near = [onset for onset in levels["onsets_s"] if abs(onset - start_s) <= _NEAR_ONSET_S and onset < end_s]
    if near:
        start_s = min(near, key=lambda onset: abs(onset - start_s))
    end_s = max(min(end_s, _end_of(levels["curve_dbfs"], start_s, duration_s)), start_s + _LEAST_S)
    end_s = min(end_s, duration_s)
    return round(min(start_s, max(0.0, end_s - _LEAST_S)), 3), round(end_s, 3)


def _end_of(curve: Sequence[float], start_s: float, duration_s: float) -> float:
    """The end of a sound: its level has fallen by `_END_DROP_DB` for two steps, or the clip ends."""
    first = int(start_s / LEVEL_STEP_S)
    loudest = max(curve[first : first + 3], default=-120.0)
    for place in range(first + 1, len(curve) - 1):
        loudest = max(loudest, curve[place])
        if max(curve[place], curve[place + 1]) < loudest - _END_DROP_DB:
            return round(min(duration_s, max(place * LEVEL_STEP_S, start_s + _LEAST_S)), 3)
    return round(duration_s, 3)


def _manner(levels: Value, start_s: float, end_s: float) -> str | None:
    curve = levels["curve_dbfs"]
    part = curve[
        int(start_s / LEVEL_STEP_S) : max(int(start_s / LEVEL_STEP_S) + 1, round(end_s / LEVEL_STEP_S))
    ]
    if not part:
        return None
    above_db = max(part) - levels["level_dbfs"]
    return "quiet" if above_db < _QUIET_DB else "loud" if above_db > _LOUD_DB else None


def _one_by_name(found: Sequence[tuple[float, ThoughtEvent]]) -> list[ThoughtEvent]:
    """Events with their scores, without those that are another name for a surer one: both begin and end together."""
    kept: list[ThoughtEvent] = []
    for _, event in sorted(found, key=lambda pair: (-pair[0], pair[1].sound)):
        same = (
            abs(event.start_s - other.start_s) <= _TOGETHER_S
            and (event.sound == other.sound or abs(event.end_s - other.end_s) <= _TOGETHER_S)
            for other in kept
        )
        if not any(same):
            kept.append(event)
    return kept


def _name(label: str) -> str:
    """A class's name in lower case: "Fire engine, fire truck (siren)" is "fire engine"."""
    return label.split(",")[0].split("(")[0].strip().lower() or label.lower()
