"""Lists that suites read: JSON lines, a JSON array, or CSV, each record validated, each problem with its place."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from audiollm.errors import ConfigError

Record = TypeVar("Record", bound=BaseModel)


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """The records of a list.

    Raises:
        ConfigError: it cannot be read, is empty, or a record is not one; the line and the key are named.
    """
    records = []
    for where, values in read_rows(path):
        try:
            records.append(kind.model_validate(values))
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in problem["loc"])
            keys = ", ".join(field.alias or name for name, field in kind.model_fields.items())
            raise ConfigError(f"{key}: {problem['msg']}", where, f"a record has the keys {keys}") from None
    if not records:
        raise ConfigError("the list is empty", str(path), "give at least one record")
    return records


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, values) of `.csv`, `.tsv`, of a `.json` array, or else of JSON lines.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() in (".csv", ".tsv"):
                separator = "\t" if path.suffix.lower() == ".tsv" else ","
                for place, row in enumerate(csv.DictReader(file, delimiter=separator), start=2):
                    if None in row:
                        problem = "more fields than columns"
                        raise ConfigError(
                            problem, f"{path}:{place}", "put texts with commas in double quotes"
                        )
                    yield f"{path}:{place}", {key: value for key, value in row.items() if value}
            elif path.suffix.lower() == ".json":
                values = json.load(file)
                if not isinstance(values, list):
                    raise ConfigError(
                        "not an array of records", str(path), "give a JSON array, or JSON lines"
                    )
                for place, value in enumerate(values):
                    yield f"{path}[{place}]", value
            else:
                for place, line in enumerate(file, start=1):
                    if line.strip():
                        yield f"{path}:{place}", _line(line, f"{path}:{place}")
    except (OSError, UnicodeDecodeError, csv.Error, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"cannot be read: {error}", str(path), "give JSON lines, JSON or CSV in UTF-8"
        ) from None


def need_unique(ids: list[str], path: Path) -> None:
    """
    Raises:
        ConfigError: an id is used twice.
    """
    seen: set[str] = set()
    for id in ids:
        if id in seen:
            raise ConfigError(f"{id}: an id that is used twice", str(path), "give each record its own")
        seen.add(id)


def _line(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"wrong JSON: {error}", where, "write one object per line") from None
