"""A local model that several threads ask at once through a service."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from audiollm.evaluate.subjects.chat import ChatError, FolderChat
from audiollm.evaluate.subjects.service_chat import ServiceChat
from audiollm.families.answering import AnsweringModel
from audiollm.families.answering_engine import AnsweringEngine
from audiollm.families.listener.answering_rows import ListenerEngine
from audiollm.families.registry import open_model_folder
from audiollm.generation.service.service import GenerationService
from audiollm.generation.speaking.plans import Ask
from audiollm.models.audio_llms.inputs import Turn
from tests.audiollm.families.higgs_v3_stt.tiny_higgs_stt import noise
from tests.audiollm.models.tiny_audio_llms import save_thinker

TOKENS = 40


class Stopped(BaseException):
    """The answer is not wanted any more."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # words that do not repeat themselves
    return save_thinker(tmp_path_factory.mktemp("ears"), repetition_penalty=1.3, no_repeat_ngram_size=3)


@pytest.fixture(scope="module")
def model(folder: Path) -> AnsweringModel:
    return open_model_folder(folder).answering_model()


@pytest.fixture
def service() -> Iterator[GenerationService]:
    running = GenerationService()
    yield running
    running.close()


@pytest.fixture
def joint_rows(service: GenerationService, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Answers under way at each step of the engine, which takes none before two are asked for."""
    rows: list[int] = []
    step = ListenerEngine.step

    def watched(engine: ListenerEngine) -> Any:
        if not rows and service.num_jobs < 2:
            return []
        rows.append(len(engine._rows))
        return step(engine)

    monkeypatch.setattr(ListenerEngine, "step", watched)
    return rows


def turns(number: int, seconds: float = 1.1) -> list[Turn]:
    return [("user", ["What is heard? " * (1 + number), noise(seconds, number)])]


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def engine_of(service: GenerationService) -> Any:
    return service.lanes[0]._engine


def test_two_answers_at_once_have_the_words_of_each_alone(
    model: AnsweringModel, service: GenerationService, joint_rows: list[int]
) -> None:
    chat, alone = ServiceChat(model, TOKENS, service), FolderChat(model, TOKENS)
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(chat.go_on, [turns(0), turns(1)]))
    assert max(joint_rows) == 2
    assert answers == [alone.go_on(turns(number)) for number in range(2)] and answers[0] != answers[1]


def test_a_conversation_that_the_model_refuses_is_the_error_of_its_caller_alone(
    model: AnsweringModel, service: GenerationService, joint_rows: list[int]
) -> None:
    chat = ServiceChat(model, TOKENS, service)
    with ThreadPoolExecutor(2) as threads:
        answer, refused = threads.submit(chat.go_on, turns(0)), threads.submit(chat.go_on, turns(1, 2.6))
        with pytest.raises(ChatError, match=f"{model.name}: .*hears at most 2 s"):
            refused.result(60)
        assert answer.result(60) == FolderChat(model, TOKENS).go_on(turns(0))


def test_an_answer_that_is_stopped_frees_its_row_and_the_other_goes_on(
    model: AnsweringModel, service: GenerationService, joint_rows: list[int]
) -> None:
    chat, long = ServiceChat(model, TOKENS, service), ServiceChat(model, 100_000, service)

    def stop_beside_another() -> None:
        if max(joint_rows, default=0):
            raise Stopped

    with ThreadPoolExecutor(2) as threads:
        stopped = threads.submit(long.go_on, turns(0), stop_beside_another)
        answer = threads.submit(chat.go_on, turns(1))
        with pytest.raises(Stopped):
            stopped.result(60)
        assert answer.result(60) == FolderChat(model, TOKENS).go_on(turns(1))
    wait_for(lambda: not any(lane._engine.acting or lane.jobs for lane in service.lanes))
    assert service.num_jobs == 0


def test_a_class_that_joins_no_rows_answers_one_after_the_other(
    folder: Path, service: GenerationService
) -> None:
    beams = open_model_folder(folder).answering_model()
    beams._model.generation_config.num_beams = 2  # type: ignore[attr-defined]
    chat = ServiceChat(beams, 6, service)
    assert isinstance(engine_of(service), AnsweringEngine)
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(chat.go_on, [turns(0), turns(1)]))
    assert answers == [FolderChat(beams, 6).go_on(turns(number)) for number in range(2)]


def test_nothing_of_an_answer_is_kept(model: AnsweringModel, service: GenerationService) -> None:
    chat, conversation = ServiceChat(model, 3, service), turns(0)
    waveform = weakref.ref(conversation[0][1][1])
    chat.go_on(conversation)
    del conversation

    def is_gone() -> bool:
        gc.collect()
        return waveform() is None

    wait_for(is_gone)


class EndlessModel:
    """Answers until it is stopped, or for two minutes: a thread of a pool holds up the end of Python."""

    name, fingerprint, hears = "endless", "", True

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def answer(self, requests: Sequence[Any], check_stop: Callable[[], None] | None = None) -> Any:
        assert check_stop is not None
        self.begun.set()
        try:
            for _ in range(24_000):
                check_stop()
                time.sleep(0.005)
        finally:
            self.ended.set()


@pytest.mark.parametrize("end", ["stop", "close"])
def test_an_answer_under_way_ends_with_its_caller_and_with_the_service(end: str) -> None:
    endless, service = EndlessModel(), GenerationService()
    chat = ServiceChat(endless, 8, service)  # type: ignore[arg-type]
    if end == "close":
        service.submit(service.lanes[0], lambda emit: (yield Ask([turns(0)])), lambda progress: None)
        assert endless.begun.wait(60)
    else:

        def stop_once_begun() -> None:
            if endless.begun.is_set():
                raise Stopped

        with pytest.raises(Stopped):
            chat.go_on(turns(0), stop_once_begun)
        assert endless.ended.wait(60)
    service.close()
    assert endless.ended.wait(60)
