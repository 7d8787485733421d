"""A job: the plan of one caller, what it still needs of the engine, and what the caller hears of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from audiollm.generation.engine.request import Answer, Event
from audiollm.generation.speaking.plans import Ask, Plan


@dataclass(frozen=True)
class Emitted:
    """A piece of a result that is not complete yet."""

    item: Any
    sound_s: float = 0.0
    """Seconds of sound in it."""


@dataclass(frozen=True)
class Done:
    """The plan is carried out."""

    result: Any


@dataclass(frozen=True)
class Failed:
    """The plan ended with an error."""

    error: BaseException


Progress = Emitted | Done | Failed
Emit = Callable[..., None]
"""`emit(item, sound_s=0.0)` gives the caller a piece."""
MakePlan = Callable[[Emit], Plan[Any]]


@dataclass(eq=False)
class PlanJob:
    """A plan on its way. Callers read `ahead_s` and call `take`; all else belongs to the thread of the service."""

    make_plan: MakePlan
    listener: Callable[[Progress], None]
    """Called from the thread of the service: it must return at once."""
    plan: Plan[Any] | None = None
    ask: Ask | None = None
    answers: list[Answer | None] = field(default_factory=list)
    """Answers to `ask`, in the order of its requests; None: not there yet."""
    unsubmitted: deque[int] = field(default_factory=deque)
    """Places of the requests that the engine has not been given yet."""
    running: dict[int, int] = field(default_factory=dict)
    """Number in the engine -> place of the request."""
    paused: bool = False
    is_over: bool = False
    _ahead_s: float = 0.0
    _guard: threading.Lock = field(default_factory=threading.Lock)

    @property
    def ahead_s(self) -> float:
        """Seconds of sound that the caller has not taken."""
        with self._guard:
            return self._ahead_s

    def take(self, sound_s: float) -> None:
        """Tell that the caller has taken seconds of sound."""
        with self._guard:
            self._ahead_s -= sound_s

    def emit(self, item: Any, sound_s: float = 0.0) -> None:
        """Give the caller a piece."""
        with self._guard:
            self._ahead_s += sound_s
        self.listener(Emitted(item, sound_s))

    def advance(self) -> bool:
        """Begin the plan, or give it the answers to its last ask; return whether it is over.

        Raises:
            Exception: whatever the plan raises.
        """
        try:
            if self.plan is None:
                self.plan = self.make_plan(self.emit)
                self.ask = next(self.plan)
            else:
                self.ask = self.plan.send([answer for answer in self.answers if answer is not None])
        except StopIteration as end:
            self.is_over = True
            self.listener(Done(end.value))
            return True
        self.answers = [None] * len(self.ask.requests)
        self.unsubmitted = deque(range(len(self.ask.requests)))
        return False

    def hear(self, event: Event) -> None:
        """Pass an event of one of its requests on to the plan. Raises: Exception: whatever the plan raises."""
        assert self.ask is not None
        self.ask.on_event(event)

    def end(self, error: BaseException | None = None) -> None:
        """End the plan before its end; with an error, the caller hears of it."""
        self.is_over = True
        if self.plan is not None:
            self.plan.close()
        if error is not None:
            self.listener(Failed(error))
