"""Scores of answers to the questions of `thinking.jsonl`: the record that was written beside the true one.

They read records alone, and know nothing of the model. An answer that is no record names nothing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from audiollm.data.records.thoughts import ThoughtError, ThoughtEvent, ThoughtRecord, parse_thought
from audiollm.evaluate.report.statistics import bootstrap_ratio, share
from pipelines.audiocot.thinking import EditAnswer, parse_edit

QuestionKind = Literal["clip", "region", "instruction"]
TOLERANCE_S = 0.25
"""Times are right within this."""


@dataclass(frozen=True)
class AnswerScore:
    """One answer beside the truth.

    Args:
        problem: why the answer is no record of the clip; None: it is one.
        named: events named right; each true event is named at most once.
        answered, wanted: events of the answer, and of the truth.
        orders: of each pair of true events with different names that are both named right, whether their order is.
        starts, ends, times: of each event named right, whether its beginning, its end, and both are.
        background: whether the background is right, where all of the clip is asked for.
        sounds: of a region, whether its sound is named and no other.
        operation, span: of an instruction, whether they are right.
    """

    question: QuestionKind
    problem: str | None
    named: int = 0
    answered: int = 0
    wanted: int = 0
    orders: tuple[bool, ...] = ()
    starts: tuple[bool, ...] = ()
    ends: tuple[bool, ...] = ()
    times: tuple[bool, ...] = ()
    background: bool | None = None
    sounds: bool | None = None
    operation: bool | None = None
    span: bool | None = None
    record: ThoughtRecord | None = field(default=None, repr=False)
    """The record of the answer."""


def score_answer(
    question: QuestionKind, truth: Mapping[str, Any], answer: str, duration_s: float
) -> AnswerScore:
    """Score an answer.

    Args:
        truth: the right answer, as `thinking.jsonl` has it.
        duration_s: of the clip.
    """
    true_edit = EditAnswer.model_validate_json(json.dumps(truth)) if question == "instruction" else None
    true_record = true_edit.record if true_edit else ThoughtRecord.model_validate_json(json.dumps(truth))
    answer_edit: EditAnswer | None = None
    answer_record, problem = ThoughtRecord(), None
    try:
        if true_edit is not None:
            answer_edit = parse_edit(answer, duration_s)
            answer_record = answer_edit.record
        else:
            answer_record = parse_thought(answer, duration_s)
    except ThoughtError as error:
        problem = str(error)
    pairs = matched_events(true_record.events, answer_record.events)
    starts = tuple(_is_near(a.start_s, b.start_s) for a, b in pairs)
    ends = tuple(_is_near(a.end_s, b.end_s) for a, b in pairs)
    is_right_background = problem is None and _names(true_record.background) == _names(
        answer_record.background
    )
    is_right_operation = is_right_span = None
    if true_edit is not None:
        is_right_operation = answer_edit is not None and answer_edit.operation == true_edit.operation
        is_right_span = answer_edit is not None and all(map(_is_near, true_edit.span, answer_edit.span))
    return AnswerScore(
        question,
        problem,
        named=len(pairs),
        answered=len(answer_record.events),
        wanted=len(true_record.events),
        orders=_orders(pairs),
        starts=starts,
        ends=ends,
        times=tuple(map(all, zip(starts, ends, strict=True))),
        background=is_right_background if question == "clip" else None,
        sounds=_names(true_record.sounds()) == _names(answer_record.sounds())
        if question == "region"
        else None,
        operation=is_right_operation,
        span=is_right_span,
        record=None if problem else answer_record,
    )


def matched_events(
    true_events: Sequence[ThoughtEvent], answer_events: Sequence[ThoughtEvent]
) -> list[tuple[ThoughtEvent, ThoughtEvent]]:
    """Pairs of a true event and one of the same name; of several, those that begin nearest to each other."""
    near = sorted(
        (abs(a.start_s - b.start_s), m, n)
        for m, a in enumerate(true_events)
        for n, b in enumerate(answer_events)
        if _normalize_sound_name(a.sound) == _normalize_sound_name(b.sound)
    )
    matched_truths, matched_answers, pairs = set[int](), set[int](), list[tuple[int, int]]()
    for _, m, n in near:
        if m not in matched_truths and n not in matched_answers:
            matched_truths.add(m)
            matched_answers.add(n)
            pairs.append((m, n))
    return [(true_events[m], answer_events[n]) for m, n in sorted(pairs)]


def score_tables(scores: Sequence[AnswerScore]) -> dict[str, dict[str, Any]]:
    """Shares by kind of question, each with its 95 % interval and `n`; of F1, the interval is drawn over answers."""
    tables: dict[str, dict[str, Any]] = {}
    for question in dict.fromkeys(score.question for score in scores):
        question_scores = [score for score in scores if score.question == question]
        table = {
            "events named (F1)": named_events(question_scores),
            "order of two events": share(_flatten(score.orders for score in question_scores)),
            "times within 0.25 s": share(_flatten(score.times for score in question_scores)),
        }
        verdicts = {
            "background": [score.background for score in question_scores],
            "its sound and no other": [score.sounds for score in question_scores],
            "operation": [score.operation for score in question_scores],
            "span": [score.span for score in question_scores],
            "operation and span": [
                score.operation and score.span if score.span is not None else None
                for score in question_scores
            ],
        }
        for name, values in verdicts.items():
            if present := [value for value in values if value is not None]:
                table[name] = share(present)
        tables[question] = {
            **table,
            "answers that are records": share([score.problem is None for score in question_scores]),
            "beginnings within 0.25 s": share(_flatten(score.starts for score in question_scores)),
            "ends within 0.25 s": share(_flatten(score.ends for score in question_scores)),
        }
    return tables


def named_events(scores: Sequence[AnswerScore]) -> dict[str, Any]:
    """F1 of the events that are named, over all answers: `accuracy` with its interval, and `n` true events."""
    parts = [2.0 * score.named for score in scores]
    wholes = [float(score.answered + score.wanted) for score in scores]
    value = sum(parts) / sum(wholes) if sum(wholes) else None
    low, high = bootstrap_ratio(parts, wholes) or (None, None)
    return {"accuracy": value, "low": low, "high": high, "n": sum(score.wanted for score in scores)}


# Private


def _orders(pairs: Sequence[tuple[ThoughtEvent, ThoughtEvent]]) -> tuple[bool, ...]:
    return tuple(
        (first.start_s < second.start_s) == (first_answer.start_s < second_answer.start_s)
        for (first, first_answer), (second, second_answer) in itertools.combinations(pairs, 2)
        if _normalize_sound_name(first.sound) != _normalize_sound_name(second.sound)
    )


def _is_near(wanted_s: float, found_s: float) -> bool:
    return abs(wanted_s - found_s) <= TOLERANCE_S + 1e-9


def _normalize_sound_name(sound: str) -> str:
    return " ".join(sound.casefold().split())


def _names(sounds: Sequence[str]) -> set[str]:
    return {_normalize_sound_name(sound) for sound in sounds}


def _flatten(values: Iterable[tuple[bool, ...]]) -> list[bool]:
    return list(itertools.chain.from_iterable(values))
