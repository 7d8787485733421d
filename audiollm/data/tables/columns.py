"""Names of columns: which column is read as which field, in any capitals, and cells that stand for nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from audiollm.errors import ConfigError, suggestion

USUAL_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "audio": (
        "audio", "path", "file", "file_name", "filename", "wav", "audio_filepath", "audio_path", "audio_file",
        "wav_path", "wav_filename", "file_path", "filepath", "clip",
    ),
    "text": (
        "text", "sentence", "transcription", "transcript", "normalized_text", "raw_transcription", "raw_text",
    ),
    "speaker": ("speaker", "speaker_id", "client_id", "spk", "spk_id", "speaker_name"),
    "id": ("id", "key", "uid", "utterance_id", "utt_id"),
    "language": ("language", "lang", "locale"),
    "split": ("split",),
}  # fmt: skip
"""Fields, and the columns that are taken for them, the first that is there."""
NAME_FIELDS = ("speaker", "id", "language", "split", "gender", "emotion", "accent", "age")
"""Fields whose cells are names: "NaN" and "None" in them are none."""
MISSING_NAMES = frozenset(
    {"nan", "NaN", "NAN", "<NA>", "NA", "N/A", "n/a", "#N/A", "None", "null", "NULL", "NaT"}
)
"""Cells that stand for nothing in exports of pandas, Excel and databases, in columns of names."""
MISSING_TEXTS = frozenset({"nan", "NaN", "<NA>", "#N/A"})
"""Cells that stand for nothing in columns of texts, too, where "None" or "null" may be a word that is said."""


def plain_name(name: str) -> str:
    """The name of a column in small letters, with `_` for spaces and hyphens."""
    return re.sub(r"[\s_-]+", "_", name.strip().casefold())


def match_column(names: Iterable[str], name: str) -> str | None:
    """Return the column of a name: the name as it is written, or else in other capitals, or with other spaces."""
    columns = list(names)
    if name in columns:
        return name
    return next((column for column in columns if plain_name(column) == plain_name(name)), None)


def find_columns(
    names: Sequence[str],
    named: Mapping[str, str],
    place: str,
    usual_columns: Mapping[str, Sequence[str]] = USUAL_COLUMNS,
) -> dict[str, str]:
    """The column of each field: those that were named, then the usual ones, then every other by its own name.

    Args:
        named: fields and their columns where these do not have the usual names.
        usual_columns: for each field, the columns that are taken for it, the first that is there.

    Raises:
        ConfigError: a column was named that is not there.
    """
    columns: dict[str, str] = {}
    for field, usual in usual_columns.items():
        matches = (match_column(names, column) for column in usual)
        column = next((match for match in matches if match is not None), None)
        if column is not None:
            columns[field] = column
    for field, name in named.items():
        match = match_column(names, name)
        if match is None:
            raise ConfigError(
                f"{field}={name}: {place} has no such column", "--columns", suggestion(name, list(names))
            )
        columns[field] = match
    other_names = [name for name in names if name not in columns.values() and name not in columns]
    return {**columns, **{name: name for name in other_names}}


class ColumnFinder:
    """The columns of a list whose rows may have different keys, as JSON's may.

    Args:
        names, named, place, usual_columns: as of `find_columns`.

    Raises:
        ConfigError: a column was named that no row has.
    """

    def __init__(
        self,
        names: Sequence[str],
        named: Mapping[str, str],
        place: str,
        usual_columns: Mapping[str, Sequence[str]] = USUAL_COLUMNS,
    ) -> None:
        self.columns = find_columns(names, named, place, usual_columns)
        """The columns that the rows have, together."""
        self._named = {field: self.columns[field] for field in named}
        self._place, self._usual, self._names = place, usual_columns, list(names)
        self._by_names: dict[tuple[str, ...], dict[str, str]] = {tuple(names): self.columns}

    def note(self) -> str:
        """`columns_note` of all rows together."""
        return columns_note(self.columns, self._names)

    def of_row(self, row: Mapping[str, object]) -> dict[str, str]:
        """The column of each field in a row."""
        names = tuple(row)
        if names not in self._by_names:
            named = {field: column for field, column in self._named.items() if column in row}
            self._by_names[names] = find_columns(names, named, self._place, self._usual)
        return self._by_names[names]


def rename_columns(cells: Mapping[str, str], known_names: Iterable[str]) -> dict[str, str]:
    """The cells of a row with each known column under its known name: `Path` as `path`."""
    by_plain = {plain_name(name): name for name in known_names}
    return {
        column if column in by_plain.values() else by_plain.get(plain_name(column), column): cell
        for column, cell in cells.items()
    }


def is_missing(value: object, is_name: bool = False) -> bool:
    """Return whether a value stands for nothing: None, a NaN, an empty text, or a word for these in exports.

    Args:
        is_name: the value of a column of names, where "None" is no name; in a text it may be a word.
    """
    if value is None or (isinstance(value, float) and value != value):
        return True
    words = MISSING_NAMES if is_name else MISSING_TEXTS
    return isinstance(value, str) and (not value.strip() or value.strip() in words)


def list_cell(cell: str) -> list[Any]:
    """The values of a table's cell that holds a list: a JSON list, or texts with `|` between them."""
    try:
        values = json.loads(cell) if cell.strip().startswith("[") else None
    except ValueError:
        values = None
    return values if isinstance(values, list) else [text.strip() for text in cell.split("|")]


def columns_note(columns: Mapping[str, str], names: Iterable[str] = ()) -> str:
    """A line that says which columns are read as which fields, and which are not read."""
    read = ", ".join(
        column if field == column else f"{column} as {field}" for field, column in columns.items()
    )
    unread = [name for name in names if name not in columns.values()]
    return f"columns read: {read}" + (f"; not read: {', '.join(unread)}" if unread else "")
