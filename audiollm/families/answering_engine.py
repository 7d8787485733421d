"""The engine of a model that answers in words alone, as a service takes its steps."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

import torch

from audiollm.families.answering import AnsweringModel, AnswerRequest, SteppedAnswers, WrittenAnswer
from audiollm.generation.engine.request import Answer, Event, Finished, TextPiece
from audiollm.generation.engine.step_engine import STEP_S, StepEngine, ThreadedEngine, Unanswered


class AnswerCancelled(BaseException):
    """Ends the answer to somebody who has left: no `Exception`, as `AnsweringModel.answer` asks for."""


class AnsweringEngine:
    """A `StepEngine` of an `AnsweringModel`: its answers are computed in a thread, so that no step takes long.

    A text comes in one piece.
    """

    def __init__(self, model: AnsweringModel) -> None:
        self._model, self._submitted = model, 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._waiting: deque[tuple[int, AnswerRequest]] = deque()
        self._running: tuple[int, float, Future[list[WrittenAnswer]]] | None = None
        self._cancelled: set[int] = set()

    @property
    def acting(self) -> bool:
        """See `StepEngine.acting`."""
        return self._running is not None or bool(self._waiting)

    def can_take(self, request: AnswerRequest) -> bool:
        """See `StepEngine.can_take`."""
        return not self.acting

    def submit(self, request: AnswerRequest) -> int:
        """See `StepEngine.submit`."""
        self._submitted += 1
        self._waiting.append((self._submitted, request))
        return self._submitted

    def step(self) -> list[Event | Unanswered]:
        """See `StepEngine.step`."""
        if self._running is None:
            number, request = self._waiting.popleft()

            def check_stop() -> None:
                if number in self._cancelled:
                    raise AnswerCancelled

            answering = self._thread.submit(self._model.answer, [request], check_stop)
            self._running = number, time.perf_counter(), answering
        number, begun, answering = self._running
        wait_for([answering], STEP_S)
        if not answering.done():
            return []
        self._running = None
        if number in self._cancelled:
            self._cancelled.discard(number)
            return []
        if (error := answering.exception()) is not None:
            return [Unanswered(number, error if isinstance(error, Exception) else RuntimeError(repr(error)))]
        text = answering.result()[0].text
        no_codes = torch.zeros(0, 0, dtype=torch.long)
        answer = Answer((text,), no_codes, "end", None, time.perf_counter() - begun)
        return [TextPiece(number, text), Finished(number, answer)]

    def cancel(self, number: int) -> None:
        """See `StepEngine.cancel`; an answer under way ends after its next token."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != number)
        if self._running is not None and self._running[0] == number:
            self._cancelled.add(number)

    def pause(self, number: int, paused: bool = True) -> None:
        """See `StepEngine.pause`: words are no sound, whose listener could fall behind."""


def words_engine(
    answering: AnsweringModel, slots: int, max_length: int, prefill_positions: int
) -> StepEngine:
    """Make the engine of a model that answers in words alone: side by side where its class allows it.

    Its steps are taken in a thread of its own. The numbers are those of `SteppedAnswers.step_engine`.
    """
    engine = None
    if isinstance(answering, SteppedAnswers):
        engine = answering.step_engine(slots, max_length, prefill_positions)
    return AnsweringEngine(answering) if engine is None else ThreadedEngine(engine)
