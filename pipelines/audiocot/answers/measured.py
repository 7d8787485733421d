"""The answerer `measured`: it writes only from measurements, or from the truth of composed scenes.

Its records have times from onsets and levels, names from a tagger, places from movement in the pictures. It needs no
model that writes, so that everything runs without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from audiollm.data.records.thoughts import MAX_EVENTS, NO_OTHERS, ThoughtEvent, ThoughtRecord
from pipelines.audiocot.answers.evidence import ABSENT, LEVEL_STEP_S, Loudness, LoudSpan, loudness_of
from pipelines.audiocot.answers.kinds import kinds_of_class
from pipelines.audiocot.answers.naming import SoundSpan, whole_name
from pipelines.steps.step import Value

UNNAMED, STEADY, QUIET_STEADY = "a sound", "a steady sound", "a quiet steady sound"
"""Names of sounds of which no class is sure."""
_NEAR_MOTION_S = 0.2
_QUIET_DB, _LOUD_DB = -12.0, 6.0
"""Levels of an event against the clip's, at which it is called quiet or loud."""
_BACKGROUND_SHARE, _STEADY_SHARE = 0.8, 0.4
"""Shares of a clip from which a class lasts for the whole of it: of any clip, and of one that sounds steadily."""
_LOUD_SHARE = 0.7
"""Share of a clip that is loud, at least, where a class lasts for the whole of it: barks with pauses are events."""
_TAGGER_OFF_S = 0.25
"""The ends of a tagger's sounds are this uncertain: half of YAMNet's hop."""
_LEAST_S = 0.05
_SAME_BEGINNING_S = 0.1
"""A record names an event of a scene where it has its name and begins within this."""
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
    event_by_number, length_s = dict[int, ThoughtEvent](), end_s - start_s
    for number, event in enumerate(scene_events(truth)):
        begins_s, ends_s = (round(float(event[name]) - start_s, 6) for name in ("start_s", "end_s"))
        if min(ends_s, length_s) - max(begins_s, 0.0) < min(_LEAST_S, ends_s - begins_s):
            continue
        event_by_number[number] = ThoughtEvent(
            sound=str(event["name"]),
            start_s=max(begins_s, 0.0),
            end_s=ends_s if ends_s <= length_s + _LEAST_S else length_s,
            place=event.get("where"),
        )
    return event_by_number


def numbers_in_scene(
    record: ThoughtRecord, truth: Mapping[str, Any], start_s: float, end_s: float
) -> dict[int, int]:
    """For each event of a clip's record that is one of the scene, its number among `scene_events`.

    A model that writes may leave events out, and name others.
    """
    number_by_place: dict[int, int] = {}
    for number, event in true_events(truth, start_s, end_s).items():
        near = [
            (abs(record_event.start_s - event.start_s), place)
            for place, record_event in enumerate(record.events)
            if record_event.sound == event.sound and place not in number_by_place
        ]
        if near and min(near)[0] <= _SAME_BEGINNING_S:
            number_by_place[min(near)[1]] = number
    return number_by_place


def heard_record(values: Mapping[str, Value], duration_s: float) -> ThoughtRecord:
    """The record of what a tagger, levels and onsets tell of a clip.

    A steady sound is background, any other is an event; one without a name is `UNNAMED`, or `STEADY` in the background.
    Only the record of silence names nothing.
    """
    levels, tagged = values["levels"], values.get("tags")
    loudness = loudness_of(levels["curve_dbfs"], levels["onsets_s"], duration_s)
    sounds = [] if tagged is None else [SoundSpan(**sound) for sound in tagged["sounds"]]
    if loudness.is_silent:
        return ThoughtRecord(avoid=_absent_kinds(tagged))
    background = _background(sounds, loudness, duration_s)
    spans = _event_spans(sounds, background, loudness, duration_s)
    events = [_make_thought_event(label, span, levels) for label, span in spans[:MAX_EVENTS]]
    behind = [whole_name(label) for label in background] or _unnamed_background(loudness, levels)
    return ThoughtRecord(events=events, background=behind[:8], avoid=_absent_kinds(tagged))


def has_little_evidence(record: ThoughtRecord, levels: Value) -> bool:
    """Whether what is loudest in a clip has no name in a record of `heard_record`."""
    sounds = loudest_sounds(record, levels)
    return bool(sounds) and not any(is_named(sound) for sound in sounds)


def loudest_sounds(record: ThoughtRecord, levels: Value) -> list[str]:
    """The sounds of a record at the loudest moment of its clip: its events then, else the background."""
    curve_dbfs = levels["curve_dbfs"]
    at_s = (curve_dbfs.index(max(curve_dbfs)) + 0.5) * LEVEL_STEP_S if curve_dbfs else 0.0
    near = [e.sound for e in record.events if e.start_s - LEVEL_STEP_S <= at_s <= e.end_s + LEVEL_STEP_S]
    return near or list(record.background)


def is_named(sound: str) -> bool:
    """Whether a record says what a sound is."""
    return sound not in (UNNAMED, STEADY, QUIET_STEADY)


def placed_record(record: ThoughtRecord, moments: Sequence[Mapping[str, Any]]) -> ThoughtRecord:
    """The record with the place of a movement for each event that begins when something moves."""
    events = []
    for event in record.events:
        near = [m for m in moments if abs(m["at_s"] - event.start_s) <= _NEAR_MOTION_S]
        strongest = max(near, key=lambda moment: moment["strength"], default=None)
        if strongest is None or event.place is not None:
            events.append(event)
        else:
            events.append(event.model_copy(update={"place": strongest["place"]}))
    return record.model_copy(update={"events": events})


