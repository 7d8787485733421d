"""Damaged, hostile and odd inputs: each is reported, nothing crashes, nothing leaves its folder."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from rich.console import Console

from audiollm.audio import decoding_process, save
from audiollm.errors import StageError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.input.sources import collect_recordings
from pipelines.annotate.stage import STAGE
from tests.audiollm.audio.crashing_decoder import CRASHES, install, write

SHARED = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data"
)
PACKS = ("odd_formats", "fsdd", "esc10", "speech_other_lang")
EXTENSIONS = (".wav", ".mp3", ".flac", ".ogg", ".m4a", ".opus", ".aiff", ".sph")
LARGEST = 1_000_000


def _annotate(folder: Path, **settings: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe("test", folder, "tiny", 0, folder, (), {})
    config = AnnotationConfig.model_validate(
        {"workers": 0, "quality_sample": 0, "grammar": ["yes", "no"], **settings}
    )
    return STAGE.run(config, Context(folder, recipe, Console(quiet=True), {}))


def _rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def _damaged(content: bytes, kind: int, random: np.random.Generator) -> bytes:
    """Truncated, bits flipped, emptied, its header made to lie, or a part overwritten."""
    data = bytearray(content)
    if kind == 0:
        return bytes(data[: int(random.integers(1, len(data)))])
    if kind == 1:
        for place in random.integers(0, len(data), max(1, len(data) // 200)):
            data[place] ^= 1 << int(random.integers(8))
    elif kind == 2:
        return b""
    elif kind == 3:  # sizes in a header are in its first bytes
        for place in random.integers(4, min(64, len(data)), 6):
            data[place] = 0xFF
    else:
        start = int(random.integers(0, len(data)))
        data[start : start + 500] = random.bytes(500)
    return bytes(data)


def _damage(folder: Path, count: int) -> None:
    folder.mkdir()
    sources = [
        path
        for pack in PACKS
        for path in sorted((SHARED / pack).rglob("*"))
        if path.suffix.lower() in EXTENSIONS and 100 < path.stat().st_size < LARGEST
    ]
    random = np.random.default_rng(0)
    for number in range(count):
        path = sources[int(random.integers(len(sources)))]
        wrong = number % 7 == 6
        suffix = EXTENSIONS[int(random.integers(len(EXTENSIONS)))] if wrong else path.suffix
        content = path.read_bytes() if wrong else _damaged(path.read_bytes(), number % 5, random)
        (folder / f"{number:04d}{suffix}").write_bytes(content)


def _check(folder: Path, count: int, **settings: Any) -> None:
    if not (SHARED / "odd_formats").is_dir():
        pytest.skip(f"no real files to damage at {SHARED}")
    _damage(folder / "in", count)
    funnel = _annotate(folder / "out", input=str(folder / "in"), **settings)
    files = _rows(folder / "out", "files")
    assert {row["name"] for row in files} == {path.name for path in (folder / "in").iterdir()}
    assert funnel["files_kept"] + funnel["files_filtered"] + funnel["files_failed"] == count
    assert all(row["reason"] for row in files if row["status"] != "kept")
    assert funnel["files_failed"] >= count // 10  # the damage is felt
    assert (folder / "out" / "report.html").stat().st_size > 10_000


def test_damaged_files_are_each_reported(tmp_path: Path) -> None:
    _check(tmp_path, 60)


def test_a_cut_off_file_without_speech_says_that_it_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    noise = 0.1 * np.random.default_rng(0).standard_normal(4 * 16_000)
    soundfile.write(whole := tmp_path / "whole.flac", noise, 16_000)
    (tmp_path / "in" / "cut.flac").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    _annotate(tmp_path / "out", input=str(tmp_path / "in"))
    (row,) = _rows(tmp_path / "out", "set_aside")
    assert row["kind"] == "no speech found" and "could be decoded: " in row["reason"], row


@pytest.mark.slow
def test_a_thousand_damaged_files_are_each_reported(tmp_path: Path) -> None:
    _check(tmp_path, 1000, workers=2, steps={"quality": {}, "fingerprint": {}, "prosody": {}})


def test_a_file_that_crashes_its_decoder_is_set_aside_by_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "hook", monkeypatch)
    save(tmp_path / "in" / "good.wav", _noise(), 16000)
    write(tmp_path / "in" / "bad.m4a", CRASHES)
    for _ in range(2):
        funnel = _annotate(
            tmp_path / "out", input=str(tmp_path / "in"), workers=1, steps={"segments": {"cover": "all"}}
        )
        assert (funnel["files_kept"], funnel["files_failed"]) == (1, 1)
    rows = {row["name"]: row for row in _rows(tmp_path / "out", "files")}
    assert "crashes its decoder" in rows["bad.m4a"]["reason"]
    decoding_process.end_all()


# ------------------------------------------------------------------------------------------ hostile names


def _noise(seconds: float = 2.0) -> torch.Tensor:
    """No speech: a segment of the kind sound."""
    return torch.from_numpy(np.random.default_rng(0).normal(0, 0.05, (1, round(16000 * seconds)))).float()


def test_a_file_name_cannot_break_the_report_nor_leave_the_folder(tmp_path: Path) -> None:
    source = tmp_path / "in"
    names = [
        '"><script>alert(1)<\\script>.wav',
        "new\nline.wav",
        "x" * 240 + ".wav",
        "a..%2f..%2fpasswd.wav",
        "\u202egnp.wav",
        "'; drop table calls; --.wav",
    ]
    for number, name in enumerate(names):
        save(tmp_path / "clean.wav", _noise(2.0 + number / 10), 16000)
        source.mkdir(exist_ok=True)
        (source / name).write_bytes((tmp_path / "clean.wav").read_bytes())
    not_utf8 = os.fsencode(str(source)) + b"/\xff\xfe.wav"
    with open(not_utf8, "wb") as file:
        file.write((tmp_path / "clean.wav").read_bytes())
    before = {path for path in tmp_path.rglob("*") if tmp_path / "out" not in path.parents}
    funnel = _annotate(tmp_path / "out", input=str(source), steps={"segments": {"cover": "all"}}, shards=True)
    assert funnel["files_kept"] == len(names) and funnel["files_failed"] == 1
    assert {row["name"] for row in _rows(tmp_path / "out", "files") if row["status"] == "kept"} == set(names)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script>alert" not in page
    after = {path for path in tmp_path.rglob("*") if tmp_path / "out" not in path.parents}
    assert after - before <= {tmp_path / "out"}


def test_members_of_a_tar_stay_in_the_folder(tmp_path: Path) -> None:
    save(tmp_path / "tone.wav", _noise(), 16000)
    content = (tmp_path / "tone.wav").read_bytes()
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for number, name in enumerate(("good.wav", "../../escaped.wav", "/absolute.wav", "dir/notes.txt")):
            member = tarfile.TarInfo(name)
            changed = content[:-2] + bytes([number, 0])
            member.size = len(changed)
            archive.addfile(member, io.BytesIO(changed if name.endswith("wav") else b"x" * len(changed)))
        link = tarfile.TarInfo("link.wav")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    settings = {"steps": {"segments": {"cover": "all"}}}
    funnel = _annotate(tmp_path / "out", input=str(tmp_path / "all.tar"), **settings)
    assert (funnel["files_kept"], funnel["not_audio"]) == (3, 1)
    assert not (tmp_path / "escaped.wav").exists() and not Path("/absolute.wav").exists()
    paths = {Path(row["path"]) for row in _rows(tmp_path / "out", "segments")}
    assert all(path.is_relative_to(tmp_path / "out" / "fetched") for path in paths)
    # again: nothing is copied a second time
    times = {path: path.stat().st_mtime_ns for path in paths}
    _annotate(tmp_path / "out", input=str(tmp_path / "all.tar"), **settings)
    assert {path: path.stat().st_mtime_ns for path in paths} == times


def test_a_torn_tar_gives_what_is_whole_and_is_named(tmp_path: Path) -> None:
    save(tmp_path / "tone.wav", _noise(), 16000)
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        archive.add(tmp_path / "tone.wav", "one.wav")
        archive.add(tmp_path / "tone.wav", "two.wav")
    whole = (tmp_path / "all.tar").read_bytes()
    (tmp_path / "all.tar").write_bytes(whole[: 512 + len((tmp_path / "tone.wav").read_bytes()) + 5000])
    funnel = _annotate(
        tmp_path / "out", input=str(tmp_path / "all.tar"), steps={"segments": {"cover": "all"}}
    )
    assert funnel["files_kept"] == 1 and funnel["files_failed"] >= 1
    assert any("all.tar" in row["place"] for row in _rows(tmp_path / "out", "set_aside"))


# ---------------------------------------------------------------------------------------- other inputs


def test_lists_globs_and_addresses_are_inputs_too(tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path / "in" / f"{number}.wav", _noise(2.0 + number / 10), 16000)
    listed = tmp_path / "list.jsonl"
    listed.write_text('{"path": "in/0.wav", "text": "yes", "speaker": "ann"}\n{"path": "in/gone.wav"}\n')
    settings = {"steps": {"segments": {"cover": "all"}}}
    funnel = _annotate(tmp_path / "a", input=str(listed), **settings)
    assert (funnel["files_kept"], funnel["files_failed"]) == (1, 1)
    assert [(row["text"], row["speaker"]) for row in _rows(tmp_path / "a", "segments")] == [("yes", "ann")]
    assert _annotate(tmp_path / "b", input=str(tmp_path / "in" / "[12].wav"), **settings)["files_kept"] == 2
    address = f"file://{tmp_path}/in"
    assert _annotate(tmp_path / "c", input=[address], **settings)["files_kept"] == 3
    many = [str(tmp_path / "in" / "0.wav"), str(listed), str(tmp_path / "in")]
    funnel = _annotate(tmp_path / "d", input=many, **settings)
    assert funnel["audio_files"] == 4 and funnel["files_kept"] == 3  # each once, and one that is gone


@pytest.mark.parametrize(
    ("given", "reason"),
    [("nothing/*.wav", "no file that it matches"), ("file:///not/there/at/all", "no such file or folder")],
)
def test_an_input_that_is_not_there_ends_with_2(tmp_path: Path, given: str, reason: str) -> None:
    with pytest.raises(StageError, match=reason) as caught:
        _annotate(tmp_path / "out", input=[given])
    assert caught.value.exit_code == 2


def test_an_archive_that_unpacks_to_too_much_is_cut_off_and_named(tmp_path: Path) -> None:
    """30 MB of silence in 30 kB: what is within the limit is kept, the rest is never written."""
    archive = tmp_path / "bomb.tar.gz"
    save(tmp_path / "a.wav", torch.zeros(1, 8000), 16_000)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "a.wav", "a.wav")
        for number in range(3):
            about = tarfile.TarInfo(f"large{number}.wav")
            about.size = 10 << 20
            tar.addfile(about, io.BytesIO(bytes(about.size)))
    assert archive.stat().st_size < 100_000
    found = collect_recordings([str(archive)], tmp_path / "fetched", lambda name: None, max_unpacked_gb=0.015)
    assert [item.name for item in found.files][:1] == ["bomb.tar.gz/a.wav"]
    assert found.unpacked_bytes < 15e6
    assert sum(path.stat().st_size for path in (tmp_path / "fetched").rglob("*.wav")) == found.unpacked_bytes
    (row,) = found.rejected
    assert row["kind"] == "archive too large"
    assert "more than max_unpacked_gb=0.015 when unpacked, from large1.wav" in row["reason"]
