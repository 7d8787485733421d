"""Given transcripts: rows of a CSV or JSONL, or a pattern over file names; and the condition of the test set."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from audiollm.data.tables.columns import NAME_FIELDS, USUAL_COLUMNS, ColumnFinder, is_missing
from audiollm.data.tables.rows import checked_rows
from audiollm.errors import ConfigError, suggestion
from pipelines.steps.inputs import FileList

_FIELD = re.compile(r"\{([^{}]*)\}")
_EXTENSION = re.compile(r"\.[A-Za-z0-9]{1,5}$")
_CONDITION = re.compile(r"^\s*([A-Za-z_]\w*)\s*(<=|>=|==|!=|<|>)\s*(.+?)\s*$")
_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_COLUMN_NAMES = {"audio": "path", "text": "text"}
"""Names of the required columns, as errors and conditions call them."""
_NO_TEXT_REMEDY = ": write it, or let a recognizer write it by the setting untranscribed=recognize"


class TranscriptError(ValueError):
    """Transcripts that cannot be used; the message names the place and the problem."""


@dataclass(frozen=True)
class Transcript:
    """Transcript and metadata given for one recording; `fields` holds every column or pattern field, as text. In a
    list of recordings `text` may be empty: none is given."""

    text: str
    speaker: str | None
    split: str | None
    fields: Mapping[str, str]
    where: str


# --------------------------------------------------------------------------------------------- patterns


def is_pattern(transcripts: str) -> bool:
    return "{" in transcripts


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern such as `{text}_{speaker}_{take}.wav` as a regular expression over a path's last parts.

    Every field but `text` stops at the literal that follows or precedes it, so that a text may itself hold
    underscores. The extension is optional; given, it must match. A `/` makes fields of folders.

    Raises:
        TranscriptError: no `{text}`, a doubled or empty field, two fields that touch.
    """
    names = _FIELD.findall(pattern)
    if not all(name.isidentifier() for name in names) or "{" in _FIELD.sub("", pattern) + "".join(names):
        raise TranscriptError(f"{pattern!r}: a field is a name in braces, as in {{speaker}}")
    if "text" not in names:
        raise TranscriptError(f"{pattern!r}: needs a field {{text}}")
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise TranscriptError(f"{pattern!r}: the field {{{min(doubled)}}} occurs twice")
    if "}{" in pattern:
        raise TranscriptError(f"{pattern!r}: two fields touch; put a character such as _ between them")
    extension = _EXTENSION.search(pattern)
    stem = pattern[: extension.start()] if extension else pattern
    pieces = _FIELD.split(stem)
    expression = ""
    for index, piece in enumerate(pieces):
        if index % 2 == 0:
            expression += re.escape(piece)
        elif piece == "text":
            expression += "(?P<text>[^/]+)"
        else:
            beside = re.escape(pieces[index - 1][-1:] + pieces[index + 1][:1])
            expression += f"(?P<{piece}>[^/{beside}]+)"
    return re.compile(expression + (f"(?i:{re.escape(extension.group())})" if extension else ""))


def match_pattern(pattern: str, expression: re.Pattern[str], relative: str) -> Transcript | None:
    """Read a transcript from a file's name; None where the name does not match.

    Underscores in `text` stand for spaces, as a file name can hardly hold those.

    Args:
        relative: the path below the input folder, with forward slashes.
    """
    path = PurePosixPath(relative)
    parts = (path if _EXTENSION.search(pattern) else path.with_suffix("")).parts
    depth = pattern.count("/") + 1
    match = expression.fullmatch("/".join(parts[-depth:])) if len(parts) >= depth else None
    if match is None:
        return None
    fields = dict(match.groupdict())
    text = " ".join(fields["text"].replace("_", " ").split())
    if not text:
        return None
    return Transcript(text, fields.get("speaker"), fields.get("split"), fields, f"the pattern {pattern!r}")


# ------------------------------------------------------------------------------------------------ files


def read_transcripts(path: Path, texts_required: bool = True) -> FileList:
    """The rows of a transcripts file as (path as written, transcript), in their order.

    A table with a header, JSON lines or a JSON array; a column of paths and one of texts are required (`path`, `audio`,
    `file`, ...; `text`, `sentence`, ...: see `columns.USUAL_COLUMNS`). Speaker, language and split are read, and other
    columns serve the test condition.

    Args:
        texts_required: refuse a row without a text; else its text is empty.

    Raises:
        TranscriptError: a missing column, a malformed row, no text, the same path twice; with file and line.
    """
    listed = _read_transcript_rows(path, ("audio", "text"), () if texts_required else ("text",))
    return FileList(
        [(fields["path"], transcript_of(fields, where)) for where, fields in listed[0]], listed[1]
    )


