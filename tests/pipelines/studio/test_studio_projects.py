"""Projects, versions and edits of the studio, without a browser: what is stored, compared, refused and stopped."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import time
import weakref
import zipfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from audiollm.audio import Waveform, load
from audiollm.data.records.sample import Region
from audiollm.data.records.thoughts import ThoughtEvent, ThoughtRecord
from audiollm.errors import ConfigError
from audiollm.flow.generator import SoundGenerator
from audiollm.flow.service import Job, JobStopped, SoundService
from audiollm.video.writing import write_video
from pipelines.audiocot.thinking import ThoughtAnswer, ThoughtRequest
from pipelines.studio.editor import MakeRequest, SoundEditor
from pipelines.studio.instructions import read_instruction
from pipelines.studio.limits import StudioLimits, StudioRefusal
from pipelines.studio.project_file import open_project_file, write_project_file
from pipelines.studio.regions import PictureClick, RegionFinder
from pipelines.studio.store import ProjectStore, SoundVersion
from pipelines.studio.waveforms import compare_tracks, drawn_columns, measure_peaks
from tests.audiollm.flow.toy import RATE, tone
from tests.pipelines.studio.tiny_studio import (
    ALICE,
    BOB,
    closing,
    made_editor,
    moving_pictures,
    opened,
    tiny_generator,
    write_film,
    write_recording,
)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> SoundGenerator:
    return tiny_generator(tmp_path_factory.mktemp("model"))


@pytest.fixture
def editor(generator: SoundGenerator, tmp_path: Path):  # type: ignore[no-untyped-def]
    with closing(made_editor(tmp_path / "studio", generator)) as made:
        yield made


# versions and edits


def test_an_edit_is_a_new_version_that_differs_in_its_span_alone(editor: SoundEditor, tmp_path: Path) -> None:
    source = write_recording(tmp_path / "sound.wav")
    project = opened(editor, source)
    (first,) = editor.store.versions(project)
    assert np.array_equal(
        soundfile.read(editor.store.sound(project, first), dtype="int16")[0],
        soundfile.read(source, dtype="int16")[0],
    )
    asked = MakeRequest("a bell", start_s=0.5, end_s=1.0, steps=3)
    for kind in ("add", "remove", "inpaint"):
        editor.edit(project, "alice/w", first, kind, asked).value()  # type: ignore[arg-type]
    editor.edit(project, "alice/w", first, "extend", MakeRequest("rain", end_s=3.0, steps=2)).value()
    editor.edit(project, "alice/w", first, "extract", MakeRequest("rain", steps=2)).value()
    versions = editor.store.versions(project)
    assert [each.kind for each in versions[1:]] == ["add", "remove", "inpaint", "extend", "extract"]
    before = soundfile.read(source, dtype="int16")[0]
    for version in versions[1:4]:
        after = soundfile.read(editor.store.sound(project, version), dtype="int16")[0]
        same = (before == after).all(axis=1)
        assert same[: RATE // 2].all() and same[RATE:].all() and not same[RATE // 2 : RATE].all()
        assert version.parent == 1 and version.is_same_outside and version.checked_samples == 3 * RATE // 2
        assert all(0.5 <= begin < end <= 1.0 for begin, end in version.changed)
    extended = versions[4]
    assert extended.duration_s == 3.0 and extended.is_same_outside and extended.changed[0][0] >= 2.0


def test_a_sound_is_generated_for_a_film_without_sound_and_exported_with_its_pictures_copied(
    editor: SoundEditor, tmp_path: Path
) -> None:
    film = write_film(tmp_path / "film.mp4", with_sound=False)
    project = opened(editor, film)
    assert editor.store.versions(project) == [] and project.has_pictures
    editor.store.keep_thought(
        project, ThoughtRecord(events=[ThoughtEvent(sound="bell", start_s=1.0, end_s=2.0)])
    )
    result = editor.generate(project, "alice/w", MakeRequest(steps=2)).value()
    version = editor.store.version(project, result["version"])
    assert version.kind == "generate" and abs(version.duration_s - 3.0) < 0.01 and "bell" in version.cot
    editor.export_video(project, version, tmp_path / "out.mkv")
    assert _packets(tmp_path / "out.mkv") == _packets(film)
    heard, made = load(tmp_path / "out.mkv"), load(editor.store.sound(project, version))
    assert np.array_equal(heard.samples_CN.numpy(), made.samples_CN.numpy())


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


def test_a_sound_is_extracted_from_its_span_and_the_rest_is_silent(
    generator: SoundGenerator, tmp_path: Path
) -> None:
    with closing(made_editor(tmp_path / "s", generator, StudioLimits(made_s=1.0))) as editor:
        project = opened(editor, write_recording(tmp_path / "sound.wav"))
        first = editor.store.version(project, 1)
        with pytest.raises(StudioRefusal, match="are the most at once"):
            editor.edit(project, "w", first, "extract", MakeRequest("rain"))
        asked = MakeRequest("rain", start_s=0.5, end_s=1.0, steps=1)
        made = editor.edit(project, "w", first, "extract", asked).value()
        heard, _ = soundfile.read(editor.store.sound(project, editor.store.version(project, made["version"])))
        assert len(heard) == 2 * RATE and heard[RATE // 2 : RATE].any()
        assert not heard[: RATE // 2].any() and not heard[RATE:].any()


def test_a_long_chain_of_thought_loses_no_sound_that_was_made(editor: SoundEditor, tmp_path: Path) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav"))
    events = [
        ThoughtEvent(
            sound=f"{n} {'bell ' * 31}", start_s=0.0, end_s=1.0, source="s" * 160, place="p" * 160, manner="m" * 160
        )
        for n in range(32)
    ]  # fmt: skip
    editor.store.keep_thought(project, ThoughtRecord(events=events))
    made = editor.generate(project, "w", MakeRequest(steps=1)).value()
    version = editor.store.version(project, made["version"])
    assert (len(version.caption), len(version.cot)) == (2000, 20_000)


def test_a_film_whose_sound_goes_on_after_its_pictures(editor: SoundEditor, tmp_path: Path) -> None:
    write_video(tmp_path / "film.mp4", moving_pictures(), 8, Waveform(tone(100.0, 4.0), RATE))
    project = opened(editor, tmp_path / "film.mp4")
    assert abs(project.pictures_s - 3.0) < 0.01 and project.duration_s >= 4.0
    source = editor.store.source(project)
    assert editor.regions.follow(source, project.shown_s, [PictureClick(3.0, 87, 48)])
    assert editor.think(project, "w").value()["of_object"] is False
    made = editor.generate(project, "w", MakeRequest("a bell", steps=1)).value()
    assert abs(editor.store.version(project, made["version"]).duration_s - 3.0) < 0.01
    first = editor.store.version(project, 1)
    for start_s, end_s in ((2.0, 2.5), (2.5, 3.5), (3.2, 3.8)):
        asked = MakeRequest("rain", start_s=start_s, end_s=end_s, steps=1)
        edited = editor.store.version(
            project, editor.edit(project, "w", first, "add", asked).value()["version"]
        )
        assert edited.is_same_outside and edited.span == (start_s, end_s)


# what survives, and what is another's


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
    assert job.value() == {"version": 2}


def _copied(store: ProjectStore, project: Any, parent: SoundVersion) -> SoundVersion:
    """A version with the sound of its parent, made without a model."""
    with store.new_version(project, parent) as (number, path):
        shutil.copy(store.sound(project, parent), path)
        return store.finish(project, number, parent, "add", "the same", (0, 100), {})


def test_what_was_deleted_meanwhile_takes_nothing_in(tmp_path: Path) -> None:
    with closing(made_editor(tmp_path / "s", None)) as editor:
        store = editor.store
        project = opened(editor, write_recording(tmp_path / "sound.wav", 0.5))
        first = store.version(project, 1)
        second = _copied(store, project, first)
        store.delete_version(project, second)
        with pytest.raises(StudioRefusal, match="Version 2 was deleted meanwhile"):
            _copied(store, project, second)
        assert _copied(store, project, first).id == 2
        with pytest.raises(StudioRefusal, match="Version 2 was deleted meanwhile"):
            _copied(store, project, second)  # another version has its number by now
        store.delete(project)
        with pytest.raises(StudioRefusal, match="project was deleted"):
            store.keep_thought(project, ThoughtRecord())
        with pytest.raises(StudioRefusal, match="project was deleted"):
            _copied(store, project, first)
        assert not store.place(project).exists()


def test_a_chain_of_thought_that_a_person_changes_meanwhile_stays(tmp_path: Path) -> None:
    limits, go_on = StudioLimits(made_s=1.0), threading.Event()
    store = ProjectStore(tmp_path / "s", limits)
    with closing(
        SoundEditor(SoundService(), store, RegionFinder(), ScriptedWriter(), True, limits)
    ) as editor:
        project = opened(editor, write_recording(tmp_path / "sound.wav", 0.5))
        editor.service.submit(lambda job: go_on.wait(10))
        job, mine = editor.think(project, "w"), ThoughtRecord(background=["rain"])
        store.keep_thought(project, mine)
        go_on.set()
        with pytest.raises(StudioRefusal, match="changed meanwhile, and stays"):
            job.value()
        assert store.thought(project) == mine
        editor.think(project, "w").value()
        assert len(store.thought(project).events) == 1
        long = opened(editor, write_recording(tmp_path / "long.wav", 1.5))
        with pytest.raises(StudioRefusal, match="are the most at once: write its sounds"):
            editor.think(long, "w")


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


def test_a_project_is_its_owners_alone(editor: SoundEditor, tmp_path: Path) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav"))
    assert editor.store.projects(BOB) == []
    for owner, name in ((BOB, project.id), (ALICE, "../" + project.id), (ALICE, project.id.upper() + "\n")):
        with pytest.raises(StudioRefusal, match="no such project"):
            editor.store.project(owner, name)


def test_a_project_file_is_opened_again(editor: SoundEditor, tmp_path: Path) -> None:
    project = opened(editor, write_film(tmp_path / "film.mp4"))
    record = ThoughtRecord(background=["rain"])
    editor.store.keep_thought(project, record)
    first = editor.store.version(project, 1)
    editor.edit(project, "w", first, "add", MakeRequest("a bell", start_s=1.0, end_s=2.0, steps=1)).value()
    write_project_file(editor.store, project, tmp_path / "p.zip")
    assert ALICE not in (zipfile.ZipFile(tmp_path / "p.zip").read("project.json")).decode()
    again = _open_file(editor, tmp_path / "p.zip", BOB)
    assert again.id != project.id and again.has_pictures and editor.store.thought(again) == record
    assert editor.store.versions(again) == editor.store.versions(project)


@pytest.mark.parametrize(
    ("member", "content"),
    [
        ("versions/9.wav", b"RIFF"),
        ("../../evil.txt", b"x"),
        ("/etc/evil", b"x"),
        ("versions/../../x.wav", b"x"),
        ("page/editor.js", b"x"),
        ("project.json", b"{}"),
        ("versions/1.json", b'{"id": 1}'),
        ("source.sound", b"#EXTM3U\nfile:///etc/passwd"),
    ],
)
def test_a_hostile_project_file_is_refused(
    editor: SoundEditor, tmp_path: Path, member: str, content: bytes
) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav", 0.5))
    write_project_file(editor.store, project, tmp_path / "p.zip")
    with zipfile.ZipFile(tmp_path / "p.zip") as good, zipfile.ZipFile(tmp_path / "bad.zip", "w") as bad:
        for name in good.namelist():
            if name != member:
                bad.writestr(name, good.read(name))
        bad.writestr(member, content)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(StudioRefusal):
        _open_file(editor, tmp_path / "bad.zip", BOB)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before  # nothing was left anywhere


def _project_file(editor: SoundEditor, tmp_path: Path, changed: dict[str, bytes]) -> Path:
    """A project file of two versions, some members of which have other contents."""
    project = opened(editor, write_recording(tmp_path / "sound.wav", 0.5))
    _copied(editor.store, project, editor.store.version(project, 1))
    write_project_file(editor.store, project, tmp_path / "p.zip")
    with zipfile.ZipFile(tmp_path / "p.zip") as good, zipfile.ZipFile(tmp_path / "bad.zip", "w") as bad:
        for name in good.namelist():
            content = good.read(name)
            if name.endswith(".json") and name in changed:
                content = json.dumps({**json.loads(content), **json.loads(changed[name])}).encode()
            bad.writestr(name, content if name.endswith(".json") else changed.get(name, content))
    return tmp_path / "bad.zip"


def _wav(path: Path, samples: Any, rate: int = RATE, subtype: str = "PCM_16") -> bytes:
    soundfile.write(path, samples, rate, subtype=subtype, format="WAV")
    return path.read_bytes()


def test_a_project_file_is_not_believed(tmp_path: Path) -> None:
    with closing(made_editor(tmp_path / "s", None)) as editor:
        sound, _ = soundfile.read(write_recording(tmp_path / "a.wav", 0.5), dtype="int16")
        sound[3000] += 1  # outside of the span of 100 samples
        claims = {"is_same_outside": True, "checked_samples": 10**9, "changed": [], "loudness": 99.0}
        changed = {
            "versions/2.wav": _wav(tmp_path / "b.wav", sound),
            "versions/2.json": json.dumps(claims).encode(),
            "project.json": b'{"duration_s": 7000.0, "width": 9}',
        }
        project = _open_file(editor, _project_file(editor, tmp_path, changed), BOB)
        first, second = editor.store.versions(project)
        assert (second.is_same_outside, second.checked_samples) == (False, len(sound) - 100)
        assert second.changed == ((3000 / RATE, 3001 / RATE),)
        assert first.loudness is not None and abs((second.loudness or 0.0) - first.loudness) < 0.1
        assert (project.duration_s, project.width) == (0.5, 0)


@pytest.mark.parametrize(
    "claim", ['{"created": Infinity}', '{"changed": [[0, NaN]]}', '{"span": [0, 1e300]}', '{"id": 1}']
)
def test_numbers_of_a_project_file_that_nothing_can_show_are_refused(tmp_path: Path, claim: str) -> None:
    with closing(made_editor(tmp_path / "s", None)) as editor:
        file = _project_file(editor, tmp_path, {"versions/2.json": claim.encode()})
        with pytest.raises(StudioRefusal, match="export it anew"):
            _open_file(editor, file, BOB)
        assert editor.store.projects(BOB) == []


def test_sounds_of_a_project_file_that_no_edit_can_work_with_are_refused(tmp_path: Path) -> None:
    limits = StudioLimits(channels=2)
    with closing(made_editor(tmp_path / "s", None, limits)) as editor:
        flat = np.zeros((RATE // 2, 2))
        for samples, rate, subtype, sentence in (
            (np.full_like(flat, np.nan), RATE, "FLOAT", "NaN"),
            (flat, RATE, "ULAW", "damaged"),
            (flat, RATE, "DOUBLE", "damaged"),
            (np.zeros((RATE // 2, 3)), RATE, "PCM_16", "channels"),
            (np.zeros((1_000_000, 2)), 2_000_000, "PCM_16", "sample rate"),
        ):
            wav = _wav(tmp_path / "b.wav", samples, rate, subtype)
            with pytest.raises(StudioRefusal, match=sentence):
                _open_file(editor, _project_file(editor, tmp_path, {"versions/2.wav": wav}), BOB)


def test_a_project_file_with_damaged_packing_or_an_endless_list_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(made_editor(tmp_path / "s", None)) as editor:
        with zipfile.ZipFile(tmp_path / "p.zip", "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("versions/1.wav", bytes(5000))
        content = bytearray((tmp_path / "p.zip").read_bytes())
        content[30 + len("versions/1.wav")] = 7  # a block of a kind that deflate does not have
        (tmp_path / "p.zip").write_bytes(content)
        with pytest.raises(StudioRefusal, match="cannot be read"):
            _open_file(editor, tmp_path / "p.zip", BOB)
        with zipfile.ZipFile(tmp_path / "p.zip", "w") as file:
            for number in range(20_000):
                file.writestr(f"versions/{number}.wav", b"")
        monkeypatch.setattr(zipfile, "ZipFile", None)  # it would read the whole list into memory
        with pytest.raises(StudioRefusal, match="too many files"):
            _open_file(editor, tmp_path / "p.zip", BOB)


def test_a_bomb_of_a_project_file_is_refused(generator: SoundGenerator, tmp_path: Path) -> None:
    with closing(made_editor(tmp_path / "s", None, StudioLimits(upload_mb=1))) as editor:
        with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as bomb:
            bomb.writestr("versions/1.wav", bytes(5_000_000))
        with pytest.raises(StudioRefusal, match="unpacks to more than 1 MB"):
            _open_file(editor, tmp_path / "bomb.zip", BOB)


# uploads


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "empty"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "neither a recording nor a video"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "neither a recording nor a video"),
        (b"<html><script>alert(1)</script></html>", "neither a recording nor a video"),
        (b"RIFF\x00\x00\x00\x00WAVEbroken", "cannot be read"),
        (b"\x00\x00\x00\x18ftypmp42" + bytes(200), "cannot be read"),
        (
            b'<!--free--><MPD profiles="urn:mpeg:dash:profile:isoff-live:2011"></MPD>',
            "neither a recording nor",
        ),
    ],
)
def test_wrong_files_are_refused_with_a_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    with closing(made_editor(tmp_path / "s", None)) as editor:
        (tmp_path / "film.mp4").write_bytes(content)
        with pytest.raises(StudioRefusal, match=sentence):
            opened(editor, tmp_path / "film.mp4")
        assert list((tmp_path / "s" / "projects").iterdir()) == []


def test_too_long_too_large_and_oddly_named_files(tmp_path: Path) -> None:
    limits = StudioLimits(duration_s=1.0, picture_pixels=100 * 100)
    with closing(made_editor(tmp_path / "s", None, limits)) as editor:
        with pytest.raises(StudioRefusal, match="are the most: cut the part"):
            opened(editor, write_recording(tmp_path / "long.wav", 2.0))
        with pytest.raises(StudioRefusal, match="scale the video down"):
            opened(editor, write_film(tmp_path / "film.mp4"))
        short = write_recording(tmp_path / "ok.wav", 0.5)
        project = opened(editor, short, name="../../etc/\u202epasswd\n<script>.wav")
        assert project.name == "passwd<script>.wav"
        assert [path.name for path in editor.store.place(project).iterdir() if "source" in path.name] == [
            "source.sound"
        ]


def test_sound_of_other_containers_keeps_its_samples_and_is_decoded_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = soundfile.info

    def plain_info(path: Any) -> Any:
        assert Path(path).read_bytes()[:4] == b"RIFF", "a decoder that may crash ran in the server's process"
        return info(path)

    with closing(made_editor(tmp_path / "s", None)) as editor:
        values = np.random.default_rng(0).integers(-(2**23), 2**23, (4000, 2)).astype(np.int32) << 8
        soundfile.write(tmp_path / "a.aiff", values, RATE, subtype="PCM_24")
        with av.open(str(tmp_path / "loud.mkv"), "w") as container:
            stream = container.add_stream("pcm_f32le", rate=RATE, layout="mono")
            loud = np.full((1, 4000), 1.5, np.float32)
            loud[0, 10] = np.nan
            frame = av.AudioFrame.from_ndarray(loud, format="flt", layout="mono")
            frame.sample_rate, frame.pts = RATE, 0
            container.mux([*stream.encode(frame), *stream.encode(None)])
        monkeypatch.setattr(soundfile, "info", plain_info)
        exact, cleaned = (opened(editor, tmp_path / name) for name in ("a.aiff", "loud.mkv"))
        sounds = [editor.store.sound(each, editor.store.version(each, 1)) for each in (exact, cleaned)]
        assert np.array_equal(soundfile.read(sounds[0], dtype="int32")[0], values)
        assert soundfile.SoundFile(sounds[0]).subtype == "PCM_24"
        heard = soundfile.read(sounds[1])[0]
        assert np.isfinite(heard).all() and heard.max() == 1.0
        soundfile.write(tmp_path / "slow.wav", np.zeros(1000), 500)
        with pytest.raises(StudioRefusal, match="sample rate of 500 Hz"):
            opened(editor, tmp_path / "slow.wav")


# the queue


def test_what_has_ended_keeps_none_of_its_sounds() -> None:
    service, kept = SoundService(), []

    def sound() -> Any:
        made = np.zeros(1000)
        kept.append(weakref.ref(made))
        return made

    def stops(job: Job) -> None:
        made = sound()
        job.stop()
        job.took_step(len(made))

    def fails(job: Job) -> None:
        try:
            read()
        except ValueError as error:
            raise ConfigError("no", "", "mend it") from error

    def read() -> None:
        made = sound()
        raise ValueError(f"cut off after {len(made)} samples")

    jobs = [service.submit(stops), service.submit(fails)]
    assert all(job.wait(10) for job in jobs) and [job.state for job in jobs] == ["stopped", "failed"]
    service.close()
    gc.collect()
    assert [each() is None for each in kept] == [True, True]


def test_a_request_that_waits_is_stopped_at_once() -> None:
    service, go_on = SoundService(), threading.Event()
    first, second, third = (service.submit(lambda job: go_on.wait(10), each) for each in "aba")
    while first.state != "running":
        time.sleep(0.005)
    service.stop("b")
    assert second.state == "stopped" and second.wait(0) and service.place(third) == 1
    assert service.jobs("b") == [second]
    with pytest.raises(JobStopped):
        second.value()
    go_on.set()
    assert third.wait(10) and third.state == "done"
    service.close()


def test_a_request_stops_within_two_steps_and_the_next_one_runs(editor: SoundEditor, tmp_path: Path) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav"))
    first = editor.store.version(project, 1)
    steps: list[int] = []
    job = editor.edit(project, "alice/w", first, "add", MakeRequest("a bell", steps=400))
    took = job.took_step

    def watched(done: int) -> None:
        steps.append(done)
        if done == 3:
            editor.service.stop("alice/w")
        took(done)

    job.took_step = watched  # type: ignore[method-assign]
    other = editor.edit(project, "bob/w", first, "add", MakeRequest("rain", steps=2))
    assert other.value() == {"version": 2}
    assert job.state == "stopped" and len(steps) <= 5
    with pytest.raises(JobStopped):
        job.value()
    assert [each.id for each in editor.store.versions(project)] == [1, 2]


def test_the_queue_tells_places_and_keeps_nothing_of_what_failed() -> None:
    service, go_on = SoundService(), threading.Event()

    def wait(job: Job) -> None:
        go_on.wait(10)

    def fail(job: Job) -> None:
        raise ConfigError("no", "", "mend it")

    jobs = [service.submit(wait, "a"), service.submit(fail, "b"), service.submit(wait, "a")]
    while jobs[0].state != "running":
        time.sleep(0.005)
    assert [service.place(job) for job in jobs] == [0, 1, 2]
    go_on.set()
    assert jobs[2].wait(10) and jobs[1].state == "failed"
    with pytest.raises(ConfigError, match="mend it"):
        jobs[1].value()
    with pytest.raises(ConfigError, match="audiollm run recipes/thinksound/tiny.yaml"):
        _ = service.generator
    service.close()


def test_a_clip_is_encoded_once(
    generator: SoundGenerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(made_editor(tmp_path / "s", generator)) as editor:
        project = opened(editor, write_film(tmp_path / "film.mp4"))
        encoded = []
        encode = generator.encoders._encode_pictures
        monkeypatch.setattr(
            generator.encoders, "_encode_pictures", lambda *given: encoded.append(given) or encode(*given)
        )
        for seed in (1, 2):
            editor.generate(project, "w", MakeRequest("a bell", seed=seed, steps=1)).value()
        assert len(encoded) == 1
        different = [
            load(editor.store.sound(project, v)).samples_CN for v in editor.store.versions(project)[1:]
        ]
        assert not np.array_equal(different[0], different[1])


# objects and words


def test_a_clicked_object_is_followed_and_corrected(tmp_path: Path) -> None:
    with closing(made_editor(tmp_path / "s", None)) as editor:
        project = opened(editor, write_film(tmp_path / "film.mp4"))
        source = editor.store.source(project)
        region = editor.regions.follow(source, project.duration_s, [PictureClick(1.0, 42, 48)])
        assert len(region) > 20
        for box in region:
            picture = min(23, int(box.at_s * 8 + 1e-6))
            assert (
                abs(box.x + box.width / 2 - (18 + 3 * picture)) < 4 and abs(box.y + box.height / 2 - 48) < 3
            )
            assert 14 <= box.width <= 22
        boxed = editor.regions.follow(
            source, project.duration_s, [PictureClick(1.0, 42, 48), PictureClick(2.0, 50, 30, 30, 40)]
        )
        at_two = min(boxed, key=lambda box: abs(box.at_s - 2.0))
        assert abs(at_two.width - 33) < 1.5 and abs(at_two.height - 44) < 1.5
        for click, sentence in (
            (PictureClick(1.0, 500, 5), "outside"),
            (PictureClick(1.0, 100, 90), "Nothing stands out"),
        ):
            with pytest.raises(StudioRefusal, match=sentence):
                editor.regions.follow(source, project.duration_s, [click])


RECORD = ThoughtRecord(
    events=[
        ThoughtEvent(sound="dog bark", start_s=1.0, end_s=2.0, source="a dog"),
        ThoughtEvent(sound="bell", start_s=3.0, end_s=4.0),
    ],
    background=["rain"],
)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("add a bell at 2 s", ("add", "a bell", 2.0, 3.0)),
        ("Please put in a rooster from 1.5 to 3 seconds.", ("add", "a rooster", 1.5, 3.0)),
        ("take the dog out", ("remove", "dog", 1.0, 2.0)),
        ("remove the barking", ("remove", "barking", 1.0, 2.0)),
        ("get rid of the traffic between 2 and 4 s", ("remove", "traffic", 2.0, 4.0)),
        ("let it rain on for three seconds", ("extend", "rain", 5.0, 8.0)),
        ("extend by half a second", ("extend", "rain", 5.0, 5.5)),
        ("make it two seconds longer", ("extend", "rain", 5.0, 7.0)),
        ("fill 3-4 s with rain", ("inpaint", "rain", 3.0, 4.0)),
        ("replace the bell with a drum", ("inpaint", "a drum", 3.0, 4.0)),
        ("keep only the bell", ("extract", "bell", None, None)),
        ("add thunder in the last two seconds", ("add", "thunder", 3.0, 5.0)),
        ("add this", ("add", "", None, None)),
    ],
)
def test_everyday_words_become_operations(words: str, wanted: tuple[object, ...]) -> None:
    plan = read_instruction(words, RECORD, 5.0, None)
    assert (plan.kind, plan.caption, plan.start_s, plan.end_s) == wanted


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "fit no operation"),
        ("what a nice day", "fit no operation"),
        ("add a bell at 9 s", "extend it first"),
        ("add", "Say which sound"),
        ("fill it", "which seconds"),
        ("extend it", "by how much"),
        ("extend it to", "by how much"),
    ],
)
def test_words_that_fit_nothing_are_answered_with_a_sentence(words: str, sentence: str) -> None:
    with pytest.raises(StudioRefusal, match=sentence):
        read_instruction(words, RECORD, 5.0, None)


class ScriptedWriter:
    """Answers as a model that writes does, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[ThoughtRequest] = []

    def think(self, asked: ThoughtRequest) -> ThoughtAnswer:
        self.asked.append(asked)
        record = ThoughtRecord(events=[ThoughtEvent(sound="bell", start_s=0.5, end_s=1.0)])
        return ThoughtAnswer(record, "add", (0.5, 1.0)) if asked.instruction else ThoughtAnswer(record)


