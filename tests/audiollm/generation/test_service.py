"""The service: plans of many callers beside each other give each what it gets alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.audio import Waveform
from audiollm.errors import ConfigError
from audiollm.generation.engine.request import Event, Request
from audiollm.generation.engine.step_engine import TurnEngine, Unanswered
from audiollm.generation.service.jobs import Done, Emit, Emitted, Failed, MakePlan, PlanJob, Progress
from audiollm.generation.service.lane import MAX_AHEAD_S, RESTING_AHEAD_S, Lane
from audiollm.generation.service.service import GenerationService, ServiceFull
from audiollm.generation.speaking.dialogue import converse_plan, parse_script, together_plan
from audiollm.generation.speaking.generator import Generator
from audiollm.generation.speaking.speak import Speech, speak_plan
from audiollm.generation.speaking.speech_stream import text_stream
from tests.audiollm.generation.toy_speech import a_voice, talkative_generator, toy_generator

PATIENCE_S = 60.0
LONG = "One two three. Hello hello hello. Two three one one. Hello one."
SCRIPT = "[SPEAKER0] one two. [SPEAKER1] hello."


@pytest.fixture(scope="module")
def toy() -> Generator:
    return toy_generator()


@pytest.fixture(scope="module")
def talker() -> Generator:
    return talkative_generator()


@pytest.fixture
def service() -> Iterator[GenerationService]:
    service = GenerationService(max_jobs=32)
    yield service
    service.close()


class Caller:
    """What one caller hears of its job."""

    def __init__(
        self, service: GenerationService, lane: Lane, make_plan: MakePlan, takes: bool = True
    ) -> None:
        self.pieces: list[Emitted] = []
        self.end: Done | Failed | None = None
        self._service, self._takes = service, takes
        self._over = threading.Event()
        self._job: list[PlanJob] = []
        self.job = service.submit(lane, make_plan, self._listen)
        self._job.append(self.job)

    def _listen(self, progress: Progress) -> None:
        if isinstance(progress, Emitted):
            self.pieces.append(progress)
            if self._takes:
                self._job[0].take(progress.sound_s)
        else:
            self.end = progress
            self._over.set()

    def result(self) -> Any:
        assert self._over.wait(PATIENCE_S)
        assert isinstance(self.end, Done), self.end
        return self.end.result

    def error(self) -> BaseException:
        assert self._over.wait(PATIENCE_S) and isinstance(self.end, Failed)
        return self.end.error

    def sound(self) -> Tensor:
        """The sound of a stream or of a whole speech."""
        result = self.result()
        if isinstance(result, Speech):
            return result.samples_1N
        return torch.cat([piece.item.samples_CN for piece in self.pieces], dim=1)


def streamed(toy: Generator, text: str, **options: Any) -> MakePlan:
    def make(emit: Emit) -> Any:
        def on_piece(piece: Waveform) -> None:
            emit(piece, piece.duration_s)

        return text_stream(toy, text, toy.manner(**options)).plan(on_piece)

    return make


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def is_idle(lane: Lane, engine: Any) -> bool:
    return not lane.jobs and not engine.busy


def test_each_of_many_gets_what_it_gets_alone(toy: Generator, service: GenerationService) -> None:
    """Texts by name, in a reference's voice and in any, streams and dialogues; some of them are cancelled."""
    engine = toy.step_engine(slots=20, max_length=4096, prefill_positions=64)
    lane = service.add_engine(lambda: engine)
    voice = toy.voice(a_voice(2.0), "one two")
    turns = parse_script(SCRIPT)
    pairs: list[tuple[MakePlan, Callable[[], Tensor]]] = []
    for seed in range(3):
        options: dict[str, Any] = [{"speaker": "anna"}, {"reference": voice}, {}][seed]
        manner = toy.manner(seed=seed, **options)
        plain = toy.manner(seed=seed)
        pairs += [
            (
                lambda emit, manner=manner: speak_plan(toy, LONG, manner),
                lambda seed=seed, options=options: toy.speak(LONG, seed=seed, **options).samples_1N,
            ),
            (
                streamed(toy, LONG, seed=seed, **options),
                lambda seed=seed, options=options: torch.cat(
                    [piece.samples_CN for piece in toy.stream(LONG, seed=seed, **options)], dim=1
                ),
            ),
            (
                lambda emit, plain=plain: converse_plan(toy, turns, {"0": voice}, plain),
                lambda seed=seed: toy.dialogue(SCRIPT, references={"0": voice}, seed=seed).samples_1N,
            ),
            (
                lambda emit, plain=plain: together_plan(toy, turns, {}, plain),
                lambda seed=seed: toy.dialogue(SCRIPT, together=True, seed=seed).samples_1N,
            ),
        ]
    leaving = [Caller(service, lane, make) for make, _ in pairs[:4]]
    callers = [Caller(service, lane, make) for make, _ in pairs]
    for caller in leaving:
        service.cancel(lane, caller.job)
    for caller, (_, expected) in zip(callers, pairs, strict=True):
        assert torch.equal(caller.sound(), expected())
    wait_for(lambda: is_idle(lane, engine))
    assert service.num_jobs == 0 and lane.counts["done"] == len(pairs) and lane.counts["cancelled"] == 4


