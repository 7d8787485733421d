"""Preferences of others: the columns of TRL, ranked and scored lists, scores of steps, and `kto_tag`.

A row is a question with answers that were judged. Which form it has follows from its columns (`preference_forms`).
Texts, lists of messages and recordings may stand in all of them; columns of no meaning here go to the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from pydantic import ValidationError

from audiollm.data.convert.huggingface import open_splits, row_label, split_of
from audiollm.data.convert.implicit_prompt import split_prompt
from audiollm.data.convert.objects import read_objects
from audiollm.data.convert.preference_forms import (
    ANSWER_COLUMNS,
    COMMON_COLUMNS,
    FORMS,
    GivenAnswer,
    RowForm,
    WrongField,
    cell_value,
    plain_number,
)
from audiollm.data.convert.recordings import is_recording, recording_part
from audiollm.data.convert.request import ConversionRequest, SourceRows, find_columns
from audiollm.data.convert.tables import read_table
from audiollm.data.convert.turns import ROLES, Turn, as_turn, messages_of, num_marks, parts_of
from audiollm.data.records.sample import AudioPart, Part, RatedAnswer, Sample, find_equal, first_problem
from audiollm.errors import BadSample, ConfigError, suggestion

PREFERENCE_COLUMNS = {**COMMON_COLUMNS, **ANSWER_COLUMNS}
TABLES = (".csv", ".tsv")
TABLE_COLUMNS = {"audios": (*COMMON_COLUMNS["audios"], "path", "file")}
"""Columns of a CSV or TSV file that are taken for a field, beside those of other sources."""
_PARTNERS = {"chosen": "rejected", "rejected": "chosen", "completion": "label", "label": "completion"}
_KINDS = {"empty_answer": "empty answer", "too_short": "empty answer", "answered_twice": "two answers in one"}


def preferences(request: ConversionRequest) -> SourceRows:
    """Rows of a JSON, JSONL, CSV or TSV file, of a Hugging Face dataset's folder, or of a parquet or arrow file.

    Raises:
        ConfigError: the columns make none of the known forms.
    """
    total, names, rows = _rows(request)
    is_table = request.source.suffix in TABLES
    usual = PREFERENCE_COLUMNS | (TABLE_COLUMNS if is_table else {})
    columns = find_columns(names, request.columns, str(request.source), usual)
    if names:  # of a file without a usable line the first problem is told
        _check_columns(columns, names, str(request.source))

    def results() -> Iterator[Sample | BadSample]:
        taken: set[str] = set()
        for place, label, split, record in rows:
            if isinstance(record, BadSample):
                yield record
                continue
            given = {name: record.get(column) for name, column in columns.items()}
            if is_table:
                given = {name: cell_value(name, cell) for name, cell in given.items()}
            fields = {name: value for name, value in given.items() if value is not None}
            if split:
                fields.setdefault("split", split_of(split))
            made = _converted(_Row(request, place, label, fields, columns))
            yield made if isinstance(made, BadSample) else _with_free_id(made, taken)

    return SourceRows(total, results(), _notes(columns, names))


# Private: rows


_Place = tuple[str, str, str, dict[str, Any] | BadSample]
"""Place, label (an id, and the beginning of names of files), split, and the row."""


@dataclass(frozen=True)
class _Row:
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


def _rows(request: ConversionRequest) -> tuple[int | None, list[str], Iterator[_Place]]:
    """The number of rows, if known, the names of all columns, and the rows."""
    source = request.source
    if source.is_dir() or source.suffix in (".parquet", ".arrow"):
        splits = open_splits(source)
        names = list(dict.fromkeys(name for dataset in splits.values() for name in dataset.features or {}))
        known = [getattr(dataset, "num_rows", None) for dataset in splits.values()]
        total = None if None in known else sum(size for size in known if size is not None)
        rows = (
            (f"{source} {split}[{n}]".replace(" [", "["), row_label(source, split, n), split, row)
            for split, dataset in splits.items()
            for n, row in enumerate(dataset)
        )
        return total, names, rows
    if source.suffix in TABLES:
        columns, cells = read_table(source)
        table = ((f"{source}: row {n}", f"{source.stem}-{n}", "", row) for n, row in cells)
        return len(cells), columns, table
    objects = read_objects(source)
    names = list(dict.fromkeys(name for _, row in objects if isinstance(row, dict) for name in row))
    listed = (
        (f"{source}{number}", f"{source.stem}-{number.strip(':[]')}", "", row) for number, row in objects
    )
    return len(objects), names, listed


def _check_columns(columns: Mapping[str, str], names: Sequence[str], place: str) -> None:
    if any(form.fits(columns) for form in FORMS):
        return
    missing = next(
        (other for name, other in _PARTNERS.items() if name in columns and other not in columns), None
    )
    others = [column for name, column in columns.items() if name not in PREFERENCE_COLUMNS]
    near = suggestion(missing, others) if missing and others else ""
    forms = "; ".join(", ".join(sorted(form.needs[0])) for form in FORMS)
    remedy = f"{near} " if near.startswith("did") else ""
    raise ConfigError(
        f"{f'there is no column {missing}' if missing else 'no judged answers'}; its columns: {', '.join(names)}",
        place,
        f"{remedy}columns are named by --columns field=column, and one of these sets is needed: {forms}",
    )


def _notes(columns: Mapping[str, str], names: Sequence[str]) -> tuple[str, ...]:
    others = [column for name, column in columns.items() if name not in PREFERENCE_COLUMNS]
    unread = [name for name in names if name not in columns.values()]
    notes = [f"columns of no meaning here, kept as metadata: {', '.join(others)}"] if others else []
    return (*notes, *([f"columns that others stand for, not read: {', '.join(unread)}"] if unread else []))


def _with_free_id(sample: Sample, taken: set[str]) -> Sample:
    """The sample with a number behind an id that is taken: rows of one prompt often share an id."""
    free, number = sample.id, 1
    while free in taken:
        number += 1
        free = f"{sample.id}-{number}"
    taken.add(free)
    return sample if free == sample.id else sample.model_copy(update={"id": free})


def _converted(row: _Row) -> Sample | BadSample:
    try:
        return _sample(row)
    except WrongField as error:
        reason = f"column {row.name(error.name)}: {error.reason}" if error.name else error.reason
        return BadSample(row.place, row.id, reason, error.kind)
    except ValidationError as error:
        kind = _KINDS.get(error.errors()[0]["type"], "unusable row")
        return BadSample(row.place, row.id, first_problem(error), kind)


@contextmanager
def _in_field(name: str, kind: str = "unusable row") -> Iterator[None]:
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


def _sample(row: _Row) -> Sample:
    fields = _with_prompt_apart(row.fields)
    form = next((form for form in FORMS if form.fits(fields)), None)
    if form is None:
        expected = ", ".join(
            row.name(name) for name in ANSWER_COLUMNS if name in row.columns and name not in fields
        )
        raise WrongField("", f"holds no judged answer; its empty columns: {expected}", "no judgement")
    given = form.read(fields)
    with _in_field("messages" if "messages" in fields else "prompt"):
        messages = messages_of(_turns(fields), _sounds(row, fields), row.recording)
    if not messages:
        raise WrongField("prompt", "there is none: name its column (--columns prompt=NAME)", "no prompt")
    answers = [_answer(row, one) for one in given]
    if form.compares:
        _check_comparison(row, answers, given)
    sample = Sample(
        id=row.id, messages=messages, task="text", answers=answers, metadata=_metadata(row, fields, form)
    )
    return sample.model_copy(update={"task": row.request.task.name if row.request.task else _task(sample)})


def _task(sample: Sample) -> str:
    if sample.audio("user"):
        return "audio_qa"
    return "tts" if sample.audio_parts() else "text"


def _check_comparison(row: _Row, answers: Sequence[RatedAnswer], given: Sequence[GivenAnswer]) -> None:
    if len(answers) < 2:
        raise WrongField(given[0].name, "a list of one answer: a comparison needs two", "one answer")
    equal = find_equal(answers)
    if equal is not None:
        first, other = (row.name(given[index].name) for index in equal)
        where = (
            f"{first} and {other}" if first != other else f"column {first}: answers {equal[0]} and {equal[1]}"
        )
        raise WrongField(
            "", f"{where} are equal: give answers that differ, or leave the row out", "equal answers"
        )


def _metadata(row: _Row, fields: Mapping[str, Any], form: RowForm) -> dict[str, Any]:
    """Fields that the form does not use, by their columns, and the split."""
    used = {*COMMON_COLUMNS, *form.uses}
    kept = {row.name(name): _plain(name, value) for name, value in fields.items() if name not in used}
    if "margin" in fields and "margin" in form.uses:
        kept["margin"] = plain_number("margin", fields["margin"])
    if "split" in fields:
        kept["split"] = str(fields["split"])
    return kept


def _plain(name: str, value: Any) -> Any:
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


# Private: the question


def _is_conversation(value: Any) -> bool:
    if not isinstance(value, list) or not value or not isinstance(value[0], Mapping):
        return False
    return value[0].get("role") is not None or value[0].get("from") is not None


def _with_prompt_apart(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with the answers apart from conversations that end with them, and from prompts that they repeat."""
    fields = dict(given)
    if "messages" in fields:
        return _with_last_turn_apart(fields)
    prompt, both = fields.get("prompt"), [fields.get("chosen"), fields.get("rejected")]
    # some datasets have the last question in a column beside conversations that begin with it, as TRL expects it
    are_long = all(isinstance(value, list) and len(value) > 1 and _is_conversation(value) for value in both)
    repeat_it = are_long and not _is_conversation(prompt)
    if not repeat_it and (prompt or not all(isinstance(value, str) for value in both)):
        return fields
    try:
        shared, fields["chosen"], fields["rejected"] = split_prompt(*both)
    except ValueError as error:
        if "audios" in fields and not repeat_it:  # the question is heard
            return fields
        raise WrongField("", str(error), "no prompt") from None
    with _in_field("chosen"):
        if prompt and not any(str(prompt).strip() in _text_of(message) for message in shared):
            raise WrongField("prompt", "is not in the messages that chosen and rejected begin with")
    return {**fields, "prompt": shared}


