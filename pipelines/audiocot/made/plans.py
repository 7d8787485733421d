"""Plans of what is made of kept clips: pairs of stage 2 and edits of stage 3, as plain values for workers.

A plan follows from its clips and the seed alone. Its words are in `words.py`, its sounds are made by
`carrying.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from audiollm.data.records.thoughts import ThoughtEvent, ThoughtRecord
from pipelines.audiocot.answers.measured import numbers_in_scene, scene_events
from pipelines.audiocot.corpus import Partners, draw_key
from pipelines.steps.results import Row

OperationName = Literal["extend", "inpaint", "add", "remove", "extract"]
_EXTEND_FROM = (0.4, 0.7)
"""Shares of a clip between which the input of `extend` ends."""
_INPAINT_SHARE = (0.2, 0.4)
"""Shares of a clip between which the span of `inpaint` lies."""


class SoundPart(NamedTuple):
    """A span of a file that is one addend of a sound."""

    path: str
    start_s: float
    end_s: float


class MadePlan(NamedTuple):
    """A sound before and after an operation, and what it is made of.

    Args:
        shared: parts that are in both.
        changed: parts that are in the output of `add` and in the input of `remove` and `extract` alone; in `extract`
            the output is `target`.
        target: index of the one shared part that `extract` wants; None: all shared parts.
        span: seconds of the clip that the operation changes.
        record: what is heard in the output.
        about: the events that the operation is about.
        avoid: sounds that `extract` must leave out: those of the reference and, where one track is wanted, the others.
        seed: names the contents of clip and reference, and what is drawn.
    """

    id: str
    operation: OperationName
    clip: str
    reference: str | None
    shared: tuple[SoundPart, ...]
    changed: tuple[SoundPart, ...]
    target: int | None
    duration_s: float
    span: tuple[float, float]
    record: ThoughtRecord
    about: ThoughtRecord
    avoid: tuple[str, ...]
    region: tuple[Mapping[str, Any], ...]
    seed: str


def plan_edits(clip: Row, partners: Partners, operations: Sequence[str], seed: int) -> Iterator[MadePlan]:
    """Yield the edits of a clip, one for each operation that it allows."""
    for operation in operations:
        key = draw_key(clip, f"{operation} {seed}")
        dice = random.Random(key)
        if operation in ("extend", "inpaint"):
            yield _hidden(clip, operation, dice, key)  # type: ignore[arg-type]
        elif (plan := _layered(clip, partners, operation, dice, key)) is not None:  # type: ignore[arg-type]
            yield plan


def plan_pairs(clip: Row, partners: Partners, seed: int) -> Iterator[MadePlan]:
    """Yield one pair for each object of a clip: the object's sound, out of the clip mixed with a reference."""
    objects = _described_objects(clip)
    reference = partners.find(clip)
    if not objects or reference is None:
        return
    record, avoided = _thought_record(clip), tuple(_thought_record(reference).sounds())
    tracks, track_of = _tracks(clip), _solo_tracks_by_event(clip, record)
    for number, clip_object in enumerate(objects):
        event = clip_object["event"]
        if event is None or event >= len(record.events):
            continue
        target_event = record.events[event]
        if "manner" in clip_object:
            target_event = target_event.model_copy(update={"manner": clip_object["manner"]})
        has_solo = tracks is not None and event in track_of
        # out of a clip without solo tracks, all of its sound is wanted
        target_sounds = {
            sound.casefold() for sound in ([target_event.sound] if has_solo else record.sounds())
        }
        avoidable = dict.fromkeys([*(record.sounds() if has_solo else ()), *avoided])
        avoid = tuple(sound for sound in avoidable if sound.casefold() not in target_sounds)[:16]
        about = ThoughtRecord(events=[target_event], avoid=list(avoid))
        yield MadePlan(
            id=f"{clip['id']}-extract-{number}",
            operation="extract",
            clip=clip["id"],
            reference=reference["id"],
            shared=tracks if has_solo and tracks is not None else (_clip_sound_part(clip),),
            changed=(_clip_sound_part(reference),),
            target=track_of[event] if has_solo else None,
            duration_s=clip["duration_s"],
            span=(0.0, clip["duration_s"]),
            record=about if has_solo else record.model_copy(update={"avoid": list(avoid)}),
            about=about,
            avoid=avoid,
            region=tuple(clip_object["region"]),
            seed=f"{draw_key(clip, f'extract {number} {seed}')} {reference['digest']}",
        )


# Private


def _hidden(clip: Row, operation: Literal["extend", "inpaint"], dice: random.Random, key: str) -> MadePlan:
    """The end, or a span, is to be made from the rest."""
    duration_s, record = clip["duration_s"], _thought_record(clip)
    if operation == "extend":
        span = (round(dice.uniform(*_EXTEND_FROM) * duration_s, 3), duration_s)
    else:
        length_s = dice.uniform(*_INPAINT_SHARE) * duration_s
        start_s = round(dice.uniform(0.1 * duration_s, 0.9 * duration_s - length_s), 3)
        span = (start_s, round(start_s + length_s, 3))
    return MadePlan(
        id=f"{clip['id']}-{operation}",
        operation=operation,
        clip=clip["id"],
        reference=None,
        shared=(_clip_sound_part(clip),),
        changed=(),
        target=None,
        duration_s=duration_s,
        span=span,
        record=record,
        about=record.between(*span),
        avoid=(),
        region=(),
        seed=key,
    )


