"""Preferences of others: the columns of TRL, ranked and scored lists, scores of steps, and `kto_tag`.

A row is a question with answers that were judged. Which form it has follows from its columns (`preference_forms`).
Texts, lists of messages and recordings may stand in all of them; columns of no meaning here go to the metadata.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from audiollm.data.convert.chats import as_turn, messages_of, num_marks, parts_of, role_of
from audiollm.data.convert.preference_forms import (
    ANSWER_COLUMNS,
    COMMON_COLUMNS,
    FORMS,
    GivenAnswer,
    RowForm,
    WrongField,
    cell_value,
    plain_number,
    split_prompt,
)
from audiollm.data.convert.question_rows import (
    QuestionRow,
    in_field,
    is_conversation,
    listed_sounds,
    plain_value,
    question_turns,
    source_rows,
)
from audiollm.data.convert.recordings import is_recording
from audiollm.data.convert.request import (
    ConversionRequest,
    SourceRows,
    bad_rows_sample,
    known_split,
)
from audiollm.data.records.sample import ContentPart, RatedAnswer, Sample, find_equal, problem_with_remedy
from audiollm.data.tables.columns import columns_note, find_columns, is_missing
from audiollm.data.tables.rows import TABLE_ENDINGS
from audiollm.data.tables.table import BadRow
from audiollm.errors import BadSample, ConfigError, suggestion

PREFERENCE_COLUMNS = {**COMMON_COLUMNS, **ANSWER_COLUMNS}
TABLE_COLUMNS = {"audios": (*COMMON_COLUMNS["audios"], "path", "file")}
"""Columns of a CSV or TSV file that are taken for a field, beside those of other sources."""
_PARTNERS = {"chosen": "rejected", "rejected": "chosen", "completion": "label", "label": "completion"}
_NAMES = ("id", "split")
_REVERSED = "score_chosen is below score_rejected"
_KINDS = {"empty_answer": "empty answer", "too_short": "empty answer", "answered_twice": "two answers in one"}


def preferences(request: ConversionRequest) -> SourceRows:
    """Rows of a JSON, JSONL, CSV or TSV file, of a Hugging Face dataset's folder, or of a parquet or arrow file.

    Raises:
        ConfigError: the columns make none of the known forms.
    """
    total, names, rows, notes = source_rows(request)
    is_table = request.source.suffix.lower() in TABLE_ENDINGS
    usual = PREFERENCE_COLUMNS | (TABLE_COLUMNS if is_table else {})
    columns = find_columns(names, request.columns, str(request.source), usual)
    if names:  # of a file without a usable line the first problem is told
        _check_columns(columns, names, str(request.source))
    remarks: Counter[str] = Counter()

    def results() -> Iterator[Sample | BadSample]:
        used_ids: set[str] = set()
        for place, label, split, record in rows:
            if isinstance(record, BadRow):
                yield bad_rows_sample(place, record)
                continue
            values = {name: record.get(column) for name, column in columns.items()}
            if is_table:
                values = {name: cell_value(name, cell) for name, cell in values.items()}
            fields = {
                name: value
                for name, value in values.items()
                if value is not None
                and not ((is_table or name in _NAMES) and is_missing(value, name in _NAMES))
            }
            if split:
                fields.setdefault("split", split)
            if isinstance(fields.get("split"), str):
                fields["split"] = known_split(place, fields["split"])
            converted = _converted(QuestionRow(request, place, label, fields, columns))
            if isinstance(converted, BadSample):
                yield converted
                continue
            if _is_reversed(converted):
                remarks[_REVERSED] += 1
            yield _with_free_id(converted, used_ids)

    return SourceRows(total, results(), (*notes, *_note_columns(columns, names)), remarks=remarks)


# Private: rows


def _check_columns(columns: Mapping[str, str], names: Sequence[str], place: str) -> None:
    if any(form.fits(columns) for form in FORMS):
        return
    missing = next(
        (partner for name, partner in _PARTNERS.items() if name in columns and partner not in columns), None
    )
    extra_columns = [column for name, column in columns.items() if name not in PREFERENCE_COLUMNS]
    near = suggestion(missing, extra_columns) if missing and extra_columns else ""
    forms = "; ".join(", ".join(sorted(form.needs[0])) for form in FORMS)
    remedy = f"{near} " if near.startswith("did") else ""
    raise ConfigError(
        f"{f'there is no column {missing}' if missing else 'no judged answers'}; its columns: {', '.join(names)}",
        place,
        f"{remedy}columns are named by --columns field=column, and one of these sets is needed: {forms}",
    )


def _note_columns(columns: Mapping[str, str], names: Sequence[str]) -> tuple[str, ...]:
    extra_columns = [column for name, column in columns.items() if name not in PREFERENCE_COLUMNS]
    unread = [name for name in names if name not in columns.values()]
    read = {name: column for name, column in columns.items() if name in PREFERENCE_COLUMNS}
    notes = [columns_note(read)] if read else []
    notes += (
        [f"columns of no meaning here, kept as metadata: {', '.join(extra_columns)}"] if extra_columns else []
    )
    return (*notes, *([f"columns that others stand for, not read: {', '.join(unread)}"] if unread else []))


def _is_reversed(sample: Sample) -> bool:
    """Return whether the scores of a pair contradict its order."""
    scores = {answer.rank: answer.score for answer in sample.answers}
    chosen_score, rejected_score = scores.get(1), scores.get(2)
    return (
        len(scores) == 2
        and chosen_score is not None
        and rejected_score is not None
        and chosen_score < rejected_score
    )


def _with_free_id(sample: Sample, used_ids: set[str]) -> Sample:
    """The sample with a number behind an id that is taken: rows of one prompt often share an id."""
    free, number = sample.id, 1
    while free in used_ids:
        number += 1
        free = f"{sample.id}-{number}"
    used_ids.add(free)
    return sample if free == sample.id else sample.model_copy(update={"id": free})


def _converted(row: QuestionRow) -> Sample | BadSample:
    try:
        return _convert_preference(row)
    except WrongField as error:
        reason = f"column {row.name(error.name)}: {error.reason}" if error.name else error.reason
        return BadSample(row.place, row.id, reason, error.kind)
    except ValidationError as error:
        kind = _KINDS.get(error.errors()[0]["type"], "unusable row")
        return BadSample(row.place, row.id, problem_with_remedy(error), kind)


def _convert_preference(row: QuestionRow) -> Sample:
    fields = _with_prompt_apart(row.fields)
    form = next((form for form in FORMS if form.fits(fields)), None)
    if form is None:
        expected = ", ".join(
            row.name(name) for name in ANSWER_COLUMNS if name in row.columns and name not in fields
        )
        raise WrongField("", f"holds no judged answer; its empty columns: {expected}", "no judgement")
    given_answers = form.read(fields)
    with in_field("messages" if "messages" in fields else "prompt"):
        messages = messages_of(question_turns(fields), listed_sounds(row, fields), row.recording)
    if not messages:
        raise WrongField("prompt", "there is none: name its column (--columns prompt=NAME)", "no prompt")
    answers = [_answer(row, given_answer) for given_answer in given_answers]
    if form.compares:
        _check_comparison(row, answers, given_answers)
    sample = Sample(
        id=row.id,
        messages=messages,
        task="text",
        answers=answers,
        metadata=_collect_preference_metadata(row, fields, form),
    )
    return sample.model_copy(
        update={"task": row.request.task.name if row.request.task else _infer_sample_task(sample)}
    )


def _infer_sample_task(sample: Sample) -> str:
    if sample.audio("user"):
        return "audio_qa"
    return "tts" if sample.audio_parts() else "text"


def _check_comparison(
    row: QuestionRow, answers: Sequence[RatedAnswer], given_answers: Sequence[GivenAnswer]
) -> None:
    if len(answers) < 2:
        raise WrongField(given_answers[0].name, "a list of one answer: a comparison needs two", "one answer")
    equal = find_equal(answers)
    if equal is not None:
        first, second = (row.name(given_answers[index].name) for index in equal)
        where = (
            f"{first} and {second}"
            if first != second
            else f"column {first}: answers {equal[0]} and {equal[1]}"
        )
        raise WrongField(
            "", f"{where} are equal: give answers that differ, or leave the row out", "equal answers"
        )


def _collect_preference_metadata(
    row: QuestionRow, fields: Mapping[str, Any], form: RowForm
) -> dict[str, Any]:
    """Fields that the form does not use, by their columns, and the split."""
    used = {*COMMON_COLUMNS, *form.uses}
    metadata = {
        row.name(name): plain_value(name, value) for name, value in fields.items() if name not in used
    }
    if "margin" in fields and "margin" in form.uses:
        metadata["margin"] = plain_number("margin", fields["margin"])
    if "split" in fields:
        if not isinstance(fields["split"], str):
            raise WrongField("split", f"a text is expected, not {fields['split']!r:.60}")
        metadata["split"] = fields["split"]
    return metadata


# Private: the question


def _with_prompt_apart(row_fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with the answers apart from conversations that end with them, and from prompts that they repeat."""
    fields = dict(row_fields)
    if "messages" in fields:
        return _with_last_turn_apart(fields)
    prompt, both = fields.get("prompt"), [fields.get("chosen"), fields.get("rejected")]
    # some datasets have the last question in a column beside conversations that begin with it, as TRL expects it
    are_long = all(isinstance(value, list) and len(value) > 1 and is_conversation(value) for value in both)
    repeat_it = are_long and not is_conversation(prompt)
    if not repeat_it and (prompt or not all(isinstance(value, str) for value in both)):
        return fields
    try:
        shared, fields["chosen"], fields["rejected"] = split_prompt(*both)
    except ValueError as error:
        if "audios" in fields and not repeat_it:  # the question is heard
            return fields
        raise WrongField("", str(error), "no prompt") from None
    with in_field("chosen"):
        if prompt and not any(str(prompt).strip() in _join_turn_text(message) for message in shared):
            raise WrongField("prompt", "is not in the messages that chosen and rejected begin with")
    return {**fields, "prompt": shared}


