"""Scores batches of answers by several rewards: concurrently, each with a time-out, bad values named and left out.

Shapes: A answers.
"""

from __future__ import annotations

import inspect
import math
import statistics
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from audiollm.errors import StageError
from audiollm.rl.rewards.batch import RewardBatch, RewardFunction, ScoredStep, called_reward
from audiollm.rl.rewards.catalog import RewardTerm

OnError = Literal["skip", "stop"]
"""`skip`: the answer is left out and the run goes on; `stop`: the run ends with the error."""
TIMEOUT_S = 120.0
GAVE_NONE = "gave None"
"""Reason where a reward leaves an answer out of its own accord."""

Outcome = float | Sequence[ScoredStep] | str
"""The value of an answer, or those of its steps; where it is missing, why it is."""


@dataclass(frozen=True)
class RewardProblem:
    """A value that is missing: of which reward, for which answer, and why."""

    reward: str
    sample: str
    number: int
    """Number of the answer in its group."""
    reason: str

    def __str__(self) -> str:
        return f"reward {self.reward}, sample {self.sample!r}, answer {self.number}: {self.reason}"


@dataclass(frozen=True)
class RewardScores:
    """The rewards of a batch."""

    total_A: list[float]
    """Weighted sums; 0 for answers that are left out."""
    kept_A: list[bool]
    """Whether an answer counts in baseline and loss: False where a reward has no value for it."""
    by_name: dict[str, list[float | None]]
    """Values of each reward, without its weight; None where there is none."""
    problems: list[RewardProblem] = field(default_factory=list)
    steps_by_name: dict[str, list[Sequence[ScoredStep] | None]] = field(default_factory=dict)
    """Scored steps of each answer, of the rewards that score steps; None where there are none for the answer."""
    raw_A: list[float] | None = None
    """Weighted sums before standardisation, where `total_A` is standardised: its mean over a batch is always 0."""

    @property
    def reported_A(self) -> list[float]:
        """The sums that figures and files show."""
        return self.total_A if self.raw_A is None else self.raw_A

    def figures(self) -> dict[str, float]:
        """Mean and standard deviation of each reward and of the sum, and the share of answers that are left out."""
        figures: dict[str, float] = {}
        for name, values in self.by_name.items():
            figures |= _moments(f"rewards/{name}", [value for value in values if value is not None])
        kept_totals = [total for total, keep in zip(self.reported_A, self.kept_A, strict=True) if keep]
        figures |= _moments("reward", kept_totals)
        return figures | {"rewards/left_out": 1 - len(kept_totals) / len(self.kept_A) if self.kept_A else 0.0}


class RewardSuite:
    """The rewards of a recipe, ready to score.

    Async rewards run at the same time, each in a thread with an event loop of its own; the others run one after the
    other meanwhile. A function that raises, hangs or returns a wrong number of values is asked again for one answer
    at a time, so that the answer at fault is named. A second hang ends that search: the answers that are left are
    not scored. A thread that hangs is abandoned.

    Args:
        functions: by name, as `load_rewards` gives them.
        timeout_s: longest time that a reward may take for a call, where its term gives none.
        on_error: what follows when a reward has no value for an answer.
    """

    def __init__(
        self,
        terms: Sequence[RewardTerm],
        functions: Mapping[str, RewardFunction],
        timeout_s: float = TIMEOUT_S,
        on_error: OnError = "skip",
    ) -> None:
        self.terms, self._functions = list(terms), dict(functions)
        self._timeouts_s = {term.name: term.timeout_s or timeout_s for term in self.terms}
        self._on_error = on_error

    def score(self, batch: RewardBatch) -> RewardScores:
        """Score a batch.

        Raises:
            StageError: a reward has no value for an answer, and `on_error` is `stop`.
        """
        outcomes: dict[str, list[Outcome]] = {}
        awaited = {
            name: _Call(function, batch) for name, function in self._functions.items() if _is_async(function)
        }
        for term in self.terms:
            if term.name not in awaited:
                call = _Call(self._functions[term.name], batch)
                outcomes[term.name] = self._values(term.name, call, batch)
        for name, call in awaited.items():
            outcomes[name] = self._values(name, call, batch)
        problems = [
            RewardProblem(term.name, answer.sample.id, answer.number, value)
            for term in self.terms
            for answer, value in zip(batch, outcomes[term.name], strict=True)
            if isinstance(value, str)
        ]
        if problems and self._on_error == "stop":
            raise StageError(
                str(problems[0]), "mend the reward, or go on without such answers by on_error: skip"
            )
        return self._summed(outcomes, problems, len(batch))

    def _summed(
        self, outcomes: Mapping[str, list[Outcome]], problems: list[RewardProblem], count: int
    ) -> RewardScores:
        by_name = {term.name: [_value_of(outcome) for outcome in outcomes[term.name]] for term in self.terms}
        steps = {
            term.name: [_steps_of(outcome) for outcome in outcomes[term.name]]
            for term in self.terms
            if any(_steps_of(outcome) is not None for outcome in outcomes[term.name])
        }
        totals, is_kept = [], []
        for answer in range(count):
            values = [(term.weight, by_name[term.name][answer]) for term in self.terms]
            weighted = [weight * value for weight, value in values if value is not None]
            is_kept.append(len(weighted) == len(values))
            totals.append(math.fsum(weighted) if is_kept[-1] else 0.0)
        return RewardScores(totals, is_kept, by_name, problems, steps)

    def _values(self, name: str, call: _Call, batch: RewardBatch) -> list[Outcome]:
        """The values of a reward; in the place of one that is missing, why it is."""
        if not batch.answers:
            return []
        outcome = call.outcome(len(batch), self._timeouts_s[name])
        if not isinstance(outcome, str):
            return outcome
        if len(batch) == 1:
            return [outcome]
        return self._one_by_one(name, batch, outcome)

    def _one_by_one(self, name: str, batch: RewardBatch, reason: str) -> list[Outcome]:
        values: list[Outcome] = []
        for answer in batch:
            call = _Call(self._functions[name], RewardBatch([answer]))
            outcome = call.outcome(1, self._timeouts_s[name])
            values += [outcome] if isinstance(outcome, str) else outcome
            if call.is_hanging:
                break
        return values + [f"not scored: {reason}"] * (len(batch) - len(values))


