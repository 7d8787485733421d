"""Files that hold less or more than their headers promise: cut off, chained, or with a header that lies."""

from __future__ import annotations

import io
import logging
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from audiollm.audio import AudioError, decoding, load, probe
from audiollm.audio.flac import flac_length
from audiollm.audio.lengths import xing_header
from audiollm.audio.ogg import ogg_links
from audiollm.audio.streams import stream_mono
from tests.audiollm.audio.audio_files import FORMATS, SAMPLE_RATE, sweep, write_av, write_formats

RATE = 16000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("lengths")
    more: dict[str, Callable[[Path, Tensor], Path]] = {
        "fast.m4a": lambda p, x: write_av(p, "ipod", "aac", x, movflags="faststart"),
        "a.webm": lambda p, x: write_av(p, "webm", "libopus", x),
        "a.mka": lambda p, x: write_av(p, "matroska", "aac", x),
        "flac.ogg": lambda p, x: write_av(p, "ogg", "flac", x),
        "av.opus": lambda p, x: write_av(p, "ogg", "libopus", x),
        "bare.mp3": lambda p, x: write_av(p, "mp3", "libmp3lame", x, write_xing="0"),
        "a.aac": lambda p, x: write_av(p, "adts", "aac", x),
        "a.mp2": lambda p, x: write_av(p, "mp2", "mp2", x),
        "a.ac3": lambda p, x: write_av(p, "ac3", "ac3", x),
        "a.eac3": lambda p, x: write_av(p, "eac3", "eac3", x),
    }
    return write_formats(folder) | {name: write(folder / name, sweep(2)) for name, write in more.items()}


def difference(path: Path) -> str | None:
    return probe(path).difference(load(path).duration_s)


WITH_LENGTH = ("pcm16.wav", "float.wav", "adpcm.wav", "a.flac", "a.ogg", "a.opus", "a.aiff", "a.au", "a.caf", "a.w64",
               "a.sph", "a.mp3", "lame.mp3", "fast.m4a", "a.webm", "a.mka", "flac.ogg", "av.opus")  # fmt: skip


def test_nothing_is_said_of_whole_files(files: dict[str, Path], tmp_path: Path) -> None:
    """Delays of encoders, padding, estimates, and WAV from a pipe, whose header holds a size that means: unknown."""
    for path in files.values():
        assert difference(path) is None, path.name
    assert set(FORMATS) < set(files)
    wav = files["pcm16.wav"].read_bytes()
    size = wav.index(b"data") + 4
    for number, unknown in enumerate((0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0)):
        path = tmp_path / f"{number}.wav"
        path.write_bytes(wav[:size] + struct.pack("<I", unknown) + wav[size + 4 :])
        assert difference(path) is None, hex(unknown)


