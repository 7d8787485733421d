"""A sample as a model of another family than ours reads it: the family lays out its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from audiollm.commands.inspect_answers import AnswerRows, AnswersView, compared_answers
from audiollm.commands.inspect_table import SampleView
from audiollm.data.inspection import KindSummary, StreamRow
from audiollm.errors import BadSample, ConfigError

if TYPE_CHECKING:
    from audiollm.data.records.source import LoadedSample
    from audiollm.families.family import ModelFolder


def view_by_family(
    model: ModelFolder,
    loaded: LoadedSample,
    wanted_answers: str | None,
    heading: str,
    notes: list[str],
    place: str,
) -> SampleView | AnswersView:
    """Lay out a conversation with its last answer, or a prompt with all answers to choose among.

    Args:
        wanted_answers: numbers of the two answers to compare, like "0,2"; None: the best and the worst.

    Raises:
        ConfigError: the model cannot take the sample, or `wanted_answers` names no two answers.
    """
    from audiollm.families.prompts import with_last_message_as_answer

    notes.append(f"rows as {model.path} reads them")
    prompted = loaded if loaded.sample.answers else with_last_message_as_answer(loaded)
    try:
        answers = model.sample_rows(prompted, range(len(prompted.sample.answers)), place)
    except BadSample as error:
        raise ConfigError(f"sample {loaded.sample.id}: {error}", place) from None
    books = max((len(row.codes) for rows in answers for row in rows), default=1) or 1
    if not loaded.sample.answers:
        return SampleView(heading, notes, books, answers[0], _summary(answers[0]), True)
    split = [_split_prompt_rows(rows) for rows in answers]
    return AnswersView(
        heading=heading,
        notes=notes,
        books=books,
        sample=loaded.sample,
        prompt=split[0][0],
        answers=[AnswerRows(rows, {}) for _, rows in split],
        compared=compared_answers(loaded.sample, wanted_answers, notes),
        has_codes=True,
    )


def _split_prompt_rows(rows: Sequence[StreamRow]) -> tuple[list[StreamRow], list[StreamRow]]:
    """The rows of the prompt, and those from the first target on."""
    first = next((place for place, row in enumerate(rows) if any(row.is_target)), len(rows))
    return list(rows[:first]), list(rows[first:])


def _summary(rows: Sequence[StreamRow]) -> list[dict[str, Any]]:
    summaries = []
    for kind, group in groupby(sorted(rows, key=lambda row: row.kind), key=lambda row: row.kind):
        of_kind = list(group)
        ends = sum(
            code == "EOS" and is_target
            for row in of_kind
            for code, is_target in zip(row.codes, row.is_target, strict=False)
        )
        targets, weight = sum(sum(row.is_target) for row in of_kind), sum(sum(row.weights) for row in of_kind)
        summaries.append(asdict(KindSummary(kind, len(of_kind), targets, ends, weight)))
    return summaries