class _Call:
    """A call of a reward in a thread of its own, which a process that ends does not wait for."""

    def __init__(self, function: RewardFunction, batch: RewardBatch) -> None:
        self._future: Future[Any] = Future()
        self._function = function
        self._start_s = time.monotonic()
        self.is_hanging = False
        threading.Thread(target=self._run, args=(function, batch), daemon=True).start()

    def outcome(self, count: int, timeout_s: float) -> list[Outcome] | str:
        """The values, or the reason why there are none."""
        try:
            error = self._future.exception(max(0.0, self._start_s + timeout_s - time.monotonic()))
        except TimeoutError:
            self.is_hanging = True
            return f"hangs: no value after {timeout_s:g} s"
        if error is not None:
            message = f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return message + _line_of(error, self._function)
        values = self._future.result()
        try:
            values = list(values)
        except TypeError:
            return f"returned {type(values).__name__}, no list of values"
        if len(values) != count:
            return f"returned {len(values)} values for {count} answers"
        return [_check_outcome(value) for value in values]

    def _run(self, function: RewardFunction, batch: RewardBatch) -> None:
        try:
            self._future.set_result(called_reward(function, batch))
        except BaseException as error:
            self._future.set_exception(error)


def _value_of(outcome: Outcome) -> float | None:
    if isinstance(outcome, str):
        return None
    if isinstance(outcome, float):
        return outcome
    return sum(step.score for step in outcome) / len(outcome)


def _steps_of(outcome: Outcome) -> Sequence[ScoredStep] | None:
    return None if isinstance(outcome, str | float) else outcome


def _check_outcome(value: Any) -> Outcome:
    return _checked_steps(value) if isinstance(value, list | tuple) else _checked_number(value)


def _checked_number(value: Any) -> float | str:
    if value is None:
        return GAVE_NONE
    try:
        number = float(value)
    except (TypeError, ValueError):
        return f"gave {type(value).__name__}, no number"
    return number if math.isfinite(number) else f"gave {number}"


def _checked_steps(steps: Sequence[Any]) -> Outcome:
    if not steps:
        return "gave no steps"
    for step in steps:
        if not isinstance(step, ScoredStep):
            return f"gave a list of {type(step).__name__}, not of ScoredStep"
        if isinstance(reason := _checked_number(step.score), str):
            return f"{reason} for the step {step.text!r}"
        if not isinstance(step.end, int | None):
            return f"gave {type(step.end).__name__} as the end of the step {step.text!r}, no number of characters"
    return list(steps)


def _line_of(error: BaseException, function: RewardFunction) -> str:
    """The innermost line of a function's own file at which an error was raised; empty where there is none."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f" ({Path(code.co_filename).name}, line {lines[-1]})" if lines else ""


def _is_async(function: RewardFunction) -> bool:
    """Whether a function, or a callable object, is declared by `async def`."""
    called: Any = type(function).__call__ if not inspect.isroutine(function) else function
    return inspect.iscoroutinefunction(called)


def _moments(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}/mean": statistics.fmean(values), f"{name}/std": statistics.pstdev(values)}
