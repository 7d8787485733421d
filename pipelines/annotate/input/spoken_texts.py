"""Texts to speak, from a file of lines, a table or JSON; lines that nobody would say are set aside with the reason."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import NamedTuple

from audiollm.data.tables.columns import USUAL_COLUMNS, ColumnFinder, is_missing
from audiollm.data.tables.rows import read_rows
from audiollm.data.tables.table import BadRow
from audiollm.data.tables.text_lines import NOT_UTF8, read_lines
from audiollm.errors import ConfigError
from audiollm.files.set_aside import Row, set_aside_row

_HEADING = re.compile(r"=+ .*=|#{1,6} .*")
_MARKUP = re.compile(r"</?\w[^<>]*>|@[-,.]@|\{\{|\}\}|\[\[|\]\]|&#?\w+;|https?://|www\.")
_UNSAID_MARKS = frozenset("#*@\\_~^<>|{}[]")
_MAX_SYMBOL_SHARE = 0.1


class PlacedText(NamedTuple):
    """A text, and the place that errors name: `texts.csv:3`."""

    place: str
    text: str


class TextList(NamedTuple):
    """The texts of a file that can be spoken, each once, and rows of `set_aside.jsonl` for the others."""

    texts: list[PlacedText]
    set_aside: list[Row]
    notes: list[str]
    """Facts about the file to tell the person."""


def read_texts(path: Path, column: str | None, max_s: float | None) -> TextList:
    """Read the texts of a `.txt` with one per line, or of a table or JSON with a column of texts.

    Args:
        column: the column's name; None: a usual one.
        max_s: the longest speech that is of use, in seconds.

    Raises:
        ConfigError: the file cannot be read, has no such column, or holds no text to speak.
    """
    if path.suffix.lower() == ".txt":
        if column is not None:
            raise ConfigError(
                "text_column: a .txt holds a text per line", str(path), "give a .csv, or no column"
            )
        content = read_lines(path)
        rows: list[tuple[str, str | BadRow]] = [
            (f"{path}:{number}", line) for number, line in enumerate(content.lines, start=1) if line.strip()
        ]
        notes = list(content.notes)
    else:
        rows, notes = _read_text_column(path, column)
    texts: list[PlacedText] = []
    set_aside: list[Row] = []
    places: dict[str, str] = {}
    for place, value in rows:
        text = value if isinstance(value, BadRow) else " ".join(value.split())
        fault = _text_fault(text, max_s)
        if isinstance(text, str) and fault is None:
            first_place = places.setdefault(_sounding(text), place)
            fault = ("a text twice", f"stands at {first_place} already") if first_place != place else None
        if isinstance(text, BadRow) or fault is not None:
            kind, reason = fault or ("", "")
            set_aside.append(set_aside_row("annotate", place, kind, reason))
        else:
            texts.append(PlacedText(place, text))
    if not texts:
        why = f": {set_aside[0]['place']}: {set_aside[0]['reason']}" if set_aside else ""
        raise ConfigError(
            f"none of its {len(rows)} texts can be spoken{why}",
            str(path),
            "give a file with a sentence per line",
        )
    return TextList(texts, set_aside, notes)


def _read_text_column(path: Path, column: str | None) -> tuple[list[tuple[str, str | BadRow]], list[str]]:
    """The cells of the column of texts, each with its place, and notes on the file."""
    listed = read_rows(path, USUAL_COLUMNS["text"])
    named = {} if column is None else {"text": column}
    finder = ColumnFinder(listed.columns, named, str(path))
    if "text" not in finder.columns:
        raise ConfigError(
            f"no column of texts among {', '.join(listed.columns)}",
            str(path),
            "name it: corpus.text_column=NAME",
        )
    rows: list[tuple[str, str | BadRow]] = []
    for place, values in listed.rows:
        if isinstance(values, BadRow):
            rows.append((place, values))
            continue
        value = values.get(finder.of_row(values).get("text", ""))
        rows.append((place, BadRow("has no text", "no text") if is_missing(value) else str(value)))
    return rows, [*listed.notes, f"{path.name}: texts in the column {finder.columns['text']}"]


def _text_fault(text: str | BadRow, max_s: float | None) -> tuple[str, str] | None:
    """Why a text is not spoken, as kind and reason; None: it is."""
    from audiollm.generation.speaking.long_text import spoken_seconds

    if isinstance(text, BadRow):
        return text.kind or "a broken row", text.reason
    excerpt = text if len(text) <= 80 else f"{text[:77]}..."
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        return "text encoding", NOT_UTF8
    if _HEADING.fullmatch(text):
        return "a heading", f"{excerpt!r} is a heading"
    if (markup := _MARKUP.search(text)) is not None:
        return "markup", f"{markup[0]!r} in {excerpt!r} is not said"
    if not any(map(str.isalnum, text)):
        return "no words", f"{excerpt!r} has neither letters nor digits"
    symbols = [
        mark for mark in text if mark in _UNSAID_MARKS or unicodedata.category(mark) in ("So", "Sm", "Sk")
    ]
    if len(symbols) > _MAX_SYMBOL_SHARE * len(text):
        return "symbols", f"{excerpt!r} has signs such as {symbols[0]!r}, which are not said"
    seconds = spoken_seconds(text)
    if max_s is not None and seconds > max_s:
        return "a text too long", f"about {seconds:.0f} s of speech: max_duration_s is {max_s:g}"
    return None


def _sounding(text: str) -> str:
    """The letters, digits and their marks: what two spellings of the same speech share."""
    return "".join(mark for mark in text.casefold() if unicodedata.category(mark)[0] in "LMN")
