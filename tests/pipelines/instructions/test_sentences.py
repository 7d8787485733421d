"""A table of instructions with the edits that they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from audiollm.data.records.thoughts import ThoughtEvent, ThoughtRecord
from pipelines.instructions import EditPlan, InstructionQuestion, read_instruction

DURATION_S = 12.0
RECORD = ThoughtRecord(
    events=[
        ThoughtEvent(sound="dog bark", start_s=1.0, end_s=1.5, source="a brown dog"),
        ThoughtEvent(sound="rooster", start_s=3.0, end_s=4.2),
        ThoughtEvent(sound="dog bark", start_s=5.0, end_s=5.6, source="a brown dog"),
        ThoughtEvent(sound="bell", start_s=8.0, end_s=9.0),
        ThoughtEvent(sound="car horn", start_s=10.0, end_s=10.5, manner="loud", place="on the left"),
    ],
    background=["rain"],
)


class Sentence(NamedTuple):
    """A line of the table."""

    words: str
    edits: str
    span: tuple[float, float] | None


def read_table(name: str = "sentences.txt") -> list[Sentence]:
    """The lines of a table beside this file."""
    sentences = []
    for line in Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        words, edits = (cell.strip() for cell in line.rsplit("|", 1))
        span = None
        if words.startswith("["):
            start, _, end = words[1 : words.index("]")].partition("-")
            span, words = (float(start), float(end)), words[words.index("]") + 1 :].strip()
        sentences.append(Sentence(words, edits, span))
    return sentences


def plans_of(sentence: Sentence) -> list[EditPlan]:
    """The edits of a sentence; none: it is asked about."""
    try:
        return read_instruction(sentence.words, RECORD, DURATION_S, sentence.span)
    except InstructionQuestion:
        return []


def is_right(plans: list[EditPlan], edits: str) -> bool:
    """Whether edits are those of the table."""
    cells = [] if edits == "asks" else [cell.split() for cell in edits.split(";")]
    if len(cells) != len(plans):
        return False
    for plan, (kind, word, seconds) in zip(plans, cells, strict=True):
        start_s, end_s = map(float, seconds.split("-"))
        if plan.kind != kind or abs(plan.start_s - start_s) > 0.01 or abs(plan.end_s - end_s) > 0.01:
            return False
        if word not in plan.caption.split() if word != "_" else plan.caption:
            return False
    return True


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_at_least_95_of_100_sentences_are_read_right_and_none_is_read_as_another_edit(every: int) -> None:
    sentences = read_table()[::every]
    readings = [(sentence, plans_of(sentence)) for sentence in sentences]
    wrong = [
        (sentence.words, sentence.edits, plans)
        for sentence, plans in readings
        if not is_right(plans, sentence.edits)
    ]
    assert len(sentences) >= 100 and len(wrong) <= 0.05 * len(sentences), wrong
    assert not [plans for _, _, plans in wrong if plans], "a question may be one too many, an edit may not"
