"""Files that people bring to the studio: uploads and project files, none of which is believed."""

from __future__ import annotations

import json
import stat
import zipfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from audiollm.data.records.thoughts import ThoughtRecord
from audiollm.flow.generator import SoundGenerator
from audiollm.video.writing import write_video
from pipelines.studio.editor import MakeRequest, SoundEditor
from pipelines.studio.limits import StudioLimits, StudioRefusal
from pipelines.studio.project_file import open_project_file, write_project_file
from tests.audiollm.flow.toy import RATE
from tests.pipelines.studio.tiny_studio import (
    ALICE,
    BOB,
    closing,
    copied_version,
    made_editor,
    opened,
    write_film,
    write_recording,
)

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
        with pytest.raises(StudioRefusal, match="lasts 2 seconds; the limit is 1 second: cut the part"):
            opened(editor, write_recording(tmp_path / "long.wav", 2.0))
        with pytest.raises(StudioRefusal, match="scale the video down"):
            opened(editor, write_film(tmp_path / "film.mp4"))
        short = write_recording(tmp_path / "ok.wav", 0.5)
        project = opened(editor, short, name="../../etc/\u202epasswd\n<script>.wav")
        assert project.name == "passwd<script>.wav"
        assert [path.name for path in editor.store.place(project).iterdir() if "source" in path.name] == [
            "source.sound"
        ]


@pytest.mark.parametrize("ending", [".wav", ".flac", ".mp4"])
def test_a_file_that_is_cut_off_is_told_as_such(tmp_path: Path, ending: str) -> None:
    with closing(made_editor(tmp_path / "s", None)) as editor:
        source = tmp_path / f"a{ending}"
        if ending == ".mp4":
            write_film(source)
        else:
            write_recording(tmp_path / "a.wav", 4.0)
            soundfile.write(source, *soundfile.read(tmp_path / "a.wav"))
        (whole,) = editor.store.versions(opened(editor, source))
        assert whole.title == "as it was opened"
        if ending != ".mp4":  # of which half is no film
            source.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
            (cut,) = editor.store.versions(opened(editor, source))
            assert cut.title.startswith("as it was opened; its header tells 4.00 s, ")
            assert cut.title.endswith(" s could be decoded: it is cut off")
            assert cut.duration_s < 2.5


def test_a_flac_whose_header_does_not_tell_its_length_is_counted(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.flac", np.zeros((300_000, 1), np.int16), RATE)
    content = bytearray((tmp_path / "a.flac").read_bytes())
    total = int.from_bytes(content[21:26], "big")
    assert total & (2**36 - 1) == 300_000  # the last 36 bits of these
    content[21:26] = (total >> 36 << 36).to_bytes(5, "big")
    (tmp_path / "lies.flac").write_bytes(content)
    with closing(made_editor(tmp_path / "s", None, StudioLimits(duration_s=20.0))) as editor:
        with pytest.raises(StudioRefusal, match="longer than 20 seconds or 4 GB: cut the part"):
            opened(editor, tmp_path / "lies.flac")
        assert list((tmp_path / "s" / "projects").iterdir()) == []
    with closing(made_editor(tmp_path / "t", None)) as editor:
        assert opened(editor, tmp_path / "lies.flac").duration_s == 300_000 / RATE


def test_pictures_of_8k_are_refused_with_a_remedy(tmp_path: Path) -> None:
    write_video(tmp_path / "8k.mp4", [np.zeros((4320, 7680, 3), np.uint8)], 8, None)
    with closing(made_editor(tmp_path / "s", None)) as editor:
        with pytest.raises(
            StudioRefusal, match=r"7680 x 4320, which is too large: scale .* scale=1920:-2 OUT"
        ):
            opened(editor, tmp_path / "8k.mp4")
        assert list((tmp_path / "s" / "projects").iterdir()) == []


def test_an_hour_is_opened_and_a_span_of_it_edited(editor: SoundEditor, tmp_path: Path) -> None:
    rate = 1000
    noise = np.random.default_rng(0).integers(-3000, 3000, 3600 * rate).astype(np.int16)
    soundfile.write(tmp_path / "hour.wav", noise, rate)
    project = opened(editor, tmp_path / "hour.wav")
    first = editor.store.version(project, 1)
    assert first.loudness is not None and abs(first.loudness - 20 * np.log10(noise.std() / 32768)) < 3
    with pytest.raises(
        StudioRefusal, match="lasts 60 minutes; the limit is 10 minutes at once: cut it, or edit spans"
    ):
        editor.generate(project, "w", MakeRequest("rain"))
    with pytest.raises(StudioRefusal, match="select less of the waveform"):
        editor.edit(project, "w", first, "remove", MakeRequest("rain", start_s=0.0))
    asked = MakeRequest("rain", start_s=1800.0, end_s=1801.0, steps=1)
    made = editor.edit(project, "w", first, "remove", asked).value()
    version = editor.store.version(project, made["version"])
    assert version.is_same_outside and version.checked_samples == 3599 * rate and version.changed
    assert all(1800 <= begin < end <= 1801 for begin, end in version.changed)


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
        assert np.isfinite(heard).all() and heard.max() == 1.5  # peaks above full scale are kept
        soundfile.write(tmp_path / "slow.wav", np.zeros(1000), 500)
        with pytest.raises(StudioRefusal, match="sample rate of 500 Hz"):
            opened(editor, tmp_path / "slow.wav")


# project files


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


@pytest.mark.parametrize("member", ["versions/1.wav", "source.sound"])
def test_a_link_in_a_project_file_is_refused(editor: SoundEditor, tmp_path: Path, member: str) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav", 0.5))
    write_project_file(editor.store, project, tmp_path / "p.zip")
    with zipfile.ZipFile(tmp_path / "p.zip") as good, zipfile.ZipFile(tmp_path / "bad.zip", "w") as bad:
        for name in good.namelist():
            info = zipfile.ZipInfo(name)
            info.external_attr = ((stat.S_IFLNK if name == member else stat.S_IFREG) | 0o600) << 16
            bad.writestr(info, good.read(name))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(StudioRefusal, match="no part of a project"):
        _open_file(editor, tmp_path / "bad.zip", BOB)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


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


def _project_file(editor: SoundEditor, tmp_path: Path, changed: dict[str, bytes]) -> Path:
    """A project file of two versions, some members of which have other contents."""
    project = opened(editor, write_recording(tmp_path / "sound.wav", 0.5))
    copied_version(editor.store, project, editor.store.version(project, 1))
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


def _open_file(editor: SoundEditor, path: Path, owner: str):  # type: ignore[no-untyped-def]
    upload = editor.store.incoming() / "upload"
    upload.write_bytes(path.read_bytes())
    return open_project_file(editor.store, owner, upload, editor.store.limits)
