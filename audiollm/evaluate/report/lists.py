"""Lists that suites read: each record validated, each problem with its place."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from audiollm.data.tables.columns import rename_columns
from audiollm.data.tables.rows import RowList, checked_rows, refuse_bad_rows
from audiollm.errors import ConfigError, first_problem

Record = TypeVar("Record", bound=BaseModel)


def read_records(path: Path, kind: type[Record], rows: RowList | None = None) -> list[Record]:
    """The records of a list: a table, a JSON array, or JSON lines. Columns may have other capitals than the keys.

    Args:
        rows: those of `path`, where another reader has read them.

    Raises:
        ConfigError: it cannot be read, is empty, or a record is not one; the line and the key are named.
    """
    keys = [field.alias or name for name, field in kind.model_fields.items()]
    records = []
    listed = checked_rows(path, keys) if rows is None else refuse_bad_rows(rows)
    for place, values in listed.rows:
        named = rename_columns(values, keys)
        if listed.is_table:  # an empty cell is none
            named = {key: value for key, value in named.items() if value}
        try:
            records.append(kind.model_validate(named))
        except ValidationError as error:
            remedy = f"a record has the keys {', '.join(keys)}"
            raise ConfigError(first_problem(error), place, remedy) from None
    if not records:
        raise ConfigError("the list is empty", str(path), "give at least one record")
    return records


def need_unique(ids: list[str], path: Path) -> None:
    """
    Raises:
        ConfigError: an id is used twice.
    """
    seen_ids: set[str] = set()
    for id in ids:
        if id in seen_ids:
            raise ConfigError(f"{id}: an id that is used twice", str(path), "give each record its own")
        seen_ids.add(id)
