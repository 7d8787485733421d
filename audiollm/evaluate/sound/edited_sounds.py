"""Edited sounds: whether the sound is there or gone, the others are still there, and the track is whole around it.

A list has a row for each edit, as `edit_sounds` writes it: the track before and after, the span, the sound that was
edited, the other sounds, and if known the track that a perfect edit gives.

Shapes: N samples, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from audiollm.audio import AudioError, Waveform, load
from audiollm.audio.mixing import mix, mono_channel
from audiollm.errors import ConfigError
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.statistics import share
from audiollm.evaluate.report.suite import Example, ScoreTable, Sound
from audiollm.evaluate.sound.generated_sounds import TargetEvent, beside_list, parse_target_event
from audiollm.evaluate.sound.sound_judges import SoundClasses
from audiollm.evaluate.sound.sound_measures import (
    ONSET_TOLERANCE_S,
    SAME_SOUND_DB,
    band_distance,
    border_excess,
    energy_onsets,
    is_far_from,
)
from audiollm.files.atomic import read_jsonl
from audiollm.flow.editing.tracks import read_track
from audiollm.pages.formats import with_interval

UNTOUCHED = "outside of the span unchanged"
DONE = "the sound is heard, or gone"
DONE_PERFECTLY = "the same of a perfect edit"
OTHER_SOUNDS = "other sounds still recognized"
BORDERS = "borders as smooth as the track"
BORDERS_PERFECT = "the same places of a perfect edit"
BEGINS = f"what is added begins within {ONSET_TOLERANCE_S:g} s"
ANOTHER = "what is added is another sound of the scene"
NEARER = "nearer to a perfect edit than the track was"
FAR_FROM_PERFECT = "far from a perfect edit"
INAUDIBLE_DB = 0.5
"""Band distance below which an edit changes nothing that is heard."""
VERDICT, WHY = "verdict", "why"
"""Whether an edit is what was asked for, by the judge and by its distance from a perfect edit; and the reason."""
MEASURES = (UNTOUCHED, DONE, DONE_PERFECTLY, OTHER_SOUNDS, NEARER, BEGINS, ANOTHER, BORDERS, BORDERS_PERFECT)


@dataclass(frozen=True)
class EditedSound:
    """An edit of a track with what is known of it."""

    id: str
    case: str
    """The operation, and how the sound was named: `add by words`."""
    operation: str
    path: Path
    before: Path
    reference: Path | None
    """The track that a perfect edit gives."""
    span_s: tuple[float, float]
    event: TargetEvent
    other_events: tuple[TargetEvent, ...]
    caption: str


@dataclass(frozen=True)
class EditsOutcome:
    """The measures of all edits."""

    result: Mapping[str, Mapping[str, Any]]
    """Case -> measure -> its share with interval."""
    table: ScoreTable
    rows: Sequence[Mapping[str, Any]]
    examples: Sequence[Example]


def read_edited(listing: Path) -> list[EditedSound]:
    """Read the `edited.jsonl` of `edit_sounds`; paths are relative to the list, or to the working directory.

    Raises:
        ConfigError: a row without its tracks, its span or its sound.
    """
    rows = read_jsonl(listing, "give the edited.jsonl of the stage edit_sounds")
    edited = []
    for number, row in enumerate(rows, start=1):
        try:
            first, last = (float(second) for second in row["span"])
            edit = EditedSound(
                id=str(row["id"]),
                case=f"{row['operation']} by {row['by']}",
                operation=str(row["operation"]),
                path=beside_list(row["audio"], listing.parent),
                before=beside_list(row["before"], listing.parent),
                reference=beside_list(row["reference"], listing.parent) if row.get("reference") else None,
                span_s=(first, last),
                event=parse_target_event(row["event"]),
                other_events=tuple(parse_target_event(event) for event in row.get("others") or ()),
                caption=str(row.get("caption") or ""),
            )
        except (KeyError, TypeError, ValueError) as error:
            remedy = (
                "a row has id, operation, by, before, audio, span, and event with label, start_s and end_s"
            )
            raise ConfigError(f"unreadable edit ({error!r})", f"{listing}:{number}", remedy) from None
        edited.append(edit)
    return edited


def judge_edits(
    edits: Sequence[EditedSound],
    classes: SoundClasses | None,
    advance: Callable[[str], None] = lambda what: None,
) -> EditsOutcome:
    """Measure all edits.

    Args:
        classes: judge of what is heard; None: only what needs no judge is measured.
    """
    rows: list[dict[str, Any]] = []
    for edit in edits:
        try:
            values = _measure_edit(edit, classes)
        except AudioError as error:
            values = {"unreadable": str(error)}
        rows.append({"id": edit.id, "case": edit.case, "path": str(edit.path), **values})
        advance(edit.id)
    result = {}
    for case in dict.fromkeys(edit.case for edit in edits):
        case_rows = [row for row in rows if row["case"] == case]
        result[case] = {name: share(_collect_outcomes(case_rows, name)) for name in MEASURES}
    cells = [[case, *(_share_cell(table[name]) for name in MEASURES)] for case, table in result.items()]
    note = (
        "Smooth: the spectral flux at the borders is within its 95th percentile in the same track outside of the "
        "span. By chance it is not, even in a track that nobody edited: compare the column beside it."
    )
    table = ScoreTable("Edits", ["edit", *MEASURES], cells, note)
    order = sorted(range(len(edits)), key=lambda n: rows[n].get(VERDICT) is True)
    return EditsOutcome(result, table, rows, [_edit_example(edits[n], rows[n]) for n in order])


# Private


def _measure_edit(edit: EditedSound, classes: SoundClasses | None) -> dict[str, Any]:
    after, before = load(edit.path), load(edit.before)
    real = load(edit.reference) if edit.reference is not None else None
    measures: dict[str, Any] = {UNTOUCHED: _is_untouched(edit)}
    for name, sound in ((BORDERS, after), (BORDERS_PERFECT, real)):
        if sound is not None:
            try:
                measures[name] = (
                    border_excess(sound.mono().samples_CN[0].numpy(), sound.sample_rate, edit.span_s) <= 1
                )
            except MetricError as error:
                measures[f"{name}, n/a"] = error.reason
    if real is not None and edit.operation in ("add", "remove"):
        try:
            gap, gap_before = (_distance_in_span(sound, real, edit.span_s) for sound in (after, before))
            measures[NEARER] = gap < gap_before
        except MetricError as error:
            measures[f"{NEARER}, n/a"] = error.reason
    added = _added_sound(after, before) if edit.operation == "add" else None
    if added is not None:
        near_s = np.abs(energy_onsets(added) - edit.event.start_s)
        measures[BEGINS] = bool((near_s <= ONSET_TOLERANCE_S).any())
    if classes is None or edit.event.label not in classes.labels:
        return measures
    label = edit.event.label

    def is_done(recognized_label: str) -> bool:
        return recognized_label != label if edit.operation == "remove" else recognized_label == label

    measures["heard"] = _recognize_event(after, edit.event, classes)
    measures[DONE] = is_done(measures["heard"])
    if real is not None:
        measures[DONE_PERFECTLY] = is_done(_recognize_event(real, edit.event, classes))
    recognizable = [event for event in edit.other_events if event.end_s <= before.duration_s]
    recognizable = [
        event for event in recognizable if _recognize_event(before, event, classes) == event.label
    ]
    measures[OTHER_SOUNDS] = [
        _recognize_event(after, event, classes) == event.label for event in recognizable
    ]
    different = {event.label for event in edit.other_events} - {label}
    if added is not None and different:
        measures[ANOTHER] = _recognize_event(added, edit.event, classes) in different
    measures[VERDICT], measures[WHY] = _verdict(edit, measures, after, before, real)
    return measures


def _verdict(
    edit: EditedSound, measured: Mapping[str, Any], after: Waveform, before: Waveform, real: Waveform | None
) -> tuple[bool | None, str]:
    """Whether the edit is what was asked for, and why; None where nobody can say.

    The judge knows its own classes alone and names noise after one of them; and it misses some sounds in perfect
    edits. What it hears counts where it hears a perfect edit, and where the edit is not far from that.
    """
    is_done: bool = measured[DONE]
    if real is None:
        return is_done, ""
    first, last = (round(second * real.sample_rate) for second in edit.span_s)
    channel = mono_channel(real.samples_CN)
    after_N, real_N, before_N = (
        mix(track.samples_CN[:, first:last], channel)[0].double().numpy() for track in (after, real, before)
    )
    before_N = np.pad(before_N, (0, max(0, len(real_N) - len(before_N))))
    changes_sound = edit.operation in ("add", "remove")
    nothing_N = before_N if changes_sound else np.zeros_like(real_N)
    try:
        gap, whole_gap = (
            band_distance(track_N, real_N, real.sample_rate) for track_N in (after_N, nothing_N)
        )
        if gap < min(SAME_SOUND_DB, whole_gap / 2):
            return True, "as a perfect edit sounds"
        if changes_sound and band_distance(after_N, before_N, real.sample_rate) < INAUDIBLE_DB:
            return False, "nothing audible is changed"
        if edit.operation == "remove" and measured.get(NEARER) is False:
            return False, "no nearer to a perfect edit than the track was"
        if is_far_from(after_N, real_N, nothing_N, real.sample_rate):
            return False, FAR_FROM_PERFECT
    except MetricError:  # the span is shorter than a distance can tell
        pass
    if not measured[DONE_PERFECTLY]:
        return None, "the judge misses it in a perfect edit, too"
    return is_done, ""


def _added_sound(after: Waveform, before: Waveform) -> Waveform:
    """The sound that an edit added: the edited track minus the track before."""
    return Waveform((after.samples_CN - before.samples_CN).contiguous(), after.sample_rate)


def _distance_in_span(sound: Waveform, real: Waveform, span_s: tuple[float, float]) -> float:
    """The distance of a track from a perfect edit within the span, in dB: to take away all is far from that, too.

    Raises:
        MetricError: the span is shorter than the distance can tell.
    """
    first, last = (round(second * real.sample_rate) for second in span_s)
    channel = mono_channel(real.samples_CN)
    cut_N, real_N = (
        mix(track.samples_CN[:, first:last], channel)[0].double().numpy() for track in (sound, real)
    )
    return band_distance(cut_N, real_N, real.sample_rate)


def _is_untouched(edit: EditedSound) -> bool:
    """Whether every sample outside of the span is the input's own, in the input's format."""
    before, after = read_track(edit.before), read_track(edit.path)
    if (before.sample_rate, before.subtype, before.format) != (
        after.sample_rate,
        after.subtype,
        after.format,
    ):
        return False
    first, last = (round(second * before.sample_rate) for second in edit.span_s)
    old_NC, new_NC = before.samples_NC, after.samples_NC
    return np.array_equal(old_NC[:first], new_NC[:first]) and np.array_equal(old_NC[last:], new_NC[last:])


def _recognize_event(sound: Waveform, event: TargetEvent, classes: SoundClasses) -> str:
    """The class of the sound at the event's place; empty for silence."""
    rate = sound.sample_rate
    cut_CN: Tensor = sound.samples_CN[:, round(event.start_s * rate) : round(event.end_s * rate)]
    try:
        return classes.labels[int(classes.logits(Waveform(cut_CN.contiguous(), rate)).argmax())]
    except ValueError:
        return ""


def _collect_outcomes(rows: Sequence[Mapping[str, Any]], name: str) -> list[bool]:
    values: list[bool] = []
    for row in rows:
        value = row.get(name)
        values += value if isinstance(value, list) else [] if value is None else [value]
    return values


def _share_cell(table: Mapping[str, Any]) -> str:
    return f"{with_interval(table, 'accuracy')}, n = {table['n']}" if table["n"] else ""


def _edit_example(edit: EditedSound, row: Mapping[str, Any]) -> Example:
    first, last = edit.span_s
    lines = [("edit", f"{edit.case}, {first:.2f} to {last:.2f} s"), ("asked", edit.caption)]
    if "heard" in row:
        lines.append(("heard at its place", row["heard"] or "(silence)"))
        mark = {True: "✓", False: "✗", None: "undecided"}[row[VERDICT]]
        lines.append(("as asked", f"{mark} {row[WHY]}".strip()))
    sounds = [Sound("before", edit.before), Sound("after", edit.path)]
    if edit.reference is not None:
        sounds.append(Sound("a perfect edit", edit.reference))
    return Example(f"{edit.id}: {edit.case}", [line for line in lines if line[1]], sounds)
