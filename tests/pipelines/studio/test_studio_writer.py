"""A writer of chains of thought beside the model of sounds: neither waits for the other, and windows write at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from audiollm.data.records.thoughts import ThoughtRecord
from audiollm.errors import StageError
from audiollm.families.listener.answering_rows import ListenerEngine
from audiollm.flow.generator import SoundGenerator
from audiollm.flow.service import SoundService
from pipelines.audiocot import thinking
from pipelines.audiocot.thinking import ThoughtAnswer, ThoughtRequest, model_thinker
from pipelines.studio.editor import MakeRequest, SoundEditor
from pipelines.studio.limits import StudioLimits
from pipelines.studio.regions import RegionFinder
from pipelines.studio.server import load_editor
from pipelines.studio.store import ProjectStore, StoredProject
from tests.audiollm.models.tiny_audio_llms import save_thinker
from tests.pipelines.studio.tiny_studio import ScriptedWriter, closing, opened, write_recording


def wait_for(condition: Callable[[], Any]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


class WaitingWriter(ScriptedWriter):
    """Answers once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_answer = threading.Event(), threading.Event()

    def think(self, asked: ThoughtRequest) -> ThoughtAnswer:
        self.begun.set()
        assert self.may_answer.wait(60)
        return super().think(asked)


@pytest.fixture
def writer() -> WaitingWriter:
    return WaitingWriter()


@pytest.fixture
def beside(tmp_path: Path, generator: SoundGenerator, writer: WaitingWriter) -> Iterator[SoundEditor]:
    limits = StudioLimits()
    store = ProjectStore(tmp_path / "studio", limits)
    with closing(SoundEditor(SoundService(generator), store, RegionFinder(), writer, True, limits)) as editor:
        yield editor


def test_a_thought_is_written_while_a_sound_is_made(
    beside: SoundEditor, writer: WaitingWriter, tmp_path: Path
) -> None:
    project = opened(beside, write_recording(tmp_path / "a.wav"))
    first = beside.store.version(project, 1)
    edit_job = beside.edit(project, "a", first, "add", MakeRequest("rain", end_s=1.0, steps=500))
    wait_for(lambda: edit_job.step)
    writer.may_answer.set()
    thought = beside.think(project, "b")
    reading = beside.understand(project, "b", first, "ring ring")
    assert thought.value()["of_object"] is False and reading.value()["edits"][0]["kind"] == "add"
    assert edit_job.state == "running" and edit_job.step < 500
    beside.service.stop_job(edit_job)


def test_a_sound_is_made_while_a_thought_is_written(
    beside: SoundEditor, writer: WaitingWriter, tmp_path: Path
) -> None:
    project = opened(beside, write_recording(tmp_path / "a.wav"))
    thought = beside.think(project, "b")
    assert writer.begun.wait(60)
    first = beside.store.version(project, 1)
    edit_job = beside.edit(project, "a", first, "add", MakeRequest("rain", end_s=1.0, steps=2))
    assert edit_job.value()["version"] == 2 and thought.state == "running"
    writer.may_answer.set()
    thought.value()


# a model in a folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A writer of random weights, whose answers are no records."""
    # words that do not repeat themselves
    return save_thinker(tmp_path_factory.mktemp("writer"), repetition_penalty=1.3, no_repeat_ngram_size=3)


@pytest.fixture
def writing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SoundEditor]:
    monkeypatch.setattr(thinking, "_MAX_TOKENS", 24)
    with closing(load_editor(tmp_path / "s", StudioLimits(), writer=str(folder))) as editor:
        yield editor


@pytest.fixture
def may_go_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Without it the engine stops after the first token of an answer."""
    go_on, step = threading.Event(), ListenerEngine.step

    def held_back(engine: ListenerEngine) -> Any:
        return step(engine) if go_on.is_set() or not engine._rows else []

    monkeypatch.setattr(ListenerEngine, "step", held_back)
    return go_on


def engine_of(editor: SoundEditor) -> Any:
    assert editor._answers is not None
    (lane,) = editor._answers.lanes
    return lane._engine


def projects(editor: SoundEditor, folder: Path) -> list[StoredProject]:
    return [opened(editor, write_recording(folder / f"{name}.wav", 0.5 + name / 5)) for name in range(2)]


def test_two_windows_write_at_once_what_each_writes_alone(
    writing: SoundEditor, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers that were refused are quoted in the errors."""
    alone = model_thinker(str(folder), 3)
    both = projects(writing, tmp_path)
    expected = []
    for project in both:
        with pytest.raises(StageError) as error:
            alone.think(ThoughtRequest(writing.store.source(project)))
        expected.append(str(error.value))
    rows: list[int] = []
    step = ListenerEngine.step

    def watched(engine: ListenerEngine) -> Any:
        assert writing._answers is not None
        if not rows and writing._answers.num_jobs < 2:  # it takes none before both are asked for
            return []
        rows.append(len(engine._rows))
        return step(engine)

    monkeypatch.setattr(ListenerEngine, "step", watched)
    jobs = [writing.think(project, window) for project, window in zip(both, "ab", strict=True)]
    for job, sentence in zip(jobs, expected, strict=True):
        with pytest.raises(StageError) as error:
            job.value()
        assert str(error.value) == sentence
    assert max(rows) == 2


def test_a_stop_and_a_deletion_free_the_row_at_once(
    writing: SoundEditor, tmp_path: Path, may_go_on: threading.Event
) -> None:
    first, second = projects(writing, tmp_path)
    engine = engine_of(writing).engine
    for end in (writing.service.stop_job, lambda job: writing.delete(first)):
        job = writing.think(first, "a")
        wait_for(lambda: engine._rows)
        end(job)
        assert job.wait(60) and job.state == "stopped"
        wait_for(lambda: not engine.acting)
    may_go_on.set()
    with pytest.raises(StageError, match="3 answers could not be used"):
        writing.think(second, "b").value()


def test_a_closed_window_holds_its_thought_which_is_written_when_it_is_back(
    writing: SoundEditor, tmp_path: Path, may_go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thinking, "parse_thought", lambda answer, duration_s: ThoughtRecord(background=["x"]))
    project, _ = projects(writing, tmp_path)
    job, engine = writing.think(project, "a"), engine_of(writing).engine
    wait_for(lambda: engine._rows)
    writing.service.hold("a")
    wait_for(lambda: job.state == "held" and not engine.acting)
    may_go_on.set()
    writing.service.resume("a")
    assert job.value()["record"]["background"] == ["x"]
    assert writing.store.thought(project).background == ["x"]


def test_the_end_of_the_studio_ends_a_thought_and_all_threads(
    writing: SoundEditor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ListenerEngine, "step", lambda engine: [])
    project, _ = projects(writing, tmp_path)
    job = writing.think(project, "a")
    wait_for(lambda: engine_of(writing).engine._waiting)
    writing.close()
    assert job.state == "stopped" and writing._answers is not None
    assert not any(thread.is_alive() for thread in (*writing.service._threads, writing._answers._thread))
    assert not writing._answers.lanes[0].jobs
