"""Work of a model that asks its engine again and again: a long text, a dialogue, a long recording.

A *plan* is a generator: it yields what the engine is to answer, is sent the answers, and returns its result. It has no
engine, so that one call carries it out alone (`run_plan`), and a service many of them beside each other.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from audiollm.generation.engine.request import Answer, Event
from audiollm.generation.speaking.protocol import SpeakingModel

Result = TypeVar("Result")
OnSeconds = Callable[[float], None]
"""Called now and then with the seconds of speech made so far."""


def _ignore_event(event: Event) -> None:
    """Events are of use to streams alone."""


@dataclass(frozen=True)
class Ask:
    """Requests that a plan needs the answers of."""

    requests: Sequence[Any]
    """As the engine of the plan's model takes them: a `Request`, or what another family has in its place."""
    on_event: Callable[[Event], None] = _ignore_event
    """Called with each event of these requests, the last ones included."""


Plan = collections.abc.Generator[Ask, list[Answer], Result]


def run_plan(
    model: SpeakingModel, plan: Plan[Result], on_seconds: OnSeconds = lambda seconds: None
) -> Result:
    """Carry out a plan whose asks have no `on_event`, with engines of its own, and return its result.

    Raises:
        ConfigError: what the plan raises.
    """
    seconds = 0.0
    try:
        ask = next(plan)
        while True:
            answers = model.answer_all(ask.requests, partial(_report_seconds, on_seconds, seconds))
            if frames := sum(answer.codes_KT.shape[1] for answer in answers):
                seconds += frames / model.codec.frame_rate
            ask = plan.send(answers)
    except StopIteration as end:
        result: Result = end.value
        return result


def _report_seconds(on_seconds: OnSeconds, before_s: float, seconds: float) -> None:
    on_seconds(before_s + seconds)
