"""Rows that ask a question, of any file that has them: their place and columns, their turns and recordings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from pydantic import ValidationError

from audiollm.data.convert.chats import SourceTurn, as_turn
from audiollm.data.convert.huggingface import column_names, named_rows, open_splits, row_label
from audiollm.data.convert.preference_forms import WrongField
from audiollm.data.convert.recordings import is_recording, recording_part
from audiollm.data.convert.request import ConversionRequest, row_id
from audiollm.data.records.sample import AudioPart
from audiollm.data.tables.rows import read_rows
from audiollm.data.tables.table import BadRow

PlacedRow = tuple[str, str, str, dict[str, Any] | BadRow]
"""Place, label (an id, and the beginning of names of files), split, and the row."""


@dataclass(frozen=True)
class QuestionRow:
    request: ConversionRequest
    place: str
    label: str
    fields: Mapping[str, Any]
    columns: Mapping[str, str]
    numbers: Iterator[int] = field(default_factory=count)
    """Numbers of files of stored sound."""

    @property
    def id(self) -> str:
        return str(self.fields.get("id") or self.label)

    def recording(self, value: Any) -> AudioPart:
        if isinstance(value, str) and value.startswith("data:"):
            raise ValueError("audio that is no file: save it to one first")
        return recording_part(self.request, f"{self.label}-{next(self.numbers)}", value)

    def name(self, field_name: str) -> str:
        """The column of a field, for errors."""
        return self.columns.get(field_name, field_name)


def source_rows(
    request: ConversionRequest,
) -> tuple[int | None, list[str], Iterator[PlacedRow], tuple[str, ...]]:
    """The number of rows, if known, the names of all columns, the rows, and facts about the file to tell."""
    source = request.source
    if source.is_dir() or source.suffix in (".parquet", ".arrow"):
        splits = open_splits(source)
        names = list(dict.fromkeys(name for dataset in splits.values() for name in column_names(dataset)))
        split_sizes = [getattr(dataset, "num_rows", None) for dataset in splits.values()]
        total = None if None in split_sizes else sum(size for size in split_sizes if size is not None)
        judgements = [request.columns.get(name, name) for name in ("label", "labels", "kto_tag")]
        rows = (
            (f"{source} {split}[{n}]".replace(" [", "["), row_label(source, split, n), split, row)
            for split, dataset in splits.items()
            for n, row in enumerate(named_rows(dataset, judgements))
        )
        return total, names, rows, ()
    listed = read_rows(source)
    places = ((place, row_id(source, place), "", row) for place, row in listed.rows)
    return len(listed.rows), listed.columns, places, listed.notes


@contextmanager
def in_field(name: str, kind: str = "unusable row") -> Iterator[None]:
    """Name the field in which something has another form than is expected."""
    try:
        yield
    except (WrongField, ValidationError):
        raise
    except KeyError as error:
        raise WrongField(name, f"a message or a part has no {error}", kind) from None
    except (TypeError, AttributeError) as error:
        reason = f"a text, or a list of messages with role and content, is expected ({error})"
        raise WrongField(name, reason, kind) from None
    except ValueError as error:
        raise WrongField(name, str(error), kind) from None


def question_turns(fields: Mapping[str, Any]) -> list[SourceTurn]:
    for name in ("system", "input"):
        if not isinstance(fields.get(name, ""), str):
            raise WrongField(name, f"a text is expected, not {fields[name]!r:.60}")
    turns = [SourceTurn("system", fields["system"])] if fields.get("system") else []
    with in_field("history"):
        for question, answer in fields.get("history") or ():
            turns += [SourceTurn("user", question), SourceTurn("assistant", answer)]
    if "messages" in fields:
        turns += [as_turn(message) for message in fields["messages"]]
    prompt = fields.get("prompt")
    if is_conversation(prompt):
        return turns + [as_turn(message) for message in prompt or ()]
    if prompt is not None and not isinstance(prompt, str):
        raise WrongField("prompt", f"a text or a list of messages is expected, not {prompt!r:.60}")
    user_text = "\n".join(filter(None, [prompt, fields.get("input")]))
    return (
        [*turns, SourceTurn("user", user_text)]
        if user_text or ("audios" in fields and "messages" not in fields)
        else turns
    )


def listed_sounds(row: QuestionRow, fields: Mapping[str, Any]) -> list[AudioPart]:
    """The recordings that are listed beside the prompt."""
    listed = fields.get("audios") or []
    with in_field("audios", "unusable recording"):
        return [row.recording(value) for value in ([listed] if isinstance(listed, str | Mapping) else listed)]


def is_conversation(value: Any) -> bool:
    if not isinstance(value, list) or not value or not isinstance(value[0], Mapping):
        return False
    return value[0].get("role") is not None or value[0].get("from") is not None


def plain_value(name: str, value: Any) -> Any:
    """The value as JSON has it; what JSON has not, such as a date, as text."""
    if is_recording(value) or isinstance(value, bytes):
        raise WrongField(
            name, "holds a recording, and its field is not known: --columns audios=NAME names one"
        )
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value
