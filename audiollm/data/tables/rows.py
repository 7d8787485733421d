"""Rows of a list in any of its forms: a table, a JSON array, or JSON lines; each with its place, bad ones with why."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from audiollm.data.tables.table import BadRow, Table, read_table
from audiollm.data.tables.text_lines import NOT_UTF8, TextLines, read_lines
from audiollm.errors import ConfigError

LIST_KEYS = ("data", "samples", "items", "rows", "annotations", "records", "examples", "questions")
"""Keys under which an object in a JSON file holds its list."""
TABLE_ENDINGS = (".csv", ".tsv", ".tab", ".psv", ".txt")
"""Endings of files that are read as tables; those of JSON are `.json`, `.jsonl` and `.ndjson`."""


class ListRow(NamedTuple):
    """A row of a list, and the place that errors name: `list.csv:3`, `list.json[2]`."""

    place: str
    values: dict[str, Any] | BadRow


@dataclass(frozen=True)
class RowList:
    """The rows of a file."""

    rows: list[ListRow]
    columns: list[str]
    """The columns of a table, or the keys of the objects in the order in which they first occur."""
    notes: tuple[str, ...] = ()
    """Facts about the file to tell the person."""
    is_table: bool = False
    """Whether all values are texts, and an empty one stands for none."""


@dataclass(frozen=True)
class CheckedRows:
    """A `RowList` without bad rows: the place and the values of each."""

    rows: list[tuple[str, dict[str, Any]]]
    columns: list[str]
    notes: tuple[str, ...]
    is_table: bool


def read_rows(path: Path, known_columns: Collection[str] = ()) -> RowList:
    """The rows of a table (`.csv`, `.tsv`, `.txt`), of a JSON array, or else of JSON lines.

    Args:
        known_columns: names of columns that tell a table's separator where the lines alone do not.

    Raises:
        ConfigError: the file cannot be read, or is no list.
    """
    if path.suffix.lower() not in TABLE_ENDINGS:
        return read_json_rows(path)
    return rows_of_table(read_table(path, known_columns))


def rows_of_table(table: Table) -> RowList:
    """The rows of a table, each with its place."""
    rows = [ListRow(table.where(row.line), row.cells) for row in table.rows]
    return RowList(rows, table.columns, table.notes, is_table=True)


def checked_rows(path: Path, known_columns: Collection[str] = ()) -> CheckedRows:
    """`read_rows` for a list of which no row may be bad.

    Raises:
        ConfigError: also for the first bad row, with its place.
    """
    return refuse_bad_rows(read_rows(path, known_columns))


def refuse_bad_rows(listed: RowList) -> CheckedRows:
    """The rows of a list of which no row may be bad.

    Raises:
        ConfigError: for the first bad row, with its place.
    """
    rows: list[tuple[str, dict[str, Any]]] = []
    for place, values in listed.rows:
        if isinstance(values, BadRow):
            raise ConfigError(values.reason, place, "mend the row, or take it out")
        rows.append((place, values))
    return CheckedRows(rows, listed.columns, listed.notes, listed.is_table)


def read_json_rows(path: Path) -> RowList:
    """The objects of a JSON array, of the array in an object (`{"data": [...]}`), or of JSON lines.

    Raises:
        ConfigError: the file cannot be read, or is a broken array.
    """
    text = read_lines(path)
    first = next((line for line in text.lines if line.strip()), "").lstrip()
    if first.startswith("["):
        rows = _array(path, "\n".join(text.lines))
    elif first.startswith("{") and (nested := _nested(path, text)) is not None:
        rows = nested
    else:
        rows = _read_json_lines(path, text)
    keys = dict.fromkeys(key for row in rows if isinstance(row.values, dict) for key in row.values)
    return RowList(rows, list(keys), tuple(text.notes))


# Private


def _array(path: Path, content: str) -> list[ListRow]:
    try:
        content.encode()  # lone surrogates are bytes that are not UTF-8
        values = json.loads(content)
    except (UnicodeEncodeError, json.JSONDecodeError, RecursionError) as error:
        problem = NOT_UTF8 if isinstance(error, UnicodeEncodeError) else f"wrong JSON: {error}"
        raise ConfigError(problem, str(path), "mend it, or give one object a line (.jsonl)") from None
    return _rows_of(values, str(path))


def _rows_of(values: list[Any], place: str) -> list[ListRow]:
    return [
        ListRow(f"{place}[{number}]", value if isinstance(value, dict) else BadRow("no object"))
        for number, value in enumerate(values)
    ]


def _nested(path: Path, text: TextLines) -> list[ListRow] | None:
    """The rows of the list in the one object that a file holds; None: the file holds several, or a row.

    Raises:
        ConfigError: an object over several lines that holds no such list.
    """
    lines = [line for line in text.lines if line.strip()]
    if len(lines) > 1 and not isinstance(_object(lines[0], is_guessed=False), BadRow):
        return None
    try:
        document = json.loads("\n".join(lines))
    except (json.JSONDecodeError, RecursionError):
        return None
    lists = {key: value for key, value in document.items() if isinstance(value, list)}
    key = next((key for key in LIST_KEYS if any(isinstance(row, dict) for row in lists.get(key, ()))), None)
    if key is not None:
        return _rows_of(lists[key], f"{path}:{key}")
    if len(lines) > 1:
        raise ConfigError(
            "an object, and no list of rows",
            str(path),
            f"give an array, or one under {', '.join(LIST_KEYS[:4])}",
        )
    return None


def _read_json_lines(path: Path, text: TextLines) -> list[ListRow]:
    return [
        ListRow(f"{path}:{number}", _object(line, is_guessed=bool(text.notes)))
        for number, line in enumerate(text.lines, start=1)
        if line.strip()
    ]


def _object(line: str, is_guessed: bool) -> dict[str, Any] | BadRow:
    try:
        line.encode()
        value = json.loads(line)
    except UnicodeEncodeError:
        return BadRow(NOT_UTF8, "text encoding")
    except (json.JSONDecodeError, RecursionError) as error:
        if is_guessed and not line.isascii():
            return BadRow(NOT_UTF8, "text encoding")
        return BadRow(f"wrong JSON: {error}", "wrong JSON")
    return value if isinstance(value, dict) else BadRow("no object")
