"""Failures on every item: a run in which one step fails on all of its items for one reason ends with an error.

Loops over items record the outcome of each step in the `FailureWatch` of their run. It stops the run after a few
dozen equal failures without a success, and judges smaller runs at their end, when their results are written. Damaged
files are faults of the items: they never stop a run, which ends with an error for them only where all files are damaged
alike.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from audiollm.errors import StageError, error_line

MAX_EQUAL_FAILURES = 24
"""Equal failures of a step that never succeeded, after which a run stops."""
MAX_SIMILAR_FAILURES = 48
"""Equal failures in a row, but for numbers (sizes, addresses) in their texts, that end a run: weaker evidence."""
MIN_EQUAL_FAILURES = 3
"""Equal failures of a step that never succeeded, from which a finished run ends with an error; a run of fewer items
needs all of them."""
REMEDY = "what was done is kept: correct the settings of this step, its model or its package, and run again to go on"


class FailedOnEveryItem(StageError):
    """A step that failed on every item of a run for the same reason."""


@dataclass
class _StepOutcomes:
    """The outcomes of one step: equal failures by their text, and faults of the items beside them."""

    successes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    item_faults: Counter[str] = field(default_factory=Counter)

    @property
    def calls(self) -> int:
        return self.successes + self.failures.total() + self.item_faults.total()

    @property
    def is_stuck(self) -> bool:
        """Whether the failures so far are enough to stop the run."""
        if self.successes or not self.failures:
            return False
        count = self.failures.total()
        if len(self.failures) == 1:
            return count >= MAX_EQUAL_FAILURES
        return count >= MAX_SIMILAR_FAILURES and len({_without_numbers(text) for text in self.failures}) == 1

    def common_reason(self, min_failures: int) -> str | None:
        """Return the one reason for which all items failed, at least `min_failures` of them.

        Of damaged items `MIN_EQUAL_FAILURES` are needed: one or two say nothing of the run.
        """
        failures = self.failures or self.item_faults
        needed = min_failures if self.failures else MIN_EQUAL_FAILURES
        if self.successes or len(failures) != 1 or failures.total() < needed:
            return None
        return next(iter(failures))


@dataclass
class FailureWatch:
    """Watches the steps of one run.

    Args:
        run: name of the stage or command, for the message.
    """

    run: str = ""
    _steps: dict[str, _StepOutcomes] = field(default_factory=dict)
    _any_failed: bool = False

    def succeed(self, step: str) -> None:
        """Record that a step has done an item."""
        self._outcomes(step).successes += 1

    def fail(self, step: str, reason: str, item_fault: bool = False) -> None:
        """Record that a step has failed on an item.

        Args:
            item_fault: the item is to blame (a damaged file), not the step.
        """
        self._any_failed = True
        outcomes = self._outcomes(step)
        (outcomes.item_faults if item_fault else outcomes.failures)[reason] += 1

    @property
    def failed_calls(self) -> int:
        """Number of failures of all steps."""
        return sum(outcomes.failures.total() for outcomes in self._steps.values())

    def is_suspect(self, step: str) -> bool:
        """Whether a step has failed on all items so far, for one reason."""
        return self._outcomes(step).common_reason(1) is not None

    @property
    def stuck_step(self) -> str | None:
        """The step that has failed so often that the run must stop."""
        if not self._any_failed:
            return None
        return next((step for step, outcomes in self._steps.items() if outcomes.is_stuck), None)

    def stop_if_stuck(self) -> None:
        """
        Raises:
            FailedOnEveryItem: a step has failed on a few dozen items for one reason, and succeeded on none.
        """
        if (step := self.stuck_step) is not None:
            outcomes = self._steps[step]
            self._raise(step, outcomes.failures.total(), next(iter(outcomes.failures)), "first ")

    def reason_of_all(self, step: str) -> str | None:
        """The one reason for which a step has failed on every item of the run; None: it has not."""
        most_calls = max((outcomes.calls for outcomes in self._steps.values()), default=0)
        return self._outcomes(step).common_reason(max(1, min(MIN_EQUAL_FAILURES, most_calls)))

    def verify(self) -> None:
        """Judge a run at its end.

        Raises:
            FailedOnEveryItem: a step has failed on every item for one reason.
        """
        for step, outcomes in self._steps.items():
            if (reason := self.reason_of_all(step)) is not None:
                self._raise(step, outcomes.calls, reason, "")

    def _outcomes(self, step: str) -> _StepOutcomes:
        outcomes = self._steps.get(step)
        if outcomes is None:  # three counters are made only once: this is called several times per item
            outcomes = self._steps[step] = _StepOutcomes()
        return outcomes

    def _raise(self, step: str, count: int, reason: str, which: str) -> None:
        items = f"all of the {which}{count} items" if count > 1 else "its only item"
        where = f"{self.run}: " if self.run else ""
        raise FailedOnEveryItem(f"{where}{step} failed on {items} for the same reason: {reason}", REMEDY)


_current: ContextVar[FailureWatch | None] = ContextVar("failure_watch", default=None)


@contextmanager
def watched_failures(run: str = "") -> Iterator[FailureWatch]:
    """Watch the steps of all that runs inside, and judge them at the end.

    Raises:
        FailedOnEveryItem: a step has failed on every item for one reason.
    """
    watch = FailureWatch(run)
    token = _current.set(watch)
    try:
        yield watch
    finally:
        _current.reset(token)
    watch.verify()


@contextmanager
def noted_outcome(step: str, item_faults: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Record in the watch of the run whether a step does what stands inside; its exceptions pass on.

    Args:
        item_faults: exceptions for which the item is to blame.

    Raises:
        FailedOnEveryItem: the step has failed on a few dozen items for this reason, and succeeded on none.
    """
    try:
        yield
    except StageError:
        raise
    except Exception as error:
        note_failure(step, error_line(error), isinstance(error, item_faults))
        raise
    note_success(step)


def note_success(step: str) -> None:
    """Record in the watch of the run that a step has done an item, in this run or in an earlier one."""
    if (watch := _current.get()) is not None:
        watch.succeed(step)


def note_failure(step: str, reason: str, item_fault: bool = False) -> None:
    """Record in the watch of the run that a step has failed on an item.

    Args:
        item_fault: the item is to blame (a damaged file), not the step.

    Raises:
        FailedOnEveryItem: the step has failed on a few dozen items for this reason, and succeeded on none.
    """
    if (watch := _current.get()) is not None:
        watch.fail(step, reason, item_fault)
        watch.stop_if_stuck()


def failed_calls() -> int:
    """Return the number of failures in this run so far; a result during which it grows is not to be stored."""
    watch = _current.get()
    return 0 if watch is None else watch.failed_calls


@contextmanager
def shared_watch() -> Iterator[FailureWatch]:
    """Give the watch of the run that this code is part of; without one, a watch of its own."""
    watch = _current.get()
    if watch is not None:
        yield watch
        return
    with watched_failures() as watch:
        yield watch


def _without_numbers(reason: str) -> str:
    return re.sub(r"(0x[0-9a-fA-F]+|\d+(\.\d+)?)", "#", reason)
