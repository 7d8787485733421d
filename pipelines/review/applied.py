"""Corrections in the rows of an annotation: with what a person corrected, and back to what the machine found."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from audiollm.data.records.text_origin import TEXT_RECOGNIZERS
from audiollm.files.atomic import file_digest, read_whole_lines
from audiollm.files.set_aside import set_aside_row
from pipelines.review.corrections import (
    CORRECTIONS,
    NO_FIELDS,
    PERSON,
    CorrectedFields,
    Correction,
    SegmentIdentity,
    identity_of,
    read_corrections,
    segment_identity,
)

Row = dict[str, Any]
SEGMENTS, FILTERED = "segments.jsonl", "filtered.jsonl"
MACHINE_COLUMNS = ("text", "text_source", "text_refused", "speaker", "start_s", "end_s")
"""Columns that a correction replaces, and `correction.machine` keeps."""
REJECTED: Row = {
    "step": "review", "rule": "", "kind": "rejected by a person", "value": None, "threshold": None, "reason": "",
}  # fmt: skip
"""The drop of a segment that a person rejected."""
UNMATCHED = "correction without a segment"
_BY_TEXT = "alignment"
"""The step whose values are wrong for another text or span: the times of words."""


class CorrectionIndex:
    """The corrections of an annotation, by the segments of its present recordings.

    Args:
        corrections: as `read_corrections` gives them.
        files: names of the recordings; a correction of a name that is not among them goes by content alone.
    """

    def __init__(
        self, corrections: Mapping[SegmentIdentity, Correction], files: Collection[str] = ()
    ) -> None:
        names = set(files)
        self._exact = {identity: line for identity, line in corrections.items() if line.fields != NO_FIELDS}
        self._renamed = {
            identity._replace(file=""): correction
            for identity, correction in self._exact.items()
            if identity.file not in names
        }

    def of_segment(self, digest: str, file: str, start_s: float, end_s: float) -> Correction | None:
        """The correction of a segment as the annotation cut it; None: nobody corrected it."""
        identity = segment_identity(digest, file, start_s, end_s)
        return self._exact.get(identity) or self._renamed.get(identity._replace(file=""))

    def without_segment(self, matched: Collection[SegmentIdentity]) -> list[Correction]:
        """The corrections of which no segment is there any more."""
        return [correction for identity, correction in self._exact.items() if identity not in matched]

    def __len__(self) -> int:
        return len(self._exact)


NO_CORRECTIONS = CorrectionIndex({})


def correction_column(correction: Correction, machine: Mapping[str, Any]) -> Row:
    """The column `correction` of a row.

    Args:
        machine: values of `MACHINE_COLUMNS`, `dropped` and `text_recognizers` without the correction.
    """
    return {
        "operation": correction.operation,
        "revision": correction.revision,
        "by": correction.by,
        "at": correction.at,
        "identity": list(correction.identity),
        "fields": correction.fields.as_row(),
        "machine": dict(machine),
    }


def replaced_columns(fields: CorrectedFields) -> Row:
    """The columns that a correction replaces."""
    columns: Row = {}
    if fields.text is not None:
        columns |= {"text": fields.text, "text_source": PERSON, "text_refused": None}
    if fields.speaker is not None:
        columns["speaker"] = fields.speaker
    if fields.start_s is not None:
        columns |= {"start_s": fields.start_s, "end_s": fields.end_s}
    return columns


def corrected_row(row: Row, correction: Correction | None) -> Row:
    """The row with this correction and no other; the row itself where it has it already.

    Values that were measured for another text or span stay, but for the times of words.

    Args:
        row: of `segments.jsonl` or `filtered.jsonl`.
        correction: the one that stands; None or without fields: the machine's values.
    """
    fields = NO_FIELDS if correction is None else correction.fields
    present = row.get("correction")
    if present is None and fields == NO_FIELDS:
        return row
    if present is not None and correction is not None and present["operation"] == correction.operation:
        return row
    columns = [*MACHINE_COLUMNS, "dropped", *([TEXT_RECOGNIZERS] if TEXT_RECOGNIZERS in row else [])]
    machine = present["machine"] if present else {name: row.get(name) for name in columns}
    result = {key: value for key, value in row.items() if key not in ("correction", "dropped")}
    result |= {name: machine[name] for name in MACHINE_COLUMNS} | replaced_columns(fields)
    result["duration_s"] = round(result["end_s"] - result["start_s"], 6)
    if correction is not None and fields != NO_FIELDS:
        result["correction"] = correction_column(correction, machine)
    dropped = machine.get("dropped") if fields.keep is None else None if fields.keep else REJECTED
    if dropped is not None:
        result["dropped"] = dropped
    if any(result[name] != row.get(name) for name in ("text", "start_s", "end_s")):
        measured = row.get("measured") or {}
        result["measured"] = {step: value for step, value in measured.items() if step != _BY_TEXT}
    result.pop(TEXT_RECOGNIZERS, None)
    if TEXT_RECOGNIZERS in machine and result["text"] == machine["text"]:
        result[TEXT_RECOGNIZERS] = machine[TEXT_RECOGNIZERS]
    return result


def corrected_rows(folder: Path) -> list[Row]:
    """All segments of an annotation with their corrections; those that are left out have a column `dropped`.

    Raises:
        DamagedFile: the file of corrections is damaged.
    """
    corrections = read_corrections(folder)
    rows = []
    for path in (folder / SEGMENTS, folder / FILTERED):
        for row in read_whole_lines(path).rows if path.is_file() else ():
            try:
                rows.append(corrected_row(row, corrections.get(identity_of(row))))
            except (KeyError, TypeError, ValueError):
                rows.append(row)
    return rows


class RowDrop(NamedTuple):
    """A row that is left out since people corrected it: its id, and the kind of the drop."""

    id: str
    kind: str


class SegmentLine(NamedTuple):
    """A line of a file of segments: where it is, its JSON, and why it is left out."""

    place: str
    line: bytes
    drop: RowDrop | None = None


def corrected_lines(path: Path) -> Iterator[SegmentLine]:
    """The lines of a file of segments with the corrections that they lack.

    Beside an annotation's `segments.jsonl` rows of `filtered.jsonl` are read, too: a person may have accepted them.
    Lines that are no row of an annotation come as they are.

    Raises:
        DamagedFile: the file of corrections is damaged.
    """
    is_annotation = path.name == SEGMENTS and (path.parent / CORRECTIONS).is_file()
    corrections = read_corrections(path.parent) if is_annotation else {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            yield _corrected_line(f"{path}:{number}", line, corrections)
    filtered = path.with_name(FILTERED)
    if not corrections or not filtered.is_file():
        return
    for number, line in enumerate(filtered.read_bytes().split(b"\n"), start=1):
        result = _corrected_line(f"{filtered}:{number}", line, corrections)
        if result.line is not line and result.drop is None:
            yield result


def correction_digests(*segments: Path) -> list[str]:
    """Lines for the fingerprint of a stage that reads segments: the corrections that lie beside them."""
    paths = [path.with_name(CORRECTIONS) for path in map(Path, segments) if path.name == SEGMENTS]
    return [f"{CORRECTIONS} {file_digest(path)}" for path in paths if path.is_file()]


def unmatched_rows(corrections: Iterable[Correction], digests: Mapping[str, str]) -> list[Row]:
    """Rows of `set_aside.jsonl` of corrections whose segment is gone.

    Args:
        digests: name of each present recording -> its digest.
    """
    return [
        set_aside_row(
            "annotate", correction.file, UNMATCHED,
            f"{_describe_correction(correction)}: {_why_gone(correction, digests)}",
            start_s=correction.start_ms / 1000, end_s=correction.end_ms / 1000,
        )
        for correction in corrections
    ]  # fmt: skip


def _corrected_line(
    place: str, line: bytes, corrections: Mapping[SegmentIdentity, Correction]
) -> SegmentLine:
    if not corrections:
        return SegmentLine(place, line)
    try:
        row = json.loads(line)
        result = corrected_row(row, corrections.get(identity_of(row)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return SegmentLine(place, line)
    if result is row:
        return SegmentLine(place, line)
    drop = result.get("dropped")
    row_drop = None if drop is None else RowDrop(str(row.get("id", "")), str(drop["kind"]))
    return SegmentLine(place, json.dumps(result, ensure_ascii=False).encode(), row_drop)


def _describe_correction(correction: Correction) -> str:
    values = ", ".join(f"{name} {value!r}" for name, value in correction.fields.as_row().items())
    return f"{values} from {correction.start_ms / 1000:.3f} to {correction.end_ms / 1000:.3f} s"


def _why_gone(correction: Correction, digests: Mapping[str, str]) -> str:
    if correction.digest in digests.values() or correction.file in digests:
        return "the recording is cut otherwise now, or has another content"
    return "the recording is not in the input"
