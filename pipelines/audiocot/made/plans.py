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
from pipelines.steps.spool import Row

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
        kept: parts that are in both.
        changed: parts that are in the output of `add` and in the input of `remove` and `extract` alone; in `extract`
            the output is `wanted`.
        wanted: index of the one kept part that `extract` wants; None: all kept parts.
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
    kept: tuple[SoundPart, ...]
    changed: tuple[SoundPart, ...]
    wanted: int | None
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
    objects = _objects(clip)
    reference = partners.find(clip)
    if not objects or reference is None:
        return
    record, avoided = _record(clip), tuple(_record(reference).sounds())
    tracks, track_of = _tracks(clip), _named(clip, record)
    for number, found in enumerate(objects):
        event = found["event"]
        if event is None or event >= len(record.events):
            continue
        wanted = record.events[event]
        if "manner" in found:
            wanted = wanted.model_copy(update={"manner": found["manner"]})
        has_solo = tracks is not None and event in track_of
        # out of a clip without solo tracks, all of its sound is wanted
        heard = {sound.casefold() for sound in ([wanted.sound] if has_solo else record.sounds())}
        known = dict.fromkeys([*(record.sounds() if has_solo else ()), *avoided])
        avoid = tuple(sound for sound in known if sound.casefold() not in heard)[:16]
        about = ThoughtRecord(events=[wanted], avoid=list(avoid))
        yield MadePlan(
            id=f"{clip['id']}-extract-{number}",
            operation="extract",
            clip=clip["id"],
            reference=reference["id"],
            kept=tracks if has_solo and tracks is not None else (_whole(clip),),
            changed=(_whole(reference),),
            wanted=track_of[event] if has_solo else None,
            duration_s=clip["duration_s"],
            span=(0.0, clip["duration_s"]),
            record=about if has_solo else record.model_copy(update={"avoid": list(avoid)}),
            about=about,
            avoid=avoid,
            region=tuple(found["region"]),
            seed=f"{draw_key(clip, f'extract {number} {seed}')} {reference['digest']}",
        )


# Private


def _hidden(clip: Row, operation: Literal["extend", "inpaint"], dice: random.Random, key: str) -> MadePlan:
    """The end, or a span, is to be made from the rest."""
    duration_s, record = clip["duration_s"], _record(clip)
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
        kept=(_whole(clip),),
        changed=(),
        wanted=None,
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
    record, tracks = _record(clip), _tracks(clip)
    track_of = _named(clip, record)
    if tracks is not None and len(tracks) > 1 and track_of:
        place = dice.choice(sorted(track_of))
        event, number = record.events[place], track_of[place]
        rest = _without(record, place)
        region = tuple(scene_events(clip["truth"])[number].get("region") or ())
        return MadePlan(
            id=f"{clip['id']}-{operation}",
            operation=operation,
            clip=clip["id"],
            reference=None,
            kept=tuple(track for other, track in enumerate(tracks) if other != number),
            changed=(tracks[number],),
            wanted=None,
            duration_s=clip["duration_s"],
            span=(event.start_s, min(event.end_s, clip["duration_s"])),
            record=record if operation == "add" else rest,
            about=ThoughtRecord(events=[event]),
            avoid=(),
            region=region,
            seed=key,
        )
    other = partners.find(clip)
    if other is None:
        return None
    added = _begun_by(_record(other), clip["duration_s"])
    both = _joined(record, added)
    return MadePlan(
        id=f"{clip['id']}-{operation}",
        operation=operation,
        clip=clip["id"],
        reference=other["id"],
        kept=(_whole(clip),),
        changed=(_whole(other),),
        wanted=None,
        duration_s=clip["duration_s"],
        span=(0.0, clip["duration_s"]),
        record=both if operation == "add" else record,
        about=added,
        avoid=(),
        region=(),
        seed=f"{key} {other['digest']}",
    )


def _record(clip: Row) -> ThoughtRecord:
    return ThoughtRecord.model_validate(clip["record"])


def _objects(clip: Row) -> list[Row]:
    """The objects of a clip, each with its description where there is one."""
    measured = clip["measured"]
    objects = measured.get("objects", {"objects": []})["objects"]
    regions = measured.get("describe", {"regions": [{}] * len(objects)})["regions"]
    return [{**found, **region} for found, region in zip(objects, regions, strict=True)]


def _whole(clip: Row) -> SoundPart:
    return SoundPart(clip["path"], clip["start_s"], clip["end_s"])


def _named(clip: Row, record: ThoughtRecord) -> dict[int, int]:
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
    paths = [each.get("path") for each in (*events, *filter(None, [truth.get("backdrop")]))]
    if not all(paths) or not events:
        return None
    return tuple(SoundPart(str(path), clip["start_s"], clip["end_s"]) for path in paths)


def _without(record: ThoughtRecord, number: int) -> ThoughtRecord:
    event = record.events[number]
    rest = [other for place, other in enumerate(record.events) if place != number]
    known = [*record.background, *record.avoid, *(other.sound for other in rest)]
    is_gone = event.sound.casefold() not in {sound.casefold() for sound in known}
    avoid = [*record.avoid, event.sound] if is_gone else record.avoid
    return ThoughtRecord(events=rest, background=record.background, avoid=avoid[:16])


def _begun_by(record: ThoughtRecord, duration_s: float) -> ThoughtRecord:
    """The record of a sound that is cut to this length."""
    begun = record.between(0.0, duration_s)
    events = [event.model_copy(update={"end_s": min(event.end_s, duration_s)}) for event in begun.events]
    return begun.model_copy(update={"events": events})


def _joined(record: ThoughtRecord, added: ThoughtRecord) -> ThoughtRecord:
    events: list[ThoughtEvent] = sorted([*record.events, *added.events], key=lambda e: e.start_s)[:32]
    background = list(dict.fromkeys([*record.background, *added.background]))[:8]
    heard = {sound.casefold() for sound in [*background, *(event.sound for event in events)]}
    avoid = [sound for sound in record.avoid if sound in added.avoid and sound.casefold() not in heard]
    return ThoughtRecord(events=events, background=background, avoid=avoid)
