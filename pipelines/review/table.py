"""The segments of an annotation as the page shows them: every row with its corrections, sorted and filtered."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from audiollm.errors import ConfigError
from audiollm.files.atomic import check_writable, is_unicode, read_whole_lines
from pipelines.review.applied import FILTERED, SEGMENTS, Row, corrected_row
from pipelines.review.corrections import (
    CORRECTIONS,
    NO_FIELDS,
    CorrectedFields,
    Correction,
    CorrectionConflict,
    CorrectionLedger,
    CorrectionRequest,
    SegmentIdentity,
    identity_of,
)
from pipelines.review.row_facts import drop_of, has_words, hypotheses_of, measures_of, text_refusal_of

FILES = "files.jsonl"
MAX_ROWS = 200
"""Most rows of an answer."""
WORD_COLUMNS = (
    "state", "judgement", "id", "file", "speaker", "text", "text_source", "language", "kind", "split", "drop",
    "refusal",
)  # fmt: skip
"""Columns that are sorted and compared as words; the recognizers' texts are, too."""
SPAN_COLUMNS = ("start_s", "end_s", "duration_s")
HEARD = "heard."
_EDGE_S = 0.01
"""A corrected end may lie so far behind the recording's: durations of lossy formats are not exact."""


class ReviewRefusal(Exception):
    """Something that the page asks for and does not get: one sentence that says what to do.

    Args:
        status: of HTTP.
    """

    def __init__(self, sentence: str, status: int = 400) -> None:
        self.sentence, self.status = sentence, status
        super().__init__(sentence)


class RevisionConflict(ReviewRefusal):
    """Somebody else corrected the row since it was shown.

    Args:
        row: as it stands.
    """

    def __init__(self, row: Row) -> None:
        who = row["by"] or "somebody else"
        super().__init__(f"{who} corrected this segment since it was shown here.", 409)
        self.row = row


class RowFilter(BaseModel):
    """A condition on a column."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    column: str
    operation: Literal["contains", "=", "!=", ">=", "<="]
    value: str = Field("", max_length=1000)

    def accepts(self, row: Row) -> bool:
        """Whether a row fulfils it; one without the number fulfils no comparison.

        Raises:
            ReviewRefusal: the value is no number where one is compared.
        """
        value = column_value(row, self.column)
        if self.operation in (">=", "<="):
            limit = self._limit()
            if not isinstance(value, (int, float)):
                return False
            return value >= limit if self.operation == ">=" else value <= limit
        if isinstance(value, (int, float)):
            is_equal = math.isclose(value, self._limit(), rel_tol=1e-6) if self.value.strip() else False
        else:
            is_equal = (value or "").casefold() == self.value.strip().casefold()
        if self.operation == "contains":
            return self.value.strip().casefold() in str("" if value is None else value).casefold()
        return is_equal == (self.operation == "=")

    def _limit(self) -> float:
        try:
            return float(self.value.replace(",", "."))
        except ValueError:
            raise ReviewRefusal(f"{self.column} {self.operation}: {self.value!r} is no number.") from None


class TableQuery(BaseModel):
    """Which rows, in which order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    words: str = Field("", max_length=1000)
    """All of them stand somewhere in the row."""
    filters: tuple[RowFilter, ...] = Field((), max_length=20)
    sort: str = ""
    """A column; empty: by recording and time."""
    is_descending: bool = False
    after: str = Field("", max_length=64)
    """Key of the row before the first one; empty: from the beginning. It need not fit the filters any more: judging the
    rows of a page skips none of the next."""
    before: str = Field("", max_length=64)
    """Key of the row behind the last one, in place of `after`."""
    limit: int = Field(50, ge=1, le=MAX_ROWS)

    def accepts(self, row: Row) -> bool:
        """Whether a row fits.

        Raises:
            ReviewRefusal: a filter that cannot be applied.
        """
        return has_words(_searched(row), self.words) and all(limit.accepts(row) for limit in self.filters)