def _layered(
    clip: Row, partners: Partners, operation: Literal["add", "remove"], dice: random.Random, key: str
) -> MadePlan | None:
    """A sound is added or removed: one of the clip's own where its solo tracks are known, else a partner's."""
    record, tracks = _thought_record(clip), _tracks(clip)
    track_of = _solo_tracks_by_event(clip, record)
    if tracks is not None and len(tracks) > 1 and track_of:
        place = dice.choice(sorted(track_of))
        event, number = record.events[place], track_of[place]
        remaining_record = _without(record, place)
        region = tuple(scene_events(clip["truth"])[number].get("region") or ())
        return MadePlan(
            id=f"{clip['id']}-{operation}",
            operation=operation,
            clip=clip["id"],
            reference=None,
            shared=tuple(track for track_number, track in enumerate(tracks) if track_number != number),
            changed=(tracks[number],),
            target=None,
            duration_s=clip["duration_s"],
            span=(event.start_s, min(event.end_s, clip["duration_s"])),
            record=record if operation == "add" else remaining_record,
            about=ThoughtRecord(events=[event]),
            avoid=(),
            region=region,
            seed=key,
        )
    partner = partners.find(clip)
    if partner is None:
        return None
    added = _begun_by(_thought_record(partner), clip["duration_s"])
    both = _join_records(record, added)
    return MadePlan(
        id=f"{clip['id']}-{operation}",
        operation=operation,
        clip=clip["id"],
        reference=partner["id"],
        shared=(_clip_sound_part(clip),),
        changed=(_clip_sound_part(partner),),
        target=None,
        duration_s=clip["duration_s"],
        span=(0.0, clip["duration_s"]),
        record=both if operation == "add" else record,
        about=added,
        avoid=(),
        region=(),
        seed=f"{key} {partner['digest']}",
    )


def _thought_record(clip: Row) -> ThoughtRecord:
    return ThoughtRecord.model_validate(clip["record"])


def _described_objects(clip: Row) -> list[Row]:
    """The objects of a clip, each with its description where there is one."""
    measured = clip["measured"]
    objects = measured.get("objects", {"objects": []})["objects"]
    regions = measured.get("describe", {"regions": [{}] * len(objects)})["regions"]
    return [{**clip_object, **region} for clip_object, region in zip(objects, regions, strict=True)]


def _clip_sound_part(clip: Row) -> SoundPart:
    return SoundPart(clip["path"], clip["start_s"], clip["end_s"])


def _solo_tracks_by_event(clip: Row, record: ThoughtRecord) -> dict[int, int]:
    """For each event of the record whose solo track is known, the number of the track among `_tracks`."""
    if clip["truth"] is None:
        return {}
    return numbers_in_scene(record, clip["truth"], clip["start_s"], clip["end_s"])


def _tracks(clip: Row) -> tuple[SoundPart, ...] | None:
    """The solo tracks of a composed scene, those of `scene_events` and then the backdrop; None: they are not known."""
    truth = clip["truth"]
    if truth is None:
        return None
    events = scene_events(truth)
    paths = [track_event.get("path") for track_event in (*events, *filter(None, [truth.get("backdrop")]))]
    if not all(paths) or not events:
        return None
    return tuple(SoundPart(str(path), clip["start_s"], clip["end_s"]) for path in paths)


def _without(record: ThoughtRecord, number: int) -> ThoughtRecord:
    event = record.events[number]
    remaining_events = [
        remaining_event for place, remaining_event in enumerate(record.events) if place != number
    ]
    remaining_sounds = [
        *record.background,
        *record.avoid,
        *(remaining_event.sound for remaining_event in remaining_events),
    ]
    is_gone = event.sound.casefold() not in {sound.casefold() for sound in remaining_sounds}
    avoid = [*record.avoid, event.sound] if is_gone else record.avoid
    return ThoughtRecord(events=remaining_events, background=record.background, avoid=avoid[:16])


def _begun_by(record: ThoughtRecord, duration_s: float) -> ThoughtRecord:
    """The record of a sound that is cut to this length."""
    begun = record.between(0.0, duration_s)
    events = [event.model_copy(update={"end_s": min(event.end_s, duration_s)}) for event in begun.events]
    return begun.model_copy(update={"events": events})


def _join_records(record: ThoughtRecord, added: ThoughtRecord) -> ThoughtRecord:
    events: list[ThoughtEvent] = sorted([*record.events, *added.events], key=lambda e: e.start_s)[:32]
    background = list(dict.fromkeys([*record.background, *added.background]))[:8]
    sounds = {sound.casefold() for sound in [*background, *(event.sound for event in events)]}
    avoid = [sound for sound in record.avoid if sound in added.avoid and sound.casefold() not in sounds]
    return ThoughtRecord(events=events, background=background, avoid=avoid)