def test_a_model_that_writes_reads_instructions_and_objects(tmp_path: Path) -> None:
    limits, writer = StudioLimits(), ScriptedWriter()
    store = ProjectStore(tmp_path / "s", limits)
    with closing(SoundEditor(SoundService(), store, RegionFinder(), writer, True, limits)) as editor:
        film = opened(editor, write_film(tmp_path / "film.mp4"))
        first, box = editor.store.version(film, 1), Region(x=1, y=2, width=8, height=8)
        plan = editor.understand(film, "w", first, "let a bell ring").value()
        assert plan == {"plan": {"kind": "add", "caption": "bell", "start_s": 0.5, "end_s": 1.0}}
        named = editor.think(film, "w", [box]).value()
        assert (named["caption"], named["of_object"]) == ("bell", True)
        assert store.thought(film) == ThoughtRecord()  # an object's sounds are not the clip's
        assert editor.think(film, "w").value()["of_object"] is False and len(store.thought(film).events) == 1
        assert [asked.source for asked in writer.asked] == [store.source(film)] * 3
        assert list(writer.asked[1].region) == [box]


def test_requests_that_cannot_be_met(editor: SoundEditor, tmp_path: Path) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav"))
    first = editor.store.version(project, 1)
    for kind, asked, sentence in (
        ("add", MakeRequest("", end_s=1.0), "Say which sound"),
        ("add", MakeRequest("rain", start_s=1.5, end_s=2.5), "does not lie in the sound"),
        ("inpaint", MakeRequest("rain"), "Select the seconds"),
        ("extend", MakeRequest("rain", end_s=1.0), "an end after"),
        ("add", MakeRequest("rain", steps=0), "1 to 500 steps"),
    ):
        with pytest.raises(StudioRefusal, match=sentence):
            editor.edit(project, "w", first, kind, asked)  # type: ignore[arg-type]
    editor.store.keep_thought(
        project, ThoughtRecord(events=[ThoughtEvent(sound="bell", start_s=4.0, end_s=5.0)])
    )
    with pytest.raises(StudioRefusal, match="Change its times"):
        editor.generate(project, "w", MakeRequest("a bell"))
    with pytest.raises(StudioRefusal, match="no pictures"):
        editor.export_video(project, first, tmp_path / "x.mp4")


def _packets(path: Path) -> list[bytes]:
    with av.open(str(path)) as container:
        return [bytes(packet) for packet in container.demux(container.streams.video[0]) if packet.size]


def _open_file(editor: SoundEditor, path: Path, owner: str):  # type: ignore[no-untyped-def]
    upload = editor.store.incoming() / "upload"
    upload.write_bytes(path.read_bytes())
    return open_project_file(editor.store, owner, upload, editor.store.limits)


def test_a_damaged_version_is_left_out(editor: SoundEditor, tmp_path: Path) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav", 0.5))
    path = editor.store.place(project) / "versions" / "1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "duration_s": -1}))
    assert editor.store.versions(project) == []