class SegmentEdit(BaseModel):
    """A correction as the page sends it: all corrected fields of a row, and the revision that was shown."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    operation: str = Field(pattern=r"^[A-Za-z0-9_-]{8,64}$")
    key: str = Field(max_length=64)
    revision: int = Field(ge=0)
    fields: CorrectedFields
    by: str = Field("", max_length=60)


class _Segment(NamedTuple):
    row: Row
    """Without what was measured."""
    identity: SegmentIdentity
    measures: dict[str, float]
    recording_s: float | None


class ReviewTable:
    """The segments of one annotation with their corrections; threads may ask at the same time.

    Args:
        folder: output of `annotate`.

    Raises:
        ConfigError: it is none, or cannot be written in.
        DamagedFile: its file of corrections is damaged.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / SEGMENTS).is_file():
            problem = "no such folder" if not folder.is_dir() else f"no annotation: {SEGMENTS} is not there"
            inside = sorted(str(path.parent) for path in folder.glob(f"*/{SEGMENTS}"))
            meant = f": did you mean {inside[0]}?" if inside else ""
            raise ConfigError(
                f"{folder}: {problem}", "", f"give the output folder of `audiollm annotate`{meant}"
            )
        check_writable(folder / CORRECTIONS, "")
        self.folder = folder
        self._ledger = CorrectionLedger(folder)
        self._guard = threading.RLock()
        self._state: tuple[tuple[int, int], ...] = ()
        self._segments: dict[str, _Segment] = {}
        self._shown: dict[str, Row] = {}
        self._columns: list[Row] = []
        self._operations: dict[SegmentIdentity, str] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read what an annotation or another window has written since.

        Raises:
            DamagedFile: the file of corrections is damaged.
        """
        with self._guard:
            state = tuple(_file_state(self.folder / name) for name in (SEGMENTS, FILTERED, FILES))
            if state != self._state:
                self._segments = {segment.identity.key: segment for segment in _read(self.folder)}
                self._shown, self._operations, self._state = {}, {}, state
            self._ledger.refresh()
            latest = self._ledger.latest()
            if (
                not self._shown or self._operations.keys() - latest.keys()
            ):  # their file was restored or removed
                self._shown = {
                    key: _page_row(key, segment, latest.get(segment.identity))
                    for key, segment in self._segments.items()
                }
                self._columns = _table_columns(list(self._shown.values()))
            for identity, correction in latest.items():
                if self._operations.get(identity) != correction.operation:
                    self._show(identity.key, correction)
            self._operations = {identity: correction.operation for identity, correction in latest.items()}

    def facts(self) -> Row:
        """Name, columns, counts, and the corrections that have no segment."""
        self.refresh()
        rows = list(self._shown.values())
        keys = {segment.identity for segment in self._segments.values()}
        lost = [line for identity, line in self._ledger.latest().items() if identity not in keys]
        return {
            "name": self.folder.resolve().name,
            "rows": len(rows),
            "columns": self._columns,
            "judged": sum(bool(row["judgement"]) for row in rows),
            "lost": [_lost_row(line) for line in lost if line.fields != NO_FIELDS],
        }

    def page(self, query: TableQuery) -> Row:
        """Rows of the query, the number of those before them, and of all that fit.

        Raises:
            ReviewRefusal: a filter that cannot be applied.
        """
        self.refresh()
        edge = query.before or query.after
        fitting_keys = {row["key"] for row in self._shown.values() if query.accepts(row)}
        rows = [row for key, row in self._shown.items() if key == edge or key in fitting_keys]
        rows = _sorted_segments(rows, query.sort, query.is_descending)
        places = [place for place, row in enumerate(rows) if row["key"] == edge]
        start = places[0] + 1 if places and not query.before else 0
        stop = places[0] if places and query.before else len(rows)
        listed = [row for row in rows[start:stop] if row["key"] in fitting_keys]
        listed = listed[-query.limit :] if query.before else listed[: query.limit]
        keys = [row["key"] for row in rows if row["key"] in fitting_keys]
        offset = keys.index(listed[0]["key"]) if listed else len(keys)
        return {"total": len(keys), "offset": offset, "rows": listed}

    def row(self, key: str) -> Row:
        """A row as it stands.

        Raises:
            ReviewRefusal: there is no such row.
        """
        self.refresh()
        if key not in self._shown:
            raise ReviewRefusal("This segment is no longer in the annotation: load the page again.", 404)
        return self._shown[key]

    def recording(self, key: str) -> Path:
        """The recording of a row.

        Raises:
            ReviewRefusal: there is no such row, or its recording is gone.
        """
        self.row(key)
        path = Path(str(self._segments[key].row["path"]))
        if not path.is_file():
            raise ReviewRefusal(
                f"The recording is not there: {path}. Restore it, or annotate the folder where it is now.",
                404,
            )
        return path

    def correct(self, edit: SegmentEdit) -> Row:
        """Write a correction; it is on the disk when this returns.

        Raises:
            ReviewRefusal: there is no such row, or the span is not in the recording.
            RevisionConflict: the row was corrected since it was shown.
            DamagedFile, OSError: the file of corrections cannot be written.
        """
        with self._guard:
            self.row(edit.key)
            segment = self._segments[edit.key]
            _check_edit(segment, edit.fields)
            request = CorrectionRequest(
                segment.identity, edit.fields, edit.revision, edit.operation, edit.by.strip()
            )
            try:
                self._ledger.put(request)
            except CorrectionConflict:
                raise RevisionConflict(self.row(edit.key)) from None
            return self.row(edit.key)

    def _show(self, key: str, correction: Correction) -> None:
        if (segment := self._segments.get(key)) is not None:
            self._shown[key] = _page_row(key, segment, correction)


def column_value(row: Row, column: str) -> str | float | None:
    """The value of a column of a shown row: its own, a recognizer's text, or a measure."""
    if column in WORD_COLUMNS or column in SPAN_COLUMNS:
        value = row[column]
        return value if isinstance(value, (int, float)) else str(value or "")
    if column.startswith(HEARD):
        return str(row["heard"].get(column.removeprefix(HEARD), ""))
    measure = row["measures"].get(column)
    return None if measure is None else float(measure)


