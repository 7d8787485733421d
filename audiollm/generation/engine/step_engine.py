"""What a service asks of an engine: requests in, events out, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from audiollm.generation.engine.request import Event, Finished, Request

STEP_S = 0.02
"""Longest time in seconds that an engine with a thread of its own holds up the thread that calls it."""


@dataclass(frozen=True)
class Unanswered:
    """End of a request that failed; the others in the engine go on."""

    request: int
    error: Exception


class StepEngine(Protocol):
    """Answers several requests step by step; `generation.engine.engine.Engine` is one."""

    @property
    def acting(self) -> bool:
        """Whether a step would do anything."""

    def can_take(self, request: Any) -> bool:
        """Whether a request would begin at the next step, or is one that `submit` refuses."""

    def submit(self, request: Any) -> int:
        """Queue a request; return its number. Raises: ValueError: it can never be answered."""

    def step(self) -> Sequence[Event | Unanswered]:
        """Go on with all requests that are not paused."""

    def cancel(self, number: int) -> None:
        """Drop a request; does nothing for a finished or unknown one."""

    def pause(self, number: int, paused: bool = True) -> None:
        """Let a request rest, or go on; does nothing for a finished or unknown one."""


class TurnEngine:
    """A `StepEngine` of a family whose engine streams one request: each request has a stream, which takes its turn.

    Args:
        open_stream: begins a request, and yields its events; the last one is `Finished`.
        slots: most streams beside each other.
    """

    def __init__(self, open_stream: Callable[[Request], Iterator[Event]], slots: int) -> None:
        self._open_stream, self._slots, self._submitted = open_stream, slots, 0
        self._streams: dict[int, Iterator[Event]] = {}
        self._paused: set[int] = set()

    @property
    def acting(self) -> bool:
        """See `StepEngine.acting`."""
        return bool(self._streams.keys() - self._paused)

    def can_take(self, request: Request) -> bool:
        """See `StepEngine.can_take`."""
        return len(self._streams) < self._slots

    def submit(self, request: Request) -> int:
        """See `StepEngine.submit`."""
        self._submitted += 1
        self._streams[self._submitted] = self._open_stream(request)
        return self._submitted

    def step(self) -> list[Event | Unanswered]:
        """See `StepEngine.step`: an event of each stream."""
        events: list[Event | Unanswered] = []
        for number in [*self._streams.keys() - self._paused]:
            try:
                events.append(replace(next(self._streams[number]), request=number))
            except Exception as error:
                events.append(Unanswered(number, error))
            if isinstance(events[-1], Finished | Unanswered):
                self.cancel(number)
        return events

    def cancel(self, number: int) -> None:
        """See `StepEngine.cancel`."""
        self._streams.pop(number, None)
        self._paused.discard(number)

    def pause(self, number: int, paused: bool = True) -> None:
        """See `StepEngine.pause`."""
        if paused and number in self._streams:
            self._paused.add(number)
        else:
            self._paused.discard(number)


class ThreadedEngine:
    """A `StepEngine` whose steps are taken in a thread of its own, so that engines beside it go on meanwhile.

    Until a step is over, `step` returns no events and `can_take` refuses; cancels and rests take effect after it.
    """

    def __init__(self, engine: StepEngine) -> None:
        self.engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self._running: Future[Sequence[Event | Unanswered]] | None = None
        self._deferred: list[Callable[[], None]] = []
        self._cancelled: set[int] = set()

    @property
    def acting(self) -> bool:
        """See `StepEngine.acting`."""
        return self._running is not None or self.engine.acting

    def can_take(self, request: Any) -> bool:
        """See `StepEngine.can_take`."""
        return self._running is None and self.engine.can_take(request)

    def submit(self, request: Any) -> int:
        """See `StepEngine.submit`; for requests that `can_take` allows."""
        assert self._running is None
        return self.engine.submit(request)

    def step(self) -> list[Event | Unanswered]:
        """See `StepEngine.step`."""
        if self._running is None:
            self._running = self._thread.submit(self.engine.step)
        wait_for([self._running], STEP_S)
        if not self._running.done():
            return []
        running, self._running = self._running, None
        events = [event for event in running.result() if event.request not in self._cancelled]
        for call in self._deferred:
            call()
        self._deferred, self._cancelled = [], set()
        return events

    def cancel(self, number: int) -> None:
        """See `StepEngine.cancel`."""
        if self._running is not None:
            self._cancelled.add(number)
        self._after_step(partial(self.engine.cancel, number))

    def pause(self, number: int, paused: bool = True) -> None:
        """See `StepEngine.pause`."""
        self._after_step(partial(self.engine.pause, number, paused))

    def _after_step(self, call: Callable[[], None]) -> None:
        if self._running is None:
            call()
        else:
            self._deferred.append(call)