def _with_last_turn_apart(fields: dict[str, Any]) -> dict[str, Any]:
    with _in_field("messages"):
        messages = list(fields["messages"])
        if not messages or ROLES.get(as_turn(messages[-1])[0]) != "assistant":
            return fields
    name = "chosen" if {"rejected", "rejected_audio"} & set(fields) else "completion"
    if fields.get(name) == messages:  # some datasets repeat the better conversation for SFT
        return _with_prompt_apart({key: value for key, value in fields.items() if key != "messages"})
    if name in fields:
        raise WrongField("messages", f"the conversation ends with an answer, and {name} is another one")
    return {**fields, "messages": messages[:-1], name: messages[-1]}


def _text_of(message: Mapping[str, Any]) -> str:
    _, content = as_turn(message)
    return content if isinstance(content, str) else "".join(str(part.get("text") or "") for part in content)


def _turns(fields: Mapping[str, Any]) -> list[Turn]:
    for name in ("system", "input"):
        if not isinstance(fields.get(name, ""), str):
            raise WrongField(name, f"a text is expected, not {fields[name]!r:.60}")
    turns: list[Turn] = [("system", fields["system"])] if fields.get("system") else []
    with _in_field("history"):
        for question, answer in fields.get("history") or ():
            turns += [("user", question), ("assistant", answer)]
    if "messages" in fields:
        turns += [as_turn(message) for message in fields["messages"]]
    prompt = fields.get("prompt")
    if _is_conversation(prompt):
        return turns + [as_turn(message) for message in prompt or ()]
    if prompt is not None and not isinstance(prompt, str):
        raise WrongField("prompt", f"a text or a list of messages is expected, not {prompt!r:.60}")
    asked = "\n".join(filter(None, [prompt, fields.get("input")]))
    return [*turns, ("user", asked)] if asked or ("audios" in fields and "messages" not in fields) else turns


