"""Rows of questions with options: MMAU's keys, read from JSON or a table, and from columns of other usual names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from audiollm.data.tables.columns import USUAL_COLUMNS, find_columns, list_cell
from audiollm.data.tables.rows import ListRow, RowList, read_rows
from audiollm.data.tables.table import BadRow

QUESTION_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "id": ("id", "question_id"),
    "audio_id": ("audio_id", *USUAL_COLUMNS["audio"]),
    "question": ("question", "prompt"),
    "choices": ("choices", "options"),
    "answer": ("answer", "solution"),
}
"""MMAU's keys, and the columns that are taken for them, the first that is there."""
_LIST_KEYS = ("choices", "heard")


def read_question_rows(path: Path) -> RowList:
    """The rows of a list of questions, in MMAU's keys: `id`, `audio_id`, `question`, `choices`, `answer`; other keys
    stay.

    A row without an id has its number or line. An answer that is no option may be the letter of one. In a table,
    options are a JSON list or texts with `|` between them, and an empty cell is none.

    Raises:
        ConfigError: the file cannot be read, or is no list.
    """
    listed = read_rows(path, [name for names in QUESTION_COLUMNS.values() for name in names])
    rows = [
        row
        if isinstance(row.values, BadRow)
        else ListRow(row.place, _in_mmau_keys(path, row, listed.is_table))
        for row in listed.rows
    ]
    columns = dict.fromkeys(key for row in rows if isinstance(row.values, dict) for key in row.values)
    return replace(listed, rows=rows, columns=list(columns))


def _in_mmau_keys(path: Path, row: ListRow, is_table: bool) -> dict[str, Any]:
    assert isinstance(row.values, dict)
    columns = find_columns(list(row.values), {}, str(path), QUESTION_COLUMNS)
    values = {key: row.values[column] for key, column in columns.items()}
    if is_table:
        values = {key: list_cell(cell) if key in _LIST_KEYS else cell for key, cell in values.items() if cell}
    number = row.place.removeprefix(str(path)).strip("[]:")
    values.setdefault("id", f"{path.stem}-{number}")
    choices, answer = values.get("choices"), values.get("answer")
    if isinstance(choices, list) and isinstance(answer, str) and answer not in choices:
        place = ascii_uppercase.find(answer.strip().upper()) if len(answer.strip()) == 1 else -1
        if 0 <= place < len(choices):
            values["answer"] = choices[place]
    return values
