"""Given transcripts: rows of a CSV or JSONL, or a pattern over file names; and the condition of the test set."""

from __future__ import annotations

import csv
import io
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from audiollm.errors import suggestion

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
SPLITS = ("train", "test")


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
    parts = _FIELD.split(stem)
    expression = ""
    for index, part in enumerate(parts):
        if index % 2 == 0:
            expression += re.escape(part)
        elif part == "text":
            expression += "(?P<text>[^/]+)"
        else:
            beside = re.escape(parts[index - 1][-1:] + parts[index + 1][:1])
            expression += f"(?P<{part}>[^/{beside}]+)"
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
    found = expression.fullmatch("/".join(parts[-depth:])) if len(parts) >= depth else None
    if found is None:
        return None
    fields = dict(found.groupdict())
    text = " ".join(fields["text"].replace("_", " ").split())
    if not text:
        return None
    return Transcript(text, fields.get("speaker"), fields.get("split"), fields, f"the pattern {pattern!r}")


# ------------------------------------------------------------------------------------------------ files


def read_transcripts(path: Path) -> list[tuple[str, Transcript]]:
    """The rows of a transcripts file as (path as written, transcript), in their order.

    A `.jsonl` holds an object a line, anything else comma- (`.tsv`: tab-) separated columns under a header;
    `path` and `text` are required, `speaker` and `split` are known, and others serve the test condition.

    Raises:
        TranscriptError: a missing column, a malformed row, no text, the same path twice; with file and line.
    """
    return [(fields["path"], transcript_of(fields, where)) for where, fields in _read(path, ("path", "text"))]


def read_manifest(path: Path) -> list[tuple[str, Transcript | None]]:
    """The rows of a list of recordings as (path as written, what is given for it): `read_transcripts` without the need
    for a text. None: the row has a path alone.

    Raises:
        TranscriptError: as `read_transcripts`.
    """
    rows = _read(path, ("path",))
    return [
        (fields["path"], transcript_of(fields, where) if set(fields) != {"path"} else None)
        for where, fields in rows
    ]


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


def _read(path: Path, required: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """The rows of a file, each with where it stands; no path twice."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TranscriptError(f"{path}  cannot be read: {error}") from None
    read = _jsonl_rows if path.suffix.lower() in (".jsonl", ".ndjson") else _csv_rows
    result: list[tuple[str, dict[str, str]]] = []
    seen: dict[str, int] = {}
    for number, fields in read(path, content, required):
        where = f"{path}:{number}"
        for column in required:
            if not fields.get(column, "").strip():
                raise TranscriptError(f"{where}  has no {column}")
        if fields["path"] in seen:
            raise TranscriptError(f"{where}  {fields['path']!r} was on line {seen[fields['path']]} already")
        seen[fields["path"]] = number
        result.append((where, fields))
    if not result:
        raise TranscriptError(f"{path}  holds no rows")
    return result


def _csv_rows(path: Path, content: str, required: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    reader = csv.reader(
        io.StringIO(content, newline=""),  # `splitlines` also ends lines at U+2028 and the like
        delimiter="\t" if path.suffix.lower() == ".tsv" else ",",
        strict=True,
    )
    rows: list[tuple[int, dict[str, str]]] = []
    header: list[str] | None = None
    try:
        for row in reader:
            if not row:
                continue
            if header is None:
                header = [name.strip() for name in row]
                missing = [name for name in required if name not in header]
                if missing:
                    raise TranscriptError(
                        f"{path}:{reader.line_num}  no column {missing[0]!r} in {','.join(header)!r}"
                    )
                continue
            if len(row) != len(header):
                raise TranscriptError(
                    f"{path}:{reader.line_num}  has {len(row)} columns where the header has {len(header)} "
                    "(a text with a comma goes in double quotes)"
                )
            rows.append((reader.line_num, dict(zip(header, row, strict=True))))
    except csv.Error as error:
        raise TranscriptError(f"{path}:{reader.line_num}  {error}") from None
    return rows


def _jsonl_rows(path: Path, content: str, required: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    rows: list[tuple[int, dict[str, str]]] = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TranscriptError(f"{path}:{number}  not JSON: {error}") from None
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in required):
            needed = " and ".join(repr(name) for name in required)
            raise TranscriptError(f"{path}:{number}  is not an object with the texts {needed}")
        rows.append((number, {key: "" if value is None else str(value) for key, value in row.items()}))
    return rows


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

    def _compare(self, transcript: Transcript, name: str, sign: str, wanted: str) -> bool:
        if name not in transcript.fields:
            raise TranscriptError(
                f"{self.text!r}: {transcript.where} has no field {name!r}; {suggestion(name, transcript.fields)}"
            )
        value = transcript.fields[name]
        left, right = _number(value), _number(wanted)
        if left is not None and right is not None:
            return _OPERATORS[sign](left, right)
        if sign not in ("==", "!="):
            culprit = value if left is None else wanted
            raise TranscriptError(f"{self.text!r}: {culprit!r} is not a number ({transcript.where})")
        return _OPERATORS[sign](value, wanted)


def parse_condition(text: str) -> Condition:
    """Parse `take<5,speaker==theo`.

    Raises:
        TranscriptError: not of the form field, sign, value.
    """
    comparisons = []
    for part in text.split(","):
        match = _CONDITION.match(part)
        if match is None:
            raise TranscriptError(f"{part.strip()!r} is not a comparison such as take<5 or speaker==theo")
        name, sign, wanted = match.groups()
        if wanted[0] in "<>=!":
            raise TranscriptError(
                f"{part.strip()!r} is not a comparison: known signs are {' '.join(_OPERATORS)}"
            )
        comparisons.append((name, sign, wanted.strip("'\"")))
    return Condition(text, tuple(comparisons))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
