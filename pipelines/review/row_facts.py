"""Texts, refusals and measures of a row of `annotate` or `audiocot`, and rows sorted and searched by them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SORTED_BY_WORDS = ("id", "text", "speaker")
"""Columns that are sorted as words; measures are sorted as numbers."""
_TEXTS = ("thought", "text", "prose")
_NO_MEASURES = frozenset({"start_s", "end_s", "events", "tags", "words", "record"})
"""Keys that hold places or lists: what is measured of a clip stands beside them."""
_HIDDEN = frozenset({"path", "file", "video", "digest"})
"""Keys that words are not searched in."""
_DEEPEST = 4


def clip_text(row: Mapping[str, Any]) -> str:
    """The transcript or chain of thought of a clip; empty: it has none."""
    return next((str(row[key]) for key in _TEXTS if row.get(key)), "")


def hypotheses_of(row: Mapping[str, Any]) -> dict[str, str]:
    """The words of each recognizer."""
    words = row.get("heard")
    return {str(name): str(text) for name, text in words.items()} if isinstance(words, dict) else {}


def drop_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Kind of a drop, and its sentence with the limit; empty: the clip was kept."""
    dropped = row.get("dropped")
    if isinstance(dropped, dict):
        return str(dropped.get("kind", "")), str(dropped.get("reason", ""))
    return (str(row["reason"]), "") if row.get("reason") else ("", "")


def text_refusal_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Kind of a refusal of the clip's text, and its sentence with the limit; empty: the text was taken."""
    refused = row.get("text_refused")
    if not isinstance(refused, dict):
        return "", ""
    return str(refused.get("kind", "")), str(refused.get("reason", ""))


def measures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that were measured of a clip, by name: its own columns, then those of the steps."""
    columns = {key: value for key, value in row.items() if key not in ("measured", "dropped", "text_refused")}
    measured = row.get("measured")
    numbers = dict(_flatten_numbers(columns, ""))
    for name, value in _flatten_numbers(measured if isinstance(measured, dict) else {}, ""):
        numbers.setdefault(name, value)
    return numbers


def sort_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns that the rows can be sorted by."""
    words = [key for key in SORTED_BY_WORDS if any(row.get(key) for row in rows)]
    return [*words, *dict.fromkeys(name for row in rows for name in measures_of(row))]


def sorted_rows(
    rows: Sequence[dict[str, Any]], column: str, is_descending: bool = False
) -> list[dict[str, Any]]:
    """The rows in the order of a column; those without it come last, however they are sorted.

    Args:
        column: see `sort_columns`; empty: the order of the file.
    """
    if not column:
        return list(reversed(rows)) if is_descending else list(rows)
    is_word = column in SORTED_BY_WORDS

    def key(row: Mapping[str, Any]) -> Any:
        return str(row[column]).casefold() if is_word else measures_of(row)[column]

    present = [row for row in rows if (row.get(column) if is_word else column in measures_of(row))]
    present_ids = {id(row) for row in present}
    absent = [row for row in rows if id(row) not in present_ids]
    return [*sorted(present, key=key, reverse=is_descending), *absent]


def has_words(row: Mapping[str, Any], words: str) -> bool:
    """Whether all words stand somewhere in a row: in its name, texts, speaker, refusals, or among its measures."""
    terms = words.casefold().split()
    if not terms:
        return True
    searched = {key: value for key, value in row.items() if key not in _HIDDEN}
    text = json.dumps(searched, ensure_ascii=False).casefold()
    return all(term in text for term in terms)


def _flatten_numbers(columns: Mapping[str, Any], place: str, depth: int = 0) -> Iterator[tuple[str, float]]:
    """Numbers below a mapping with their names: "quality.dnsmos.ovr"."""
    for key, value in columns.items():
        if key in _NO_MEASURES:
            continue
        name = f"{place}.{key}" if place else str(key)
        if isinstance(value, dict) and depth < _DEEPEST:
            yield from _flatten_numbers(value, name, depth + 1)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            yield name, value
