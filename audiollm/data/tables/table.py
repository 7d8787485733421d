"""The one reader of tables: CSV, TSV, and texts with semicolons or pipes, for every command that takes a list.

Rows read are the rows of the file: a quotation mark that is never closed swallows none. A row that cannot be read is a
`BadRow` with its line, and whoever reads sets it aside or refuses the file. The separator is that of the header.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from audiollm.data.tables.columns import plain_name
from audiollm.data.tables.text_lines import NOT_UTF8, TextLines, read_lines
from audiollm.errors import ConfigError

SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "pipe"}
"""Separators of cells, and their names."""
_SAMPLE_LINES = 200
_MAX_CELL = 131_072
"""Longest cell in characters, as `csv` has it for quoted ones."""
_EXTENSION = re.compile(r"\.[A-Za-z][A-Za-z0-9]{1,4}$")
_BROKEN = re.compile("[\udc80-\udcff]")
"""Bytes that are not UTF-8, as `read_lines` gives them."""
_MAX_NAMED_LINES = 5


class BadRow(NamedTuple):
    """A row that cannot be read, and why."""

    reason: str
    kind: str = "unusable row"
    """The few words that it is counted by in `set_aside.jsonl`."""


class TableRow(NamedTuple):
    """A row: the line that it begins at, and its cells by the name of their column."""

    line: int
    cells: dict[str, Any] | BadRow
    """All values are texts."""


@dataclass(frozen=True)
class Table:
    """A table with a header."""

    path: Path
    columns: list[str]
    """Names of the columns as they are written, without those that have none."""
    rows: list[TableRow]
    separator: str
    notes: tuple[str, ...] = ()
    """Facts about the file to tell the person: its encoding, quotation marks that are never closed."""

    def where(self, line: int) -> str:
        """The place of a line, for errors."""
        return f"{self.path}:{line}"


def read_table(path: Path, known_columns: Collection[str] = ()) -> Table:
    """Read a table with a header.

    Args:
        known_columns: names of columns that tell the separator where the lines alone do not.

    Raises:
        ConfigError: the file cannot be read, its encoding is not known, it has no header, or a column occurs twice.
    """
    text = read_lines(path)
    return parse_table(path, text, known_columns)


def numbered_table(path: Path, text: TextLines, separator: str, width: int) -> Table:
    """Read the lines of a table without a header: its columns are "1", "2", ... Quotation marks are text."""
    names = [str(number + 1) for number in range(width)]
    parser = _RowParser(text.lines, separator, has_quotes=False)
    rows = [
        TableRow(line, _by_name(names, cells) if isinstance(cells, list) else cells)
        for line, cells in parser.rows(0, width)
    ]
    return Table(path, names, rows, separator, tuple(text.notes))


def parse_table(path: Path, text: TextLines, known_columns: Collection[str] = ()) -> Table:
    """Read the lines of a table; see `read_table`."""
    first, separator = _first_line(path, text.lines, known_columns)
    parser = _RowParser(text.lines, separator)
    head = _split_line(text.lines[first], separator)
    names = [name.strip().strip("\ufeff") for name in head]
    doubled = sorted(name for name, count in Counter(filter(None, names)).items() if count > 1)
    if doubled:
        raise ConfigError(
            f"the column {doubled[0]!r} occurs twice", f"{path}:{first + 1}", "give each its name"
        )
    if not any(names):
        raise ConfigError("the first line names no column", f"{path}:{first + 1}", "add a header: path,text")
    rows = [
        TableRow(line, _by_name(names, cells) if isinstance(cells, list) else cells)
        for line, cells in parser.rows(first + 1, len(names))
    ]
    notes = [*text.notes, *parser.notes(path)]
    return Table(path, [name for name in names if name], rows, separator, tuple(notes))


# Private


def _by_name(names: Sequence[str], cells: Sequence[str]) -> dict[str, Any] | BadRow:
    for place, (name, cell) in enumerate(zip(names, cells, strict=True)):
        if (
            not name and place and cell.strip()
        ):  # pandas writes its index under an empty name, as the first column
            return BadRow(f"cell {place + 1} ({cell.strip():.40}) stands under no column")
    return {name: cell for name, cell in zip(names, cells, strict=True) if name}


def _first_line(path: Path, lines: Sequence[str], known_columns: Collection[str]) -> tuple[int, str]:
    """The number of the header's line, and the separator; Excel's line `sep=;` before it gives the latter.

    Raises:
        ConfigError: the file is empty.
    """
    first = next((number for number, line in enumerate(lines) if line.strip()), None)
    if first is None:
        raise ConfigError("is empty", str(path), "give a table with a header, such as path,text")
    named = re.fullmatch(r'"?sep=(.)"?', lines[first].strip(" "))
    if named and named[1] in SEPARATORS and first + 1 < len(lines):
        return first + 1, named[1]
    return first, separator_of(lines[first:], path, known_columns)


def separator_of(lines: Sequence[str], path: Path, known_columns: Collection[str] = ()) -> str:
    """The separator of a table: that of the header, by the columns it makes and by the number of cells in the lines."""
    usual = "\t" if path.suffix.lower() in (".tsv", ".tab") else ","
    sample = [line for line in lines[1:_SAMPLE_LINES] if line.strip()]
    plain = {plain_name(name) for name in known_columns}

    def rank(separator: str) -> tuple[int, float, int, bool]:
        head = _split_line(lines[0], separator)
        num_known = sum(plain_name(name) in plain for name in head)
        equal = sum(len(_split_line(line, separator)) == len(head) for line in sample)
        share = round(equal / len(sample), 1) if sample and len(head) > 1 else 0.0
        return num_known, share, len(head), separator == usual

    splitting = [separator for separator in SEPARATORS if separator in lines[0]]
    return max(splitting, key=rank, default=usual)


def _split_quoted_line(line: str, separator: str, skips_spaces: bool = False) -> list[str] | None:
    """The cells of a line with well-formed quotation marks; None where they are not."""
    try:
        reader = csv.reader([line], delimiter=separator, strict=True, skipinitialspace=skips_spaces)
        rows = list(reader)
    except csv.Error:
        return None
    return rows[0] if rows else []


def _split_line(line: str, separator: str) -> list[str]:
    return _split_quoted_line(line, separator) or line.split(separator)


class _RowParser:
    """Divides lines into rows.

    A line is a row. Its cells lose quotation marks that are well formed (`"a, b"`); marks that are not are text
    where the number of cells is right without them. A quoted cell goes on over several lines only where none of these
    looks like a row of its own; where that cannot be told, the row is bad.
    """

    def __init__(self, lines: Sequence[str], separator: str, has_quotes: bool = True) -> None:
        self._lines, self._separator, self._has_quotes = lines, separator, has_quotes
        self._literal: list[int] = []
        self._extensions: dict[int, frozenset[str]] = {}
        self._width = 0
        self._refused: tuple[range, BadRow] = (range(0), BadRow(""))

    def rows(self, start: int, width: int) -> Iterable[tuple[int, list[str] | BadRow]]:
        """The line's number, from 1, and the cells of each row with something in it."""
        self._width = width
        self._extensions = self._known_extensions(start)
        place = start
        while place < len(self._lines):
            cells, after = self._row(place)
            if isinstance(cells, BadRow) or any(cell.strip() for cell in cells):
                yield place + 1, cells
            place = after

    def notes(self, path: Path) -> list[str]:
        """A note on the quotation marks that were read as text."""
        if not self._literal:
            return []
        named = ", ".join(map(str, self._literal[:_MAX_NAMED_LINES]))
        more = ", ..." if len(self._literal) > _MAX_NAMED_LINES else ""
        return [
            f"{path}: quotation marks that are not well formed are read as text: "
            f"{len(self._literal)} rows (lines {named}{more})"
        ]

    def _row(self, place: int) -> tuple[list[str] | BadRow, int]:
        line, width = self._lines[place], self._width
        if place in self._refused[0]:
            return self._refused[1], place + 1
        if not line.strip():
            return [], place + 1
        if _BROKEN.search(line):
            return BadRow(NOT_UTF8, "text encoding"), place + 1
        plain = line.split(self._separator)
        if not self._has_quotes or '"' not in line:
            return self._checked(plain), place + 1
        quoted = self._quoted(place)
        if quoted is not None and len(quoted[0]) == width:
            cells, after = quoted
            covered = range(place + 1, after)
            if not covered or not any(self._looks_like_row(number) for number in covered):
                return cells, after
            if len(plain) == width and (self._extensions or self._separator == "\t"):
                return self._as_text(place, plain), place + 1
            reason = (
                f"a quotation mark opens on line {place + 1} and closes on line {after}, over lines that look like "
                "rows: double the quotation marks of a text, or quote it on one line"
            )
            self._refused = covered, BadRow(reason)
            return BadRow(reason), place + 1
        one_line = quoted is not None and quoted[1] == place + 1
        if len(plain) == width and (not one_line or self._separator == "\t"):
            return self._as_text(place, plain), place + 1
        spaced = _split_quoted_line(line, self._separator, skips_spaces=True)
        if spaced is not None and len(spaced) == width:  # `a.wav, "one, two"`
            return spaced, place + 1
        return self._checked(quoted[0] if quoted is not None and one_line else plain), place + 1

    def _checked(self, cells: list[str]) -> list[str] | BadRow:
        longest = max(map(len, cells))
        if longest > _MAX_CELL:
            return BadRow(f"a cell of {longest} characters: at most {_MAX_CELL} are read")
        if len(cells) == self._width or not any(cell.strip() for cell in cells):
            return cells
        reason = (
            f"{len(cells)} fields for {self._width} columns; a text with {self._separator!r} goes in double quotes, "
            "and quotation marks in it are doubled"
        )
        return BadRow(reason)

    def _as_text(self, place: int, plain: list[str]) -> list[str]:
        """The cells of a line whose quotation marks are not all well formed; a cell whose marks are loses them."""
        self._literal.append(place + 1)
        cells = [_split_quoted_line(cell, self._separator) for cell in plain]
        return [read[0] if read and len(read) == 1 else cell for read, cell in zip(cells, plain, strict=True)]

    def _quoted(self, place: int) -> tuple[list[str], int] | None:
        """The cells of the row that begins at a line, by the rules of quotation marks, and the line after it."""
        ended = (f"{self._lines[number]}\n" for number in range(place, len(self._lines)))
        reader = csv.reader(ended, delimiter=self._separator, strict=True)
        try:
            return next(reader, []), place + max(1, reader.line_num)
        except csv.Error:
            return None

    def _looks_like_row(self, place: int) -> bool:
        plain = self._lines[place].split(self._separator)
        return len(plain) == self._width and all(
            _extension(plain[column]) in extensions for column, extensions in self._extensions.items()
        )

    def _known_extensions(self, start: int) -> dict[int, frozenset[str]]:
        """The extensions in columns of file names: they tell a row from the second line of a text with a comma."""
        cells: list[list[str]] = []
        place, end = start, min(len(self._lines), start + _SAMPLE_LINES)
        while place < end:
            quoted = self._quoted(place)
            is_row = quoted is not None and len(quoted[0]) == self._width
            if quoted is not None and is_row:
                cells.append(quoted[0])
            place = quoted[1] if quoted is not None and is_row else place + 1
        extensions = {
            number: Counter(map(_extension, column)) for number, column in enumerate(zip(*cells, strict=True))
        }
        return {
            number: frozenset(counts) - {""}
            for number, counts in extensions.items()
            if counts[""] < len(cells) / 2
        }


def _extension(cell: str) -> str:
    match = _EXTENSION.search(cell.strip().strip('"'))
    return match[0].lower() if match and "\n" not in cell else ""