def _sounds(row: _Row, fields: Mapping[str, Any]) -> list[AudioPart]:
    """The recordings that are listed beside the prompt."""
    listed = fields.get("audios") or []
    with _in_field("audios", "unusable recording"):
        return [row.recording(value) for value in ([listed] if isinstance(listed, str | Mapping) else listed)]


# Private: answers


def _answer(row: _Row, given: GivenAnswer) -> RatedAnswer:
    judged = dict(given.judged)
    if "metadata" in judged:
        judged["metadata"] = {key: _plain(given.name, value) for key, value in judged["metadata"].items()}
    try:
        with _in_field(given.name):
            return RatedAnswer(content=_content(row, given), **judged)
    except ValidationError as error:
        kind = _KINDS.get(error.errors()[0]["type"], "unusable row")
        reason = "the answer is empty" if kind == "empty answer" else first_problem(error)
        raise WrongField(given.name, reason, kind) from None


def _content(row: _Row, given: GivenAnswer) -> list[Part]:
    """The parts of an answer: its text, with its recordings at the marks, or behind it."""
    value, sound = given.value, given.sound
    listed = sound if isinstance(sound, list) else [] if sound is None else [sound]
    beside = [row.recording(one) for one in listed]
    if is_recording(value):
        return [row.recording(value), *beside]
    if isinstance(value, Mapping):
        value = [value]
    if _is_conversation(value):
        turns = [as_turn(message) for message in value]
        if len(turns) != 1 or ROLES.get(turns[0][0]) != "assistant":
            roles = ", ".join(role for role, _ in turns)
            raise ValueError(f"one message, of the assistant, is expected, and not those of {roles}")
        value = turns[0][1]
    if value is not None and not isinstance(value, str | list):
        raise ValueError(f"a text, a message or a recording is expected, not {value!r:.60}")
    marks = num_marks(value or "")
    if marks not in (0, len(beside)):
        raise ValueError(f"{len(beside)} recordings for {marks} marks")
    parts = parts_of(value or "", beside if marks else [], row.recording)
    return parts if marks else [*parts, *beside]
