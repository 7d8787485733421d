"""audiollm.audio writes and finds files: encodings, interrupted saves, bytes, what is audio and what is not.

Oracles: closed forms (full-scale grids) and soundfile.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from audiollm.audio import AudioError
from audiollm.audio import files as audio
from tests.audiollm.audio.audio_signals import error_db, noise, sines

EXAMPLES = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
PCM_ENCODINGS = [
    (".wav", "PCM_U8", 8),
    (".wav", "PCM_16", 16),
    (".wav", "PCM_24", 24),
    (".wav", "PCM_32", 32),
    (".flac", "PCM_16", 16),
    (".flac", "PCM_24", 24),
]


@pytest.mark.parametrize(("extension", "subtype", "bits"), PCM_ENCODINGS)
@EXAMPLES
@given(seed=st.integers(0, 999), num_channels=st.integers(1, 8), num_samples=st.integers(1, 3000))
def test_round_trip_within_quantization(
    tmp_path: Path, extension: str, subtype: str, bits: int, seed: int, num_channels: int, num_samples: int
) -> None:
    path, again = tmp_path / f"a{extension}", tmp_path / f"b{extension}"
    samples = noise(seed, num_channels, num_samples)
    audio.save(path, samples, 24000, subtype)
    loaded = audio.load(path)
    step = 2.0 ** (1 - bits)
    assert loaded.sample_rate == 24000
    assert loaded.samples_CN.shape == samples.shape
    near_the_top = samples > 1 - step  # +1.0 itself is not on a two's complement grid
    bound = torch.where(near_the_top, step, step / 2).double() + 2**-25  # float32's own rounding
    assert ((loaded.samples_CN.double() - samples.double()).abs() <= bound).all()
    audio.save(again, loaded.samples_CN, 24000, subtype)
    assert torch.equal(audio.load(again).samples_CN, loaded.samples_CN)


def test_every_16_bit_level_survives(tmp_path: Path) -> None:
    levels = np.arange(-(2**15), 2**15, dtype=np.int16)
    soundfile.write(tmp_path / "in.wav", levels, 16000, subtype="PCM_16")
    audio.save(tmp_path / "out.wav", audio.load(tmp_path / "in.wav").samples_CN, 16000)
    saved, _ = soundfile.read(tmp_path / "out.wav", dtype="int16")
    assert np.array_equal(saved, levels)


def test_float_wav_is_exact(tmp_path: Path) -> None:
    samples = noise(5, 2, 1000)
    audio.save(tmp_path / "a.wav", samples, 44100, subtype="FLOAT")
    assert torch.equal(audio.load(tmp_path / "a.wav").samples_CN, samples)


def test_saving_clips_and_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "x" / "y" / "a.wav"
    audio.save(path, torch.tensor([[2.0, -3.0, 0.5]], dtype=torch.float64), 16000)
    assert audio.load(path).samples_CN.tolist() == [[1 - 2**-15, -1.0, 0.5]]


@pytest.mark.parametrize("extension", [".ogg", ".mp3"])
def test_lossy_round_trip_keeps_length_and_place(tmp_path: Path, extension: str) -> None:
    samples = sines(44100, 44100, (440.0, 1330.0)).repeat(2, 1)
    audio.save(tmp_path / f"a{extension}", samples, 44100)
    loaded = audio.load(tmp_path / f"a{extension}")
    assert loaded.samples_CN.shape == samples.shape
    assert error_db(loaded.samples_CN, samples, edge=4410) < -20


def test_a_long_ogg_can_be_written(tmp_path: Path) -> None:
    """libsndfile's Vorbis encoder crashes the process when it gets this in one piece."""
    samples = noise(6, 2, 60 * 44100)
    audio.save(tmp_path / "a.ogg", samples, 44100)
    assert audio.load(tmp_path / "a.ogg").num_samples == samples.shape[1]


@pytest.mark.parametrize(
    ("name", "samples", "sample_rate", "subtype", "reason"),
    [
        ("a.wav", torch.tensor([[0.0, math.nan]]), 16000, None, "NaN"),
        ("a.wav", torch.tensor([[0.0, -math.inf]]), 16000, None, "infinity"),
        ("a.wav", torch.zeros(1, 0), 16000, None, "expected"),
        ("a.wav", torch.zeros(100), 16000, None, "expected"),
        ("a.xyz", torch.zeros(1, 10), 16000, None, "xyz"),
        ("a", torch.zeros(1, 10), 16000, None, "format"),
        ("", torch.zeros(1, 10), 16000, None, "format"),
        ("a.wav", torch.zeros(1, 10), 16000, "VORBIS", "VORBIS"),
        ("a.wav", torch.zeros(1, 10), 0, None, "0 Hz"),
        ("a.flac", torch.zeros(9, 10), 16000, None, "9 channels"),
        ("a.mp3", torch.zeros(1, 10), 192000, None, "192000 Hz"),
        ("file/a.wav", torch.zeros(1, 10), 16000, None, "folder"),
        ("folder.wav", torch.zeros(1, 10), 16000, None, "written"),
        ("nul\0.wav", torch.zeros(1, 10), 16000, None, "written"),
    ],
)
def test_what_cannot_be_saved_is_an_audio_error(
    tmp_path: Path, name: str, samples: Tensor, sample_rate: int, subtype: str | None, reason: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder.wav").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(AudioError, match=reason) as caught:
        audio.save(tmp_path / name, samples, sample_rate, subtype)
    assert caught.value.path == tmp_path / name
    assert sorted(tmp_path.rglob("*")) == before  # nothing half written is left


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException | type[BaseException]
) -> None:
    path = tmp_path / "a.wav"
    audio.save(path, noise(7, 1, 100), 16000)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(soundfile.SoundFile, "write", fail)
    with pytest.raises((KeyboardInterrupt, AudioError)):
        audio.save(path, noise(8, 1, 100), 16000)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg", "mp3"])