# Private


def _background(sounds: Sequence[SoundSpan], loudness: Loudness, duration_s: float) -> list[str]:
    """The classes that last for the whole clip, the longest first; of a steady sound the surest, however long it is."""
    heard_s: dict[str, float] = {}
    for sound in sounds:
        if sound.label is not None:
            heard_s[sound.label] = heard_s.get(sound.label, 0.0) + sound.end_s - sound.start_s
    loud_s = sum(span.end_s - span.start_s for span in loudness.spans)
    if not loudness.is_steady and loud_s < _LOUD_SHARE * duration_s:
        return []
    share = _STEADY_SHARE if loudness.is_steady else _BACKGROUND_SHARE
    lasting = [label for label, seconds in heard_s.items() if seconds >= share * duration_s]
    if loudness.is_steady and not lasting:
        behind = [s for s in sounds if s.label and not any(_overlap_s(s, span) for span in loudness.spans)]
        lasting = [str(s.label) for s in sorted(behind, key=lambda sound: -sound.score)[:1]]
    return sorted(lasting, key=lambda label: (-heard_s[label], label))


def _unnamed_background(loudness: Loudness, levels: Value) -> list[str]:
    if loudness.bed_dbfs is None:
        return []
    return [QUIET_STEADY if loudness.bed_dbfs < levels["level_dbfs"] + _QUIET_DB else STEADY]


def _event_spans(
    sounds: Sequence[SoundSpan], background: Sequence[str], loudness: Loudness, duration_s: float
) -> list[tuple[str | None, LoudSpan]]:
    """Classes with the loud spans in which they are heard, in order of time; None: a loud span without a name.

    A loud span in which only the background is heard is a part of it.
    """
    spans: list[tuple[str | None, LoudSpan]] = []
    matched: set[SoundSpan] = set()
    for span in loudness.spans:
        span_sounds = [sound for sound in sounds if _is_heard_in(sound, span)]
        matched.update(span_sounds)
        labels = [sound for sound in span_sounds if sound.label is not None]
        alone = len(span_sounds) == 1
        spans += [
            (sound.label, span if alone else _common_span(sound, span))
            for sound in labels
            if sound.label not in background
        ]
        if not labels and not background:
            spans.append((None, span))
    for sound in sounds:
        if sound.label is not None and sound.label not in background and sound not in matched:
            spans.append((sound.label, LoudSpan(sound.start_s, min(sound.end_s, duration_s))))
    return _join_spans_of_class(sorted(set(spans), key=lambda pair: (pair[1], pair[0] or "")))


def _join_spans_of_class(spans: Sequence[tuple[str | None, LoudSpan]]) -> list[tuple[str | None, LoudSpan]]:
    """Spans of one class that follow without a pause as one; those without a name keep their beginnings."""
    joined: list[tuple[str | None, LoudSpan]] = []
    for label, span in spans:
        before = [
            place for place, (name, last) in enumerate(joined) if name == label and last.end_s >= span.start_s
        ]
        if label is None or not before:
            joined.append((label, span))
        else:
            start_s, end_s = joined[before[-1]][1]
            joined[before[-1]] = (label, LoudSpan(start_s, max(end_s, span.end_s)))
    return joined


def _overlap_s(sound: SoundSpan, span: LoudSpan) -> float:
    """Seconds that both have, with the tagger's uncertainty at both ends of its sound."""
    start_s, end_s = sound.start_s - _TAGGER_OFF_S, sound.end_s + _TAGGER_OFF_S
    return max(0.0, min(end_s, span.end_s) - max(start_s, span.start_s))


def _is_heard_in(sound: SoundSpan, span: LoudSpan) -> bool:
    shorter_s = min(sound.end_s - sound.start_s, span.end_s - span.start_s)
    return _overlap_s(sound, span) > 0.5 * shorter_s


def _common_span(sound: SoundSpan, span: LoudSpan) -> LoudSpan:
    """The loud span, cut at the ends of the tagger's sound that lie clearly inside of it."""
    start_s = sound.start_s if sound.start_s - span.start_s > 2 * _TAGGER_OFF_S else span.start_s
    end_s = sound.end_s if span.end_s - sound.end_s > 2 * _TAGGER_OFF_S else span.end_s
    return LoudSpan(start_s, end_s) if start_s + _LEAST_S <= end_s else span


def _make_thought_event(label: str | None, span: LoudSpan, levels: Value) -> ThoughtEvent:
    manner = _choose_manner(levels, *span)
    if label is None:
        manner, sound = manner or "moderately loud", UNNAMED
    else:
        sound = whole_name(label)
    return ThoughtEvent(sound=sound, start_s=span.start_s, end_s=span.end_s, manner=manner)


def _absent_kinds(tagged: Value | None) -> list[str]:
    """Names of the kinds of sounds that are surely not in a clip."""
    if tagged is None:
        return []
    present = {kind for event in tagged["events"] for kind in kinds_of_class(event["label"])}
    return [
        _AVOIDED[kind] for kind, score in tagged["kinds"].items() if score < ABSENT and kind not in present
    ]


def _choose_manner(levels: Value, start_s: float, end_s: float) -> str | None:
    """How loud an event is against its clip: quiet, loud, or neither."""
    first = int(start_s / LEVEL_STEP_S)
    steps = levels["curve_dbfs"][first : max(first + 1, round(end_s / LEVEL_STEP_S))]
    if not steps:
        return None
    above_db = max(steps) - levels["level_dbfs"]
    return "quiet" if above_db < _QUIET_DB else "loud" if above_db > _LOUD_DB else None