@pytest.fixture(autouse=True)
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process names a number of files, each once: those of other tests do not count."""
    monkeypatch.setattr(decoding, "_compared", set())
    monkeypatch.setattr(decoding, "_named", [])


@pytest.mark.parametrize("name", WITH_LENGTH)
def test_a_file_that_was_cut_off_is_said_to_be(
    files: dict[str, Path], tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    content = files[name].read_bytes()
    path = tmp_path / name
    path.write_bytes(content[: len(content) * 6 // 10])
    with caplog.at_level(logging.WARNING, "audiollm.audio"):
        decoded_s = load(path).duration_s
    assert decoded_s < 7.0
    sentence = probe(path).difference(decoded_s)
    assert (
        sentence is not None and f"{decoded_s:.2f} s could be decoded" in sentence and "cut off" in sentence
    )
    assert [record.getMessage() for record in caplog.records] == [f"{path}: {sentence}"]
    list(stream_mono(path, SAMPLE_RATE))
    assert len(caplog.records) == 1  # said once


def test_a_span_that_its_file_cannot_fill_is_named_and_others_are_not(
    files: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = files["a.flac"].read_bytes()
    (tmp_path / "a.flac").write_bytes(content[: len(content) // 2])
    with caplog.at_level(logging.WARNING, "audiollm.audio"):
        load(tmp_path / "a.flac", 0.5, 1.5)
        assert not caplog.records
        load(tmp_path / "a.flac", 2.5, 6.0)
    assert len(caplog.records) == 1


def test_a_stream_names_the_difference(
    files: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = files["a.mp3"].read_bytes()
    (tmp_path / "a.mp3").write_bytes(content[: len(content) // 2])
    with caplog.at_level(logging.WARNING, "audiollm.audio"):
        list(stream_mono(tmp_path / "a.mp3", 16000))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("factor", "header_s"), [(675, 5400.0), (0.5, 4.0)])
def test_a_xing_header_that_lies_is_not_believed(
    files: dict[str, Path], tmp_path: Path, factor: float, header_s: float
) -> None:
    """`plan` took its word: 90 minutes in a file of 8 s."""
    content = bytearray(files["a.mp3"].read_bytes())
    header = xing_header(bytes(content))
    assert header is not None
    at = content.find(struct.pack(">I", header.frames))
    content[at : at + 4] = struct.pack(">I", round(header.frames * factor))
    path = tmp_path / "a.mp3"
    path.write_bytes(content)
    info, decoded_s = probe(path), load(path).duration_s
    assert info.header_s == pytest.approx(header_s, rel=0.02)
    assert info.duration_s == pytest.approx(8.0, abs=0.1)
    if factor > 1:
        assert decoded_s == pytest.approx(8.0, abs=0.1)
    assert info.difference(decoded_s) is not None or decoded_s == pytest.approx(header_s, abs=0.1)


FRAMES_ALONE = ("a.aac", "a.mp2", "a.ac3", "a.eac3", "bare.mp3")


@pytest.mark.parametrize("name", FRAMES_ALONE)
def test_frames_without_a_header_tell_what_is_missing_between_them(
    files: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Decoders look for the next frame, and say nothing."""
    content, path = files[name].read_bytes(), tmp_path / name
    middle, noise = len(content) // 2, np.random.default_rng(0).bytes(777)
    damaged = {
        "its last frame is cut off": content[: len(content) * 6 // 10 - 37],
        "bytes at 4.0. s are no whole frame": content[:middle] + content[middle + 1000 :],
        "777 bytes at 4.0. s are no whole frame": content[:middle] + noise + content[middle:],
        "in 2 places, the first at 4.0. s,": content[:middle]
        + noise
        + content[middle:-5000]
        + noise
        + content[-5000:],
        "777 bytes at its end are no whole frame": content + noise,
    }
    for sentence, data in damaged.items():
        path.write_bytes(data)
        said = probe(path).damage
        assert said is not None and re.search(sentence, said), (sentence, said)
    for harmless in (b"TAG" + bytes(125), bytes(512), b"APETAGEX" + noise):
        path.write_bytes(content + harmless)
        assert probe(path).damage is None
    path.write_bytes(content[100:])  # a recording of a stream begins anywhere
    assert probe(path).damage is None


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24"])
def test_a_flac_that_holds_more_than_its_header_counts_is_read_whole(
    tmp_path: Path, channels: int, subtype: str
) -> None:
    path, samples_CN = tmp_path / "a.flac", sweep(channels, RATE, 3.1)
    soundfile.write(path, samples_CN.T.numpy(), RATE, subtype=subtype)
    whole = load(path).samples_CN
    assert flac_length(str(path)) == (whole.shape[1], whole.shape[1], RATE) and difference(path) is None
    content = bytearray(path.read_bytes())
    facts = int.from_bytes(content[18:26], "big")
    content[18:26] = (facts - whole.shape[1] + RATE).to_bytes(8, "big")  # a second
    path.write_bytes(content)
    assert torch.equal(load(path).samples_CN, whole)
    assert probe(path).duration_s == pytest.approx(3.1)
    assert difference(path) == (
        "its header tells 1.00 s, 3.10 s could be decoded: its header does not count all of it"
    )


def test_two_mp3_files_in_one_are_read_whole(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "both.mp3"
    path.write_bytes(2 * files["a.mp3"].read_bytes())
    assert probe(path).duration_s == pytest.approx(16.0, abs=0.2)
    assert load(path).duration_s == pytest.approx(16.0, abs=0.2)
    sentence = difference(path)
    assert sentence is not None and "does not count all of it" in sentence


def test_a_recorder_that_died_wrote_too_small_a_size(files: dict[str, Path], tmp_path: Path) -> None:
    wav = files["pcm16.wav"].read_bytes()
    size = wav.index(b"data") + 4
    path = tmp_path / "a.wav"
    path.write_bytes(wav[:size] + struct.pack("<I", 4 * SAMPLE_RATE) + wav[size + 4 :])
    sentence = difference(path)
    assert (
        sentence is not None
        and "not counted in its header" in sentence
        and "1.00 s could be decoded" in sentence
    )
    path.write_bytes(wav + b"TAG" + bytes(125))
    assert difference(path) is None  # an ID3 tag of another age


# Chains of Ogg streams


def vorbis(samples_CN: Tensor, rate: int = RATE) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples_CN.T.numpy(), rate, format="OGG", subtype="VORBIS")
    return buffer.getvalue()


def chain_of(folder: Path, codec: str) -> tuple[bytes, bytes]:
    if codec == "vorbis":
        return vorbis(sweep(1, RATE, 4.0)), vorbis(sweep(1, RATE, 3.0).flip(1))
    first, second = (
        write_av(folder / f"{s}.ogg", "ogg", codec, sweep(1, SAMPLE_RATE, s)) for s in (4.0, 3.0)
    )
    return first.read_bytes(), second.read_bytes()


@pytest.mark.parametrize("codec", ["vorbis", "libopus", "flac"])
@pytest.mark.parametrize("order", [(0, 1), (0, 0), (1, 0, 1)])
def test_a_chain_is_read_whole(tmp_path: Path, codec: str, order: tuple[int, ...]) -> None:
    """`cat a.ogg a.ogg` gives both streams one serial number."""
    parts = chain_of(tmp_path, codec)
    (tmp_path / "chain.ogg").write_bytes(b"".join(parts[number] for number in order))
    singles = []
    for number, content in enumerate(parts):
        (tmp_path / f"part{number}.ogg").write_bytes(content)
        singles.append(load(tmp_path / f"part{number}.ogg").samples_CN)
    truth = torch.cat([singles[number] for number in order], dim=1)
    path = tmp_path / "chain.ogg"
    whole = load(path)
    assert torch.equal(whole.samples_CN, truth)
    assert probe(path).duration_s == pytest.approx(whole.duration_s, abs=1e-6)
    assert difference(path) is None
    assert torch.equal(torch.cat(list(stream_mono(path, whole.sample_rate)), dim=1), truth)
    rate = whole.sample_rate
    seam = singles[order[0]].shape[1] / rate
    span = load(path, seam - 1.0, seam + 1.0).samples_CN
    tolerance = 0.02 if codec == "libopus" else 1e-6
    assert torch.allclose(span, truth[:, round((seam - 1) * rate) : round((seam + 1) * rate)], atol=tolerance)
    with pytest.raises(AudioError, match="beyond the end"):
        load(path, whole.duration_s + 1.0)


@pytest.mark.parametrize("form", [(8000, 1), (RATE, 2)])
def test_a_chain_of_several_forms_is_refused_by_name(tmp_path: Path, form: tuple[int, int]) -> None:
    rate, channels = form
    path = tmp_path / "a.ogg"
    path.write_bytes(vorbis(sweep(1, RATE, 2.0)) + vorbis(sweep(channels, rate, 2.0), rate))
    for read in (probe, load):
        with pytest.raises(
            AudioError, match=f"16000 Hz with 1 channels, then {rate} Hz with {channels} channels"
        ):
            read(path)


@pytest.mark.parametrize("cut", ["last", "first", "last headers"])
def test_of_a_chain_that_was_cut_the_readable_streams_are_read(tmp_path: Path, cut: str) -> None:
    first, second = vorbis(sweep(1, RATE, 4.0)), vorbis(sweep(1, RATE, 3.0))
    content = {
        "last": first + second[: len(second) * 9 // 10],
        "first": first[: len(first) * 9 // 10] + second,
        "last headers": first + second[:3000],
    }[cut]
    (tmp_path / "a.ogg").write_bytes(content)
    sentence = difference(tmp_path / "a.ogg")
    assert sentence is not None and "the last page of 1 of its 2 Ogg streams is missing" in sentence


def test_links_are_found_between_junk_and_sound_beside_pictures_is_one() -> None:
    page = vorbis(sweep(1, RATE, 1.0))
    assert [link.is_whole for link in ogg_links(page + b"junk" * 9 + page + b"junk")] == [True, True]
    beginnings = page.index(b"OggS", 4)
    both = (
        page[:beginnings] + page[:beginnings] + page[beginnings:]
    )  # two beginnings, as of sound and pictures
    assert len(ogg_links(both)) == 1
    assert ogg_links(b"RIFF" + bytes(100)) == []
    noise = np.random.default_rng(0).bytes(5000)
    assert ogg_links(noise) == []