def _with_last_turn_apart(fields: dict[str, Any]) -> dict[str, Any]:
    with in_field("messages"):
        messages = list(fields["messages"])
        if not messages or role_of(as_turn(messages[-1]).role) != "assistant":
            return fields
    name = "chosen" if {"rejected", "rejected_audio"} & set(fields) else "completion"
    if fields.get(name) == messages:  # some datasets repeat the better conversation for SFT
        return _with_prompt_apart({key: value for key, value in fields.items() if key != "messages"})
    if name in fields:
        raise WrongField("messages", f"the conversation ends with an answer, and {name} is another one")
    return {**fields, "messages": messages[:-1], name: messages[-1]}


def _join_turn_text(message: Mapping[str, Any]) -> str:
    content = as_turn(message).content
    return (
        content
        if isinstance(content, str)
        else "".join(str(content_part.get("text") or "") for content_part in content)
    )


# Private: answers


def _answer(row: QuestionRow, given_answer: GivenAnswer) -> RatedAnswer:
    judged = dict(given_answer.judged)
    if "metadata" in judged:
        judged["metadata"] = {
            key: plain_value(given_answer.name, value) for key, value in judged["metadata"].items()
        }
    try:
        with in_field(given_answer.name):
            return RatedAnswer(content=_build_answer_content(row, given_answer), **judged)
    except ValidationError as error:
        kind = _KINDS.get(error.errors()[0]["type"], "unusable row")
        reason = "the answer is empty" if kind == "empty answer" else problem_with_remedy(error)
        raise WrongField(given_answer.name, reason, kind) from None


def _build_answer_content(row: QuestionRow, given_answer: GivenAnswer) -> list[ContentPart]:
    """The parts of an answer: its text, with its recordings at the marks, or behind it."""
    value, sound = given_answer.value, given_answer.sound
    listed = sound if isinstance(sound, list) else [] if sound is None else [sound]
    beside = [row.recording(recording) for recording in listed]
    if is_recording(value):
        return [row.recording(value), *beside]
    if isinstance(value, Mapping):
        value = [value]
    if is_conversation(value):
        turns = [as_turn(message) for message in value]
        if len(turns) != 1 or role_of(turns[0].role) != "assistant":
            roles = ", ".join(turn.role for turn in turns)
            raise ValueError(f"one message, of the assistant, is expected, and not those of {roles}")
        value = turns[0].content
    if value is not None and not isinstance(value, str | list):
        raise ValueError(f"a text, a message or a recording is expected, not {value!r:.60}")
    marks = num_marks(value or "")
    if marks not in (0, len(beside)):
        raise ValueError(f"{len(beside)} recordings for {marks} marks")
    parts = parts_of(value or "", beside if marks else [], row.recording)
    return parts if marks else [*parts, *beside]