def _read(folder: Path) -> Iterator[_Segment]:
    durations = {
        str(row.get("name")): row.get("duration_s")
        for row in (read_whole_lines(folder / FILES).rows if (folder / FILES).is_file() else ())
    }
    for name in (SEGMENTS, FILTERED):
        for row in read_whole_lines(folder / name).rows if (folder / name).is_file() else ():
            try:
                identity = identity_of(row)
                measures = measures_of(row)
            except (KeyError, TypeError, ValueError):
                continue  # of no annotation; the stages that read it say so
            duration_s = durations.get(identity.file)
            measures = {key: value for key, value in measures.items() if key not in SPAN_COLUMNS}
            row = {key: value for key, value in row.items() if key != "measured"}
            yield _Segment(
                row, identity, measures, duration_s if isinstance(duration_s, (int, float)) else None
            )


def _page_row(key: str, segment: _Segment, correction: Correction | None) -> Row:
    row = corrected_row(segment.row, correction)
    fields = NO_FIELDS if correction is None else correction.fields
    drop, drop_reason = drop_of(row)
    refusal, refusal_reason = text_refusal_of(row)
    machine = (row.get("correction") or {}).get("machine") or row
    judgement = {True: "accepted", False: "rejected", None: "corrected" if fields != NO_FIELDS else ""}[
        fields.keep
    ]
    names = ("id", "file", "speaker", "text", "text_source", "language", "kind", "split", "note")
    return {
        "key": key,
        **{name: _as_unicode(row.get(name)) for name in names},
        **{name: row[name] for name in SPAN_COLUMNS},
        "state": "dropped" if drop else "kept",
        "judgement": judgement,
        "drop": drop,
        "drop_reason": drop_reason,
        "refusal": refusal,
        "refusal_reason": refusal_reason,
        "heard": {_as_unicode(name): _as_unicode(text) for name, text in hypotheses_of(row).items()},
        "measures": segment.measures,
        "recording_s": segment.recording_s,
        "revision": 0 if correction is None else correction.revision,
        "fields": fields.as_row(),
        "by": "" if correction is None else correction.by,
        "machine": {name: machine.get(name) for name in ("text", "speaker", "start_s", "end_s")},
    }


def _as_unicode(value: Any) -> str:
    """A text that JSON can hold: a badly read name may have lone surrogates."""
    return str(value or "").encode(errors="backslashreplace").decode()


def _check_edit(segment: _Segment, fields: CorrectedFields) -> None:
    if not is_unicode("".join((segment.identity.file, segment.identity.digest))):
        raise ReviewRefusal("The recording's name is not valid UTF-8: rename it and annotate again.")
    if fields.end_s is None or segment.recording_s is None:
        return
    if fields.end_s > segment.recording_s + _EDGE_S:
        raise ReviewRefusal(f"The recording ends at {segment.recording_s:.3f} s: the end lies behind it.")


def _table_columns(rows: Sequence[Row]) -> list[Row]:
    """Name and kind of every column that some row has."""
    words = [name for name in WORD_COLUMNS if name == "judgement" or any(row[name] for row in rows)]
    heard = dict.fromkeys(f"{HEARD}{name}" for row in rows for name in row["heard"])
    numbers = [*SPAN_COLUMNS, *dict.fromkeys(name for row in rows for name in row["measures"])]
    return [
        *({"name": name, "is_number": False} for name in [*words, *heard]),
        *({"name": name, "is_number": True} for name in numbers),
    ]


def _sorted_segments(rows: list[Row], column: str, is_descending: bool) -> list[Row]:
    """The rows by a column; those without a value come last, however they are sorted."""
    if not column:
        ordered = sorted(rows, key=lambda row: (row["file"], row["start_s"], row["key"]))
        return ordered[::-1] if is_descending else ordered

    def key(row: Row) -> Any:
        value = column_value(row, column)
        return value.casefold() if isinstance(value, str) else value

    present = [row for row in rows if column_value(row, column) not in (None, "")]
    present_keys = {row["key"] for row in present}
    absent = [row for row in rows if row["key"] not in present_keys]
    return [*sorted(present, key=key, reverse=is_descending), *absent]


def _searched(row: Row) -> Mapping[str, Any]:
    names = (
        "id",
        "file",
        "speaker",
        "text",
        "language",
        "drop",
        "drop_reason",
        "refusal",
        "refusal_reason",
        "note",
    )
    return {"name" if name == "file" else name: row[name] for name in names} | {"heard": row["heard"]}


def _lost_row(line: Correction) -> Row:
    span = f"{line.start_ms / 1000:.2f} to {line.end_ms / 1000:.2f} s"
    return {"file": line.file, "span": span, "fields": line.fields.as_row()}


def _file_state(path: Path) -> tuple[int, int]:
    try:
        state = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return (state.st_mtime_ns, state.st_size)