def read_manifest(path: Path) -> FileList:
    """The rows of a list of recordings as (path as written, what is given for it): `read_transcripts` without the need
    for a text. None: the row has a path alone.

    Raises:
        TranscriptError: as `read_transcripts`.
    """
    rows, notes = _read_transcript_rows(path, ("audio",))
    return FileList(
        [
            (fields["path"], None if set(fields) == {"path"} else transcript_of(fields, where))
            for where, fields in rows
        ],
        notes,
    )


def transcript_of(fields: Mapping[str, str], where: str) -> Transcript:
    """Make the transcript of a row, which may lack a text."""
    text = fields.get("text", "")
    return Transcript(
        text if text.strip() else "",
        fields.get("speaker") or None,
        fields.get("split") or None,
        fields,
        where,
    )


def _read_transcript_rows(
    path: Path, required: Sequence[str], may_be_empty: Sequence[str] = ()
) -> tuple[list[tuple[str, dict[str, str]]], tuple[str, ...]]:
    """The rows of a file, each with where it stands, and notes on the file; no path twice."""
    try:
        listed = checked_rows(path, [name for names in USUAL_COLUMNS.values() for name in names])
        finder = ColumnFinder(listed.columns, {}, str(path))
    except ConfigError as error:
        raise TranscriptError(f"{error.where}  {error.message}: {error.remedy}") from None
    for name in required:
        if listed.rows and name not in finder.columns:
            usual = ", ".join(USUAL_COLUMNS[name])
            raise TranscriptError(
                f"{path}  no column {_COLUMN_NAMES[name]!r} in {','.join(listed.columns)!r}; usual names are {usual}"
            )
    result: list[tuple[str, dict[str, str]]] = []
    lines: dict[str, str] = {}
    for where, row in listed.rows:
        columns = finder.of_row(row)
        # conditions name other columns as they are written, too
        fields = {
            column: _transcript_value(column, value)
            for column, value in row.items()
            if column != columns.get("audio")
        }
        fields |= {
            _COLUMN_NAMES.get(field, field): _transcript_value(field, row[column])
            for field, column in columns.items()
        }
        fields["path"] = fields.get("path", "").strip()
        for name in required:
            value = row.get(columns.get(name, ""))
            if name not in may_be_empty and (not isinstance(value, str) or is_missing(value)):
                remedy = _NO_TEXT_REMEDY if name == "text" else ""
                raise TranscriptError(f"{where}  has no {_COLUMN_NAMES[name]}{remedy}")
        if fields["path"] in lines:
            raise TranscriptError(f"{where}  {fields['path']!r} stands at {lines[fields['path']]} already")
        lines[fields["path"]] = where
        result.append((where, fields))
    if not result:
        raise TranscriptError(f"{path}  holds no rows")
    return result, (*listed.notes, f"{path.name}: {finder.note()}")


def _transcript_value(field: str, value: Any) -> str:
    return "" if is_missing(value, is_name=field in NAME_FIELDS) else str(value)


# ------------------------------------------------------------------------------------------- conditions


@dataclass(frozen=True)
class Condition:
    """Comparisons over a transcript's fields, all of which must hold."""

    text: str
    comparisons: Sequence[tuple[str, str, str]] = field(default_factory=tuple)

    def holds(self, transcript: Transcript) -> bool:
        """Whether a transcript meets all comparisons; numbers compare as numbers, other values as text.

        Raises:
            TranscriptError: no such field, or an order asked of what is not a number.
        """
        return all(self._compare(transcript, *comparison) for comparison in self.comparisons)

    def _compare(self, transcript: Transcript, name: str, sign: str, expected: str) -> bool:
        if name not in transcript.fields:
            raise TranscriptError(
                f"{self.text!r}: {transcript.where} has no field {name!r}; {suggestion(name, transcript.fields)}"
            )
        value = transcript.fields[name]
        number, expected_number = _parse_number(value), _parse_number(expected)
        if number is not None and expected_number is not None:
            return _OPERATORS[sign](number, expected_number)
        if sign not in ("==", "!="):
            culprit = value if number is None else expected
            raise TranscriptError(f"{self.text!r}: {culprit!r} is not a number ({transcript.where})")
        return _OPERATORS[sign](value, expected)


def parse_condition(text: str) -> Condition:
    """Parse `take<5,speaker==theo`.

    Raises:
        TranscriptError: not of the form field, sign, value.
    """
    comparisons = []
    for comparison in text.split(","):
        match = _CONDITION.match(comparison)
        if match is None:
            raise TranscriptError(
                f"{comparison.strip()!r} is not a comparison such as take<5 or speaker==theo"
            )
        name, sign, expected = match.groups()
        if expected[0] in "<>=!":
            raise TranscriptError(
                f"{comparison.strip()!r} is not a comparison: known signs are {' '.join(_OPERATORS)}"
            )
        comparisons.append((name, sign, expected.strip("'\"")))
    return Condition(text, tuple(comparisons))


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
