"""Prompts for training on fresh answers (GRPO): rows of TRL (`prompt`, `solution`) and ms-swift (`messages`, `audios`,
`solution`).

A row becomes a conversation that ends with the solution, which rewards compare answers with. An answer that the
messages end with already gives way to it, as in ms-swift.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from audiollm.audio.discovery import AUDIO_EXTENSIONS
from audiollm.data.convert.chats import messages_of
from audiollm.data.convert.preference_forms import COMMON_COLUMNS, WrongField, cell_value
from audiollm.data.convert.question_rows import (
    QuestionRow,
    in_field,
    listed_sounds,
    plain_value,
    question_turns,
    source_rows,
)
from audiollm.data.convert.request import (
    ConversionRequest,
    SourceRows,
    bad_rows_sample,
    draw_held_out,
    known_split,
)
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, problem_with_remedy
from audiollm.data.tables.columns import (
    NAME_FIELDS,
    USUAL_COLUMNS,
    columns_note,
    find_columns,
    is_missing,
    list_cell,
)
from audiollm.data.tables.rows import TABLE_ENDINGS
from audiollm.data.tables.table import BadRow
from audiollm.errors import BadSample, ConfigError

PROMPT_COLUMNS: Mapping[str, tuple[str, ...]] = {
    **COMMON_COLUMNS,
    "prompt": (*COMMON_COLUMNS["prompt"], "problem"),
    "audios": (*COMMON_COLUMNS["audios"], "audio_id", *USUAL_COLUMNS["audio"]),
    "solution": ("solution", "answer", "ground_truth", "reference_answer", "target", "label"),
    "choices": ("choices", "options"),
}
"""Fields of a prompt, and the columns that are taken for them, the first that is there."""
_PICTURES = ("images", "image", "videos", "video")


def prompts(request: ConversionRequest) -> SourceRows:
    """Rows of a JSON, JSONL, CSV, TSV, parquet or arrow file, or of a Hugging Face dataset's folder.

    Raises:
        ConfigError: there is no column of solutions, or none of prompts.
    """
    total, names, rows, notes = source_rows(request)
    columns = find_columns(names, request.columns, str(request.source), PROMPT_COLUMNS)
    for field, partners in (("solution", ()), ("prompt", ("messages", "audios"))):
        if names and not {field, *partners} & set(columns):
            remedy = f"name it: --columns {field}=NAME; usual names are {', '.join(PROMPT_COLUMNS[field])}"
            raise ConfigError(f"no column of {field}s among {', '.join(names)}", str(request.source), remedy)
    is_table = request.source.suffix.lower() in TABLE_ENDINGS

    def results() -> Iterator[Sample | BadSample]:
        for place, label, split, record in rows:
            if isinstance(record, BadRow):
                yield bad_rows_sample(place, record)
                continue
            values = {name: record.get(column) for name, column in columns.items()}
            if is_table:
                values = {
                    name: list_cell(cell) if name == "choices" and cell else cell_value(name, cell)
                    for name, cell in values.items()
                }
            fields = {
                name: value for name, value in values.items() if not is_missing(value, name in NAME_FIELDS)
            }
            fields = ({"split": split} if split else {}) | fields
            name = fields.get("split")
            if isinstance(name, str):
                fields["split"] = known_split(place, name)
            yield _converted(QuestionRow(request, place, label, fields, columns))

    rows_or_splits = _with_held_out(request, results()) if request.asking.held_out else results()
    return SourceRows(total, rows_or_splits, (*notes, columns_note(columns, names)))


# Private


def _with_held_out(
    request: ConversionRequest, results: Iterator[Sample | BadSample]
) -> Iterator[Sample | BadSample]:
    """The rows, with a share of those whose source names no split held out, by recording, or by prompt without one."""
    listed = list(results)
    recordings = [
        (str(number), next((part.path or "" for part in row.audio_parts()), row.id))
        for number, row in enumerate(listed)
        if isinstance(row, Sample) and "split" not in row.metadata
    ]
    held_out = draw_held_out(recordings, request.asking.held_out, request.seed)
    drawn = {int(number): "test" if number in held_out else "train" for number, _ in recordings}
    for number, row in enumerate(listed):
        if isinstance(row, Sample) and number in drawn:
            row = row.model_copy(update={"metadata": {**row.metadata, "split": drawn[number]}})
        yield row


def _converted(row: QuestionRow) -> Sample | BadSample:
    try:
        return _convert_prompt(row)
    except WrongField as error:
        reason = f"column {row.name(error.name)}: {error.reason}" if error.name else error.reason
        return BadSample(row.place, row.id, reason, error.kind)
    except ValidationError as error:
        return BadSample(row.place, row.id, problem_with_remedy(error), "unusable row")


def _convert_prompt(row: QuestionRow) -> Sample:
    fields = row.fields
    for name in _PICTURES:
        if fields.get(name):
            raise WrongField(name, "holds pictures, and only text and recordings are read", "pictures")
    solution = _solution(fields)
    with in_field("messages" if "messages" in fields else "prompt"):
        turns = question_turns(fields)
        messages = messages_of(turns, listed_sounds(row, fields), row.recording)
        while messages and messages[-1].role == "assistant":
            messages.pop()
    if not any(message.role == "user" for message in messages):
        raise WrongField("prompt", "there is none", "no prompt")
    has_audio = any(
        isinstance(content_part, AudioPart) for message in messages for content_part in message.content
    )
    metadata = _collect_prompt_metadata(row)
    if not has_audio:
        _refuse_unread_recordings(metadata)
    task = row.request.task.name if row.request.task else ("audio_qa" if has_audio else "text")
    answer = Message(role="assistant", content=[TextPart(text=solution)])
    return Sample(id=row.id, messages=[*messages, answer], task=task, metadata=metadata)


def _refuse_unread_recordings(metadata: Mapping[str, Any]) -> None:
    """
    Raises:
        WrongField: a column looks like the recordings of a sample that has none.
    """
    for name, value in metadata.items():
        if isinstance(value, str) and Path(value).suffix.lower() in AUDIO_EXTENSIONS:
            raise WrongField(
                name, f"looks like a recording, and is not read: --columns audios={name} names it"
            )


def _solution(fields: Mapping[str, Any]) -> str:
    solution = fields.get("solution")
    if isinstance(solution, list) and len(solution) == 1:
        solution = solution[0]
    if isinstance(solution, int | float) and not isinstance(solution, bool):
        solution = f"{solution:g}"
    if solution is None:
        raise WrongField("solution", "there is none: nothing to compare answers with", "no solution")
    if not isinstance(solution, str):
        raise WrongField("solution", f"a text is expected, not {solution!r:.60}", "no solution")
    return solution


def _collect_prompt_metadata(row: QuestionRow) -> dict[str, Any]:
    """The options, the split, and the fields that the chat does not use, by their columns."""
    used = {*COMMON_COLUMNS, "solution", "choices", *_PICTURES}
    metadata = {
        row.name(name): plain_value(name, value) for name, value in row.fields.items() if name not in used
    }
    choices = row.fields.get("choices")
    if choices is not None:
        if not isinstance(choices, list):
            raise WrongField("choices", f"a list is expected, not {choices!r:.60}")
        metadata["choices"] = [str(choice) for choice in choices]
    if "split" in row.fields:
        if not isinstance(row.fields["split"], str):
            raise WrongField("split", f"a text is expected, not {row.fields['split']!r:.60}")
        metadata["split"] = row.fields["split"]
    return metadata
