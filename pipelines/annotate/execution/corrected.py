"""Corrections of people in the walk of a segment: span and text for its steps, columns of its row, and its drop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from audiollm.files.set_aside import UNREADABLE
from pipelines.annotate.input.sources import RecordingSource
from pipelines.review.applied import MACHINE_COLUMNS, REJECTED, correction_column, replaced_columns
from pipelines.review.corrections import CorrectedFields, Correction
from pipelines.steps.results import FAILED, Row
from pipelines.steps.rules import Drop
from pipelines.steps.step import Value

_OF_SOUND = frozenset({"signal", "quality", "events", "fingerprint", "consensus"})
"""Steps that do not read the text: beside the recognizers, those up to `consensus`."""


def corrected_segment(
    segment: Mapping[str, Any], fields: CorrectedFields, activity: Value
) -> Mapping[str, Any]:
    """The segment with the span that a person gave, and the speech in it.

    Args:
        activity: value of the step `voice_activity`.
    """
    if fields.start_s is None or fields.end_s is None:
        return segment
    start_s, end_s = fields.start_s, min(fields.end_s, max(activity["duration_s"], segment["end_s"]))
    speech_s = sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in activity["spans"])
    return {
        **segment,
        "start_s": start_s,
        "end_s": end_s,
        "speech_s": round(speech_s, 6),
        "overlap_s": min(segment["overlap_s"], end_s - start_s),
    }


def corrected_source(source: RecordingSource, fields: CorrectedFields) -> RecordingSource:
    """The source as steps read it that need the text: with the text that a person gave."""
    if fields.text is None:
        return source
    return replace(source, metadata=source.metadata._replace(text=fields.text))


def is_of_sound(step: str, recognizers: tuple[str, ...]) -> bool:
    """Whether a step's value does not depend on the text: a corrected one does not make it run again."""
    return step in _OF_SOUND or step in recognizers


def add_correction(row: Row, correction: Correction, as_cut: Mapping[str, Any], drop: Drop | None) -> Row:
    """The row with what a person corrected.

    Args:
        row: with the machine's text and speaker.
        as_cut: the segment before its span was corrected.
        drop: by the rules.
    """
    machine = {name: row[name] for name in MACHINE_COLUMNS}
    machine |= {"start_s": as_cut["start_s"], "end_s": as_cut["end_s"]}
    machine["dropped"] = drop.as_row() if drop else None
    replaced = replaced_columns(correction.fields) | {"start_s": row["start_s"], "end_s": row["end_s"]}
    return {**row, **replaced, "correction": correction_column(correction, machine)}


def overruled_drop(drop: Drop | None, fields: CorrectedFields) -> Drop | None:
    """The drop after the person's word. A recording that cannot be read stays dropped."""
    if fields.keep is None or (drop and drop.step == "signal" and drop.kind in (FAILED, UNREADABLE)):
        return drop
    return None if fields.keep else Drop(**REJECTED)