def test_a_caller_who_takes_nothing_stops_its_own_stream_alone(
    talker: Generator, service: GenerationService
) -> None:
    engine = talker.step_engine(slots=4, max_length=4096, prefill_positions=64)
    lane = service.add_engine(lambda: engine)
    slow = Caller(service, lane, streamed(talker, LONG, seed=1, max_duration_s=8.0), takes=False)
    options = {"seed": 4, "max_duration_s": 5.0}
    others = [Caller(service, lane, streamed(talker, LONG, **options)) for _ in range(2)]
    assert all(other.sound().shape[1] > 2 * 8000 for other in others)
    wait_for(lambda: not lane.busy)
    assert RESTING_AHEAD_S <= slow.job.ahead_s <= MAX_AHEAD_S and slow.end is None
    while slow.end is None:
        service.take(slow.job, slow.job.ahead_s)
        time.sleep(0.01)
    expected = talker.stream(LONG, seed=1, max_duration_s=8.0)
    assert torch.equal(slow.sound(), torch.cat([piece.samples_CN for piece in expected], dim=1))


def test_one_who_leaves_is_gone_within_two_steps(talker: Generator, service: GenerationService) -> None:
    engine = talker.step_engine(slots=4, max_length=4096, prefill_positions=64)
    lane = service.add_engine(lambda: engine)
    for seed in range(20):
        caller = Caller(service, lane, streamed(talker, LONG, seed=1))
        if seed % 2:
            wait_for(lambda caller=caller: bool(caller.pieces))
        service.cancel(lane, caller.job)
        steps = lane.counts["steps"]
        wait_for(lambda: is_idle(lane, engine))
        assert lane.counts["steps"] <= steps + 2 and caller.end is None
    assert service.num_jobs == 0 and engine._slots == 4 and engine._owners == []


def test_a_plan_that_fails_tells_its_caller_alone(toy: Generator, service: GenerationService) -> None:
    lane = service.add_engine(lambda: toy.step_engine(slots=4, max_length=1200, prefill_positions=64))
    fine = Caller(service, lane, lambda emit: speak_plan(toy, "one two", toy.manner(seed=1)))
    wordless = Caller(service, lane, lambda emit: speak_plan(toy, " ... ", toy.manner()))
    long = Caller(service, lane, lambda emit: speak_plan(toy, "one", toy.manner(max_duration_s=500.0)))
    error = wordless.error()
    assert isinstance(error, ConfigError) and error.where == "text"
    assert isinstance(long.error(), ConfigError) and "a slot has 1200" in str(long.error())
    assert torch.equal(fine.sound(), toy.speak("one two", seed=1).samples_1N)
    assert lane.counts["failed"] == 2


def test_an_engine_that_fails_is_replaced(toy: Generator, service: GenerationService) -> None:
    class BrokenEngine(TurnEngine):
        def step(self) -> list[Event | Unanswered]:
            raise RuntimeError("no memory")

    broken = BrokenEngine(lambda request: toy.engine([request]).stream(request), slots=1)
    engines = iter([broken, toy.step_engine(slots=2, max_length=4096, prefill_positions=64)])
    lane = service.add_engine(lambda: next(engines))
    first = Caller(service, lane, lambda emit: speak_plan(toy, "one", toy.manner()))
    second = Caller(service, lane, lambda emit: speak_plan(toy, "one", toy.manner()))
    assert "no memory" in str(first.error())
    assert torch.equal(second.sound(), toy.speak("one").samples_1N)


def test_a_request_that_fails_leaves_the_others(toy: Generator, service: GenerationService) -> None:
    def stream(request: Request) -> Iterator[Event]:
        if request.seed == 1:
            raise RuntimeError("no such thing")
        yield from toy.engine([request]).stream(request)

    lane = service.add_engine(lambda: TurnEngine(stream, slots=2))
    callers = [
        Caller(service, lane, lambda emit, seed=seed: speak_plan(toy, "one", toy.manner(seed=seed)))
        for seed in (1, 2)
    ]
    assert "no such thing" in str(callers[0].error())
    assert torch.equal(callers[1].sound(), toy.speak("one", seed=2).samples_1N)


def test_a_full_service_refuses_at_once(toy: Generator) -> None:
    service = GenerationService(max_jobs=2)
    lane = service.add_engine(lambda: toy.step_engine(slots=2, max_length=4096, prefill_positions=64))
    callers = [
        Caller(service, lane, lambda emit: speak_plan(toy, LONG, toy.manner(seed=1))) for _ in range(2)
    ]
    with pytest.raises(ServiceFull, match="2 requests"):
        Caller(service, lane, lambda emit: speak_plan(toy, "one", toy.manner()))
    expected = toy.speak(LONG, seed=1).samples_1N
    assert all(torch.equal(caller.sound(), expected) for caller in callers)
    wait_for(lambda: service.num_jobs == 0)
    Caller(service, lane, lambda emit: speak_plan(toy, "one", toy.manner())).sound()
    service.close()


def test_streams_of_an_engine_for_one_request_take_turns(
    talker: Generator, service: GenerationService
) -> None:
    """For families whose engine does not know of several requests."""
    lane = service.add_engine(
        lambda: TurnEngine(lambda request: talker.engine([request]).stream(request), slots=2)
    )
    slow = Caller(service, lane, streamed(talker, LONG, seed=1, max_duration_s=6.0), takes=False)
    callers = [
        Caller(service, lane, streamed(talker, "one two", seed=seed, max_duration_s=1.0)) for seed in range(3)
    ]
    for seed, caller in enumerate(callers):
        pieces = talker.stream("one two", seed=seed, max_duration_s=1.0)
        assert torch.equal(caller.sound(), torch.cat([piece.samples_CN for piece in pieces], dim=1))
    service.cancel(lane, slow.job)
    wait_for(lambda: not lane.jobs)
