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
    wanted_edit = EditAnswer.model_validate_json(json.dumps(truth)) if question == "instruction" else None
    wanted = wanted_edit.record if wanted_edit else ThoughtRecord.model_validate_json(json.dumps(truth))
    found_edit: EditAnswer | None = None
    found, problem = ThoughtRecord(), None
    try:
        if wanted_edit is not None:
            found_edit = parse_edit(answer, duration_s)
            found = found_edit.record
        else:
            found = parse_thought(answer, duration_s)
    except ThoughtError as error:
        problem = str(error)
    pairs = matched_events(wanted.events, found.events)
    starts = tuple(_is_near(a.start_s, b.start_s) for a, b in pairs)
    ends = tuple(_is_near(a.end_s, b.end_s) for a, b in pairs)
    is_right_background = problem is None and _names(wanted.background) == _names(found.background)
    is_right_operation = is_right_span = None
    if wanted_edit is not None:
        is_right_operation = found_edit is not None and found_edit.operation == wanted_edit.operation
        is_right_span = found_edit is not None and all(map(_is_near, wanted_edit.span, found_edit.span))
    return AnswerScore(
        question,
        problem,
        named=len(pairs),
        answered=len(found.events),
        wanted=len(wanted.events),
        orders=_orders(pairs),
        starts=starts,
        ends=ends,
        times=tuple(map(all, zip(starts, ends, strict=True))),
        background=is_right_background if question == "clip" else None,
        sounds=_names(wanted.sounds()) == _names(found.sounds()) if question == "region" else None,
        operation=is_right_operation,
        span=is_right_span,
        record=None if problem else found,
    )


def matched_events(
    wanted: Sequence[ThoughtEvent], found: Sequence[ThoughtEvent]
) -> list[tuple[ThoughtEvent, ThoughtEvent]]:
    """Pairs of a true event and one of the same name; of several, those that begin nearest to each other."""
    near = sorted(
        (abs(a.start_s - b.start_s), m, n)
        for m, a in enumerate(wanted)
        for n, b in enumerate(found)
        if _name(a.sound) == _name(b.sound)
    )
    own, other, pairs = set[int](), set[int](), list[tuple[int, int]]()
    for _, m, n in near:
        if m not in own and n not in other:
            own.add(m)
            other.add(n)
            pairs.append((m, n))
    return [(wanted[m], found[n]) for m, n in sorted(pairs)]


def score_tables(scores: Sequence[AnswerScore]) -> dict[str, dict[str, Any]]:
    """Shares by kind of question, each with its 95 % interval and `n`; of F1, the interval is drawn over answers."""
    found: dict[str, dict[str, Any]] = {}
    for question in dict.fromkeys(score.question for score in scores):
        own = [score for score in scores if score.question == question]
        table = {
            "events named (F1)": named_events(own),
            "order of two events": share(_each(score.orders for score in own)),
            "times within 0.25 s": share(_each(score.times for score in own)),
        }
        verdicts = {
            "background": [score.background for score in own],
            "its sound and no other": [score.sounds for score in own],
            "operation": [score.operation for score in own],
            "span": [score.span for score in own],
            "operation and span": [
                score.operation and score.span if score.span is not None else None for score in own
            ],
        }
        for name, values in verdicts.items():
            if known := [value for value in values if value is not None]:
                table[name] = share(known)
        found[question] = {
            **table,
            "answers that are records": share([score.problem is None for score in own]),
            "beginnings within 0.25 s": share(_each(score.starts for score in own)),
            "ends within 0.25 s": share(_each(score.ends for score in own)),
        }
    return found


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
        (first.start_s < second.start_s) == (found.start_s < other.start_s)
        for (first, found), (second, other) in itertools.combinations(pairs, 2)
        if _name(first.sound) != _name(second.sound)
    )


def _is_near(wanted_s: float, found_s: float) -> bool:
    return abs(wanted_s - found_s) <= TOLERANCE_S + 1e-9


def _name(sound: str) -> str:
    return " ".join(sound.casefold().split())


def _names(sounds: Sequence[str]) -> set[str]:
    return {_name(sound) for sound in sounds}


def _each(values: Iterable[tuple[bool, ...]]) -> list[bool]:
    return list(itertools.chain.from_iterable(values))
