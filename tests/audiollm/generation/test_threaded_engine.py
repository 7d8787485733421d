"""An engine whose steps have a thread of their own: nobody waits for them, and what is asked meanwhile comes after."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
import torch

from audiollm.generation.engine.request import Answer, Finished, TextPiece
from audiollm.generation.engine.step_engine import ThreadedEngine
from audiollm.generation.service.jobs import Done
from audiollm.generation.service.service import GenerationService
from audiollm.generation.speaking.plans import Ask


class SlowEngine:
    """Two steps for each request, each as long as the gate is closed; a request "fail" breaks the engine."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.requests: dict[int, str] = {}
        self.steps: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []
        self._submitted = 0

    @property
    def acting(self) -> bool:
        return bool(self.requests)

    def can_take(self, request: Any) -> bool:
        return len(self.requests) < 2

    def submit(self, request: Any) -> int:
        self._submitted += 1
        self.requests[self._submitted], self.steps[self._submitted] = request, 0
        return self._submitted

    def step(self) -> list[Any]:
        assert self.gate.wait(30)
        events: list[Any] = []
        for number, text in [*self.requests.items()]:
            if text == "fail":
                raise RuntimeError("broken")
            self.steps[number] += 1
            events.append(TextPiece(number, text))
            if self.steps[number] == 2:
                del self.requests[number]
                answer = Answer((text * 2,), torch.zeros(0, 0, dtype=torch.long), "end", None, 0.0)
                events.append(Finished(number, answer))
        return events

    def cancel(self, number: int) -> None:
        self.calls.append(("cancel", number))
        self.requests.pop(number, None)

    def pause(self, number: int, paused: bool = True) -> None:
        self.calls.append(("pause", number))


def finish_step(engine: ThreadedEngine) -> list[Any]:
    """The events of the step under way."""
    for _ in range(1000):
        events = engine.step()
        if engine._running is None:
            return events
    raise AssertionError("the step does not end")


def test_a_step_under_way_holds_nobody_up() -> None:
    slow = SlowEngine()
    engine = ThreadedEngine(slow)
    numbers = [engine.submit(text) for text in "ab"]
    assert not engine.can_take("c")
    assert engine.step() == [] and engine.step() == [] and engine.acting
    engine.cancel(numbers[0])
    engine.pause(numbers[1])
    assert slow.calls == [] and not engine.can_take("c")
    slow.gate.set()
    assert finish_step(engine) == [TextPiece(numbers[1], "b")]
    assert slow.calls == [("cancel", numbers[0]), ("pause", numbers[1])]
    assert engine.can_take("c")
    assert [type(event) for event in finish_step(engine)] == [TextPiece, Finished]
    assert not engine.acting
    engine.cancel(7)
    assert slow.calls[-1] == ("cancel", 7)


def test_an_error_of_a_step_is_raised() -> None:
    slow = SlowEngine()
    slow.gate.set()
    engine = ThreadedEngine(slow)
    engine.submit("fail")
    with pytest.raises(RuntimeError, match="broken"):
        finish_step(engine)


def test_another_model_of_the_service_goes_on_meanwhile() -> None:
    """A fast model answers while the step of a slow one is under way."""
    slow, fast, service = SlowEngine(), SlowEngine(), GenerationService()
    fast.gate.set()
    ended: dict[str, queue.Queue[Any]] = {"slow": queue.Queue(), "fast": queue.Queue()}
    lanes = {
        "slow": service.add_engine(lambda: ThreadedEngine(slow)),
        "fast": service.add_engine(lambda: fast),
    }

    def plan(name: str) -> Any:
        (answer,) = yield Ask([name])
        return answer.text

    for name, lane in lanes.items():
        service.submit(lane, lambda emit, name=name: plan(name), ended[name].put)
    assert ended["fast"].get(timeout=30) == Done("fastfast") and ended["slow"].empty()
    slow.gate.set()
    assert ended["slow"].get(timeout=30) == Done("slowslow")
    service.close()
