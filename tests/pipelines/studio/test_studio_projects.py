"""Projects of the studio on the disk: what survives a kill, what is another's, and their waveforms."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from audiollm.data.records.thoughts import ThoughtRecord
from audiollm.flow.generator import SoundGenerator
from audiollm.flow.service import SoundService
from pipelines.studio.editor import MakeRequest, SoundEditor
from pipelines.studio.limits import StudioLimits, StudioRefusal
from pipelines.studio.regions import RegionFinder
from pipelines.studio.store import ProjectStore
from pipelines.studio.waveforms import compare_tracks, drawn_columns, measure_peaks
from tests.pipelines.studio.tiny_studio import (
    ALICE,
    BOB,
    ScriptedWriter,
    closing,
    copied_version,
    made_editor,
    opened,
    write_recording,
)


def test_finished_versions_are_there_after_a_kill(
    editor: SoundEditor, generator: SoundGenerator, tmp_path: Path
) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav"))
    folder = editor.store.place(project)
    (folder / "versions" / "2.wav").write_bytes(b"RIFF half a file")  # what a kill leaves of an edit
    (folder / "versions" / ".2.77.json").write_text("{")
    (folder.parent / ".new-0123456789abcdef").mkdir()
    again = ProjectStore(editor.store.folder, editor.store.limits)
    assert [each.id for each in again.versions(again.project(ALICE, project.id))] == [1]
    assert sorted(path.name for path in folder.rglob("*.*")) == [
        "1.json", "1.npy", "1.wav", "project.json", "source.sound", "thought.json"
    ]  # fmt: skip
    assert not (folder.parent / ".new-0123456789abcdef").exists()
    job = editor.edit(
        project, "alice/w", again.version(project, 1), "add", MakeRequest("rain", end_s=1.0, steps=1)
    )
    assert job.value()["version"] == 2


def test_what_was_deleted_meanwhile_takes_nothing_in(tmp_path: Path) -> None:
    with closing(made_editor(tmp_path / "s", None)) as editor:
        store = editor.store
        project = opened(editor, write_recording(tmp_path / "sound.wav", 0.5))
        first = store.version(project, 1)
        second = copied_version(store, project, first)
        store.delete_version(project, second)
        with pytest.raises(StudioRefusal, match="Version 2 was deleted meanwhile"):
            copied_version(store, project, second)
        third, fourth = (copied_version(store, project, first) for _ in "ab")
        assert third.id == 3  # version 2 may come back
        store.delete_version(project, fourth)
        store.delete_version(project, third)
        assert copied_version(store, project, first).id == 4
        with pytest.raises(StudioRefusal, match="Version 4 was deleted meanwhile"):
            copied_version(store, project, fourth)  # another version has its number by now
        store.delete(project)
        with pytest.raises(StudioRefusal, match="project was deleted"):
            store.keep_thought(project, ThoughtRecord())
        with pytest.raises(StudioRefusal, match="project was deleted"):
            copied_version(store, project, first)
        assert not store.place(project).exists()


def test_a_chain_of_thought_that_a_person_changes_meanwhile_stays(tmp_path: Path) -> None:
    limits, go_on = StudioLimits(made_s=1.0), threading.Event()
    store = ProjectStore(tmp_path / "s", limits)
    with closing(
        SoundEditor(SoundService(), store, RegionFinder(), ScriptedWriter(), True, limits)
    ) as editor:
        project = opened(editor, write_recording(tmp_path / "sound.wav", 0.5))
        editor.service.submit(lambda job: go_on.wait(10), subject=project.id, line="words")
        job, mine = editor.think(project, "w"), ThoughtRecord(background=["rain"])
        store.keep_thought(project, mine)
        go_on.set()
        with pytest.raises(StudioRefusal, match="changed meanwhile, and stays"):
            job.value()
        assert store.thought(project) == mine
        editor.think(project, "w").value()
        assert len(store.thought(project).events) == 1
        long = opened(editor, write_recording(tmp_path / "long.wav", 1.5))
        with pytest.raises(
            StudioRefusal, match="lasts 1.5 seconds; the limit is 1 second at once: write its sounds"
        ):
            editor.think(long, "w")


def test_a_project_is_its_owners_alone(editor: SoundEditor, tmp_path: Path) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav"))
    assert editor.store.projects(BOB) == []
    for owner, name in ((BOB, project.id), (ALICE, "../" + project.id), (ALICE, project.id.upper() + "\n")):
        with pytest.raises(StudioRefusal, match="no such project"):
            editor.store.project(owner, name)


def test_a_damaged_version_is_left_out(editor: SoundEditor, tmp_path: Path) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav", 0.5))
    path = editor.store.place(project) / "versions" / "1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "duration_s": -1}))
    assert editor.store.versions(project) == []


# waveforms


def test_two_windows_may_ask_for_one_waveform_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(made_editor(tmp_path / "s", None)) as editor:
        project = opened(editor, write_recording(tmp_path / "sound.wav", 0.5))
        version = editor.store.version(project, 1)
        wanted = np.array(editor.store.peaks(project, version))
        path = editor.store.sound(project, version).with_suffix(".npy")
        path.write_bytes(b"damaged")
        both, save = threading.Barrier(2, timeout=10), np.save

        def save_together(*given: Any, **options: Any) -> None:
            save(*given, **options)
            both.wait()

        monkeypatch.setattr(np, "save", save_together)
        found: list[Any] = []
        asked = [
            threading.Thread(target=lambda: found.append(editor.store.peaks(project, version))) for _ in "ab"
        ]
        for each in asked:
            each.start()
        for each in asked:
            each.join()
        assert len(found) == 2 and all(np.array_equal(each, wanted) for each in found)
        assert np.array_equal(np.load(path), wanted) and not list(path.parent.glob(".*"))


def test_the_comparison_notices_one_changed_sample(tmp_path: Path) -> None:
    before = np.arange(1000, dtype=np.int16)
    after = before.copy()
    after[700] += 1
    for name, values in (("a.wav", before), ("b.wav", after), ("c.wav", before[:900])):
        soundfile.write(tmp_path / name, values, 1000)
    inside = compare_tracks(tmp_path / "a.wav", tmp_path / "b.wav", (600, 800))
    assert inside.is_same_outside and inside.changed_s == ((0.7, 0.701),) and inside.samples_outside == 800
    assert not compare_tracks(tmp_path / "a.wav", tmp_path / "b.wav", (0, 700)).is_same_outside
    assert not compare_tracks(tmp_path / "a.wav", tmp_path / "c.wav", (0, 10)).is_same_outside  # cut off


def test_a_drawn_waveform_has_the_extremes_of_each_column(tmp_path: Path) -> None:
    values = np.random.default_rng(0).uniform(-0.9, 0.9, 20_000)
    soundfile.write(tmp_path / "a.wav", values, 8000, subtype="FLOAT")
    peaks = measure_peaks(tmp_path / "a.wav")
    for start_s, end_s, width in ((0.0, 2.5, 50), (0.3, 0.31, 40), (0.0, 2.0, 500)):
        drawn = drawn_columns(tmp_path / "a.wav", peaks, start_s, end_s, width)
        edges = start_s * 8000 + (end_s - start_s) * 8000 / width * np.arange(width + 1)
        for column in range(width):
            part = values[int(edges[column]) : max(int(edges[column]) + 1, int(edges[column + 1]))]
            if part.size >= 40 or end_s - start_s < 0.1:
                assert abs(drawn[column, 1] / 32767 - part.max()) < 1e-4
    assert not drawn_columns(tmp_path / "a.wav", peaks, 2.4, 5.0, 10)[5:].any()  # nothing after the end
