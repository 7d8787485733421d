"""The files of an annotation, read line by line: any number of rows at constant memory.

Reading never fails: a run may have been killed anywhere, and the page says what is not there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
MAX_TEXT_CHARACTERS = 600
"""Characters of a text from a row that the page shows."""
_JOINERS = "\u200c\u200d"
"""Invisible characters that Persian, Hindi and others need in writing."""


@dataclass(frozen=True)
class Folder:
    """The files of one annotation, by their names in the README."""

    path: Path

    def rows(self, name: str) -> Iterator[Row]:
        """The rows of a JSONL file, or none without a file; lines that are no object are left out."""
        try:
            with (self.path / name).open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    row = _parsed(line)
                    if isinstance(row, dict):
                        yield row
        except OSError:
            return

    def json(self, name: str) -> Any:
        """The content of a JSON file; None where it is not there or not JSON."""
        try:
            return _parsed((self.path / name).read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return None

    def objects(self, name: str) -> list[Row]:
        """The objects in the list that a JSON file holds."""
        content = self.json(name)
        return [row for row in content if isinstance(row, dict)] if isinstance(content, list) else []

    def yaml(self, name: str) -> Row:
        """The mapping in a YAML file; empty where there is none."""
        import yaml

        try:
            content = yaml.safe_load((self.path / name).read_text(encoding="utf-8", errors="replace"))
        except (OSError, yaml.YAMLError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()


def value_at(row: Any, path: str) -> Any:
    """The value at `outer.inner` below a mapping, or None."""
    for key in path.split("."):
        if not isinstance(row, Mapping):
            return None
        row = row.get(key)
    return row


def measured(row: Row, path: str) -> Any:
    """The value that a rule compares: `step.value` below `measured`, a property of the segment, or a column."""
    for place in (f"measured.{path}", f"measured.segment.{path}", path, path.rpartition(".")[2]):
        value = value_at(row, place)
        if value is not None:
            return value
    return None


def finite_number(value: Any) -> float | None:
    """A finite number, or None; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def seconds_of(row: Row) -> float:
    """The length of a segment in seconds."""
    duration_s = finite_number(row.get("duration_s"))
    if duration_s is None:
        duration_s = (finite_number(row.get("end_s")) or 0.0) - (finite_number(row.get("start_s")) or 0.0)
    return max(0.0, duration_s)


def named(value: Any, longest: int = 300) -> str:
    """A name from outside (a file, a speaker, a label) in one line; control characters are escaped."""
    text = value if isinstance(value, str) else "" if value is None else str(value)
    if len(text) <= longest and text.isprintable():
        return text
    text = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text[: longest + 1]
    )
    return text if len(text) <= longest else text[: longest - 1] + "…"


def file_name(row: Row) -> str:
    """A recording's name relative to the input folder, never with the folders above it."""
    name = row.get("file") or row.get("name") or Path(str(row.get("path") or "")).name
    return named(name)


def clean_text(value: Any, longest: int = MAX_TEXT_CHARACTERS) -> str:
    """A text from outside, shortened, with single spaces; invisible characters become spaces."""
    letters = value[: longest + 1] if isinstance(value, str) else ""
    text = "".join(letter if letter.isprintable() or letter in _JOINERS else " " for letter in letters)
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