def test_bytes_are_the_content_of_the_file(kind: str) -> None:
    samples = sines(16000, 16000, (440.0,))
    data = audio.encode_bytes(samples, 16000, kind)
    loaded = audio.load_bytes(data)
    assert loaded.sample_rate == 16000
    assert loaded.samples_CN.shape == samples.shape
    assert error_db(loaded.samples_CN, samples, edge=1600) < (-80 if kind in ("wav", "flac") else -20)
    part = audio.load_bytes(data, start_s=0.25, end_s=0.5, sample_rate=8000)
    assert part.samples_CN.shape == (1, 2000)


def test_bad_bytes_are_named() -> None:
    for data in (b"", b"RIFF", b"not audio at all" * 100):
        with pytest.raises(AudioError, match=r"shard-3\.tar/7\.wav"):
            audio.load_bytes(data, name="shard-3.tar/7.wav")
    with pytest.raises(AudioError, match="xyz"):
        audio.encode_bytes(torch.zeros(1, 10), 16000, "xyz")


# Finding


def test_audio_is_known_by_header_or_extension(tmp_path: Path) -> None:
    samples = sines(16000, 4000, (440.0,))
    for extension in (".wav", ".flac", ".ogg", ".mp3"):
        disguised = tmp_path / f"from{extension[1:]}.txt"
        disguised.write_bytes(audio.encode_bytes(samples, 16000, extension[1:]))
        assert audio.looks_like_audio(disguised), extension
    for kind in ("AIFF", "AU", "W64", "CAF", "RF64", "NIST"):
        disguised = tmp_path / f"from-{kind}"
        soundfile.write(disguised, samples[0].numpy(), 16000, format=kind, subtype="PCM_16")
        assert audio.looks_like_audio(disguised), kind
    for name in ("a.WAV", "b.m4a", "c.Opus", "d.sph", "e.raw", "f.pcm", "not-there.wav"):
        assert audio.looks_like_audio(tmp_path / name), name


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"plain text",
        "text in UTF-16".encode("utf-16"),
        b"\xff\xd8\xff\xe0\x00\x10JFIF",
        b"\x89PNG\r\n\x1a\n" + bytes(60),
        b"RIFF\x24\x00\x00\x00AVI LIST",
        b"RIFF\x24\x00\x00\x00WEBPVP8 ",
        b"\x00\x00\x00\x18ftypmif1",
        b"\xff" * 64,
        bytes(64),
    ],
)
def test_other_files_are_not_audio(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    assert not audio.looks_like_audio(tmp_path / "a.bin")


def test_looking_never_raises(tmp_path: Path) -> None:
    (tmp_path / "folder.wav").mkdir()
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    for name in ("folder.wav", "pipe", "missing", "nul\0", "x" * 5000):
        assert not audio.looks_like_audio(tmp_path / name)


def test_find_audio_sorts_and_sets_apart(tmp_path: Path) -> None:
    folder, outside = tmp_path / "in", tmp_path / "out"
    for name in ("b.wav", "a/2.mp3", "a/10.mp3", "a.txt", "a/notes.md", "c.raw", ".hidden.wav", ".git/x.wav"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    outside.mkdir()
    (outside / "secret.wav").write_bytes(b"x")
    (folder / "link-out.wav").symlink_to(outside / "secret.wav")
    (folder / "link-in.wav").symlink_to(folder / "b.wav")
    (folder / "link-broken.wav").symlink_to(folder / "gone.wav")
    (folder / "link-folder").symlink_to(outside)
    (folder / "link-loop").symlink_to(folder)
    found, others = audio.find_audio(folder)
    assert [str(path.relative_to(folder)) for path in found] == [
        "a/10.mp3",
        "a/2.mp3",
        "b.wav",
        "c.raw",
        "link-in.wav",
    ]
    assert [str(path.relative_to(folder)) for path in others] == [
        "a/notes.md",
        "a.txt",
        "link-broken.wav",
        "link-folder",
        "link-loop",
        "link-out.wav",
    ]
    assert audio.find_audio(str(folder)) == (found, others)


def test_find_audio_needs_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("missing", "file"):
        with pytest.raises(AudioError, match="cannot be listed") as caught:
            audio.find_audio(tmp_path / name)
        assert str(caught.value.path) == str(tmp_path / name)


@pytest.mark.parametrize("num_channels", range(1, 9))
def test_channels_of_an_ogg_keep_their_places(tmp_path: Path, num_channels: int) -> None:
    time_N = torch.arange(48000) / 48000
    samples = torch.stack(
        [0.3 * torch.sin(2 * torch.pi * (40 + 10 * c) * time_N) for c in range(num_channels)]
    )
    audio.save(tmp_path / "a.ogg", samples, 48000)
    loaded = audio.load(tmp_path / "a.ogg").samples_CN
    assert (
        torch.corrcoef(torch.cat([samples, loaded]))[:num_channels, num_channels:].argmax(1)
    ).tolist() == [*range(num_channels)]
