"""Files of tracks: what they hold beside the samples is in the edited file, and their peaks above full scale, too."""

from __future__ import annotations

import struct
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch

from audiollm.audio.tags import read_tags
from audiollm.flow.editing.chunks import chunks
from audiollm.flow.editing.tracks import Track, read_track

RATE = 8000
TIME_REFERENCE = 1_234_567_890


def noise(channels: int, seconds: float = 0.5, level: float = 0.1) -> np.ndarray:
    return np.random.default_rng(0).normal(0, level, (round(seconds * RATE), channels))


def broadcast_extension() -> bytes:
    """A `bext` chunk of EBU Tech 3285: description, origin, date, and the place on a day's time line in samples."""
    texts = b"Street at noon".ljust(256, b"\0") + b"Ann".ljust(32, b"\0") + b"REF1".ljust(32, b"\0")
    return texts + b"2024-05-0110:00:00" + struct.pack("<QH", TIME_REFERENCE, 1) + bytes(254) + b"A=PCM\r\n"


def write_wav(path: Path, subtype: str, format: str, channels: int = 1) -> None:
    """A WAV with chunks before and behind its samples; those of odd length are padded."""
    soundfile.write(path, noise(channels), RATE, subtype=subtype, format=format)
    content = path.read_bytes()
    head = content[:12]
    with path.open("rb") as file:
        places = {chunk.name: chunk for chunk in chunks(file)}
    data = places[b"data"].start - 8
    info = b"INFO" + b"INAM" + struct.pack("<I", 6) + b"Title\0" + b"IART" + struct.pack("<I", 4) + b"Ann\0"
    cue = struct.pack("<I", 1) + struct.pack("<II4sIII", 1, 800, b"data", 0, 0, 800)

    def chunk(name: bytes, text: bytes) -> bytes:
        return struct.pack("<4sI", name, len(text)) + text + bytes(len(text) % 2)

    even = (
        " " if format == "RF64" else ""
    )  # libsndfile loses its place in an RF64 behind a chunk of odd length
    take = f"<BWFXML><TAKE>7</TAKE>{even}</BWFXML>".encode()
    before = chunk(b"bext", broadcast_extension() + even.encode()) + chunk(b"iXML", take)
    content = content[:data] + before + content[data:] + chunk(b"LIST", info) + chunk(b"cue ", cue)
    if head[:4] == b"RIFF":
        content = content[:4] + struct.pack("<I", len(content) - 8) + content[8:]
    else:
        content = content[:20] + struct.pack("<Q", len(content) - 8) + content[28:]
    path.write_bytes(content)


def contents(path: Path) -> dict[bytes, bytes]:
    with path.open("rb") as file:
        return {part.name: _content(file, part) for part in chunks(file)}


def _content(file, part) -> bytes:  # type: ignore[no-untyped-def]
    file.seek(part.start)
    return bytes(file.read(part.size))


def edited(path: Path, out: Path, longer: bool = False) -> tuple[Track, Track]:
    """A track and itself with other samples from its middle on, as they are read."""
    track = read_track(path)
    part_CN = torch.full((track.samples_NC.shape[1], track.num_samples if longer else 100), 0.25)
    track.replaced(track.num_samples // 2, part_CN).save(out)
    return track, read_track(out)


@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.parametrize(
    ("subtype", "format", "channels"),
    [
        ("PCM_16", "WAV", 1),
        ("PCM_24", "WAV", 2),
        ("FLOAT", "WAV", 1),
        ("PCM_16", "WAVEX", 3),
        ("PCM_24", "RF64", 1),
    ],
)
def test_an_edited_wav_has_all_chunks_of_its_file(
    tmp_path: Path, subtype: str, format: str, channels: int, longer: bool
) -> None:
    path, out = tmp_path / "a.wav", tmp_path / "b.wav"
    write_wav(path, subtype, format, channels)
    before, after = edited(path, out, longer)
    middle = before.num_samples // 2
    assert (after.format, after.subtype, after.sample_rate) == (before.format, before.subtype, RATE)
    assert np.array_equal(after.samples_NC[:middle], before.samples_NC[:middle])
    assert after.num_samples == before.num_samples + (middle if longer else 0)
    old, new = contents(path), contents(out)
    for name in (b"bext", b"iXML", b"LIST", b"cue ", b"fmt "):
        assert new[name] == old[name], name
    assert [name for name in new if name in (b"bext", b"data", b"LIST")] == [b"bext", b"data", b"LIST"]
    with av.open(str(out)) as container:  # as FFmpeg reads it
        tags = dict(container.metadata)
        assert tags["time_reference"] == str(TIME_REFERENCE) and tags["title"] == "Title"
        assert tags["encoded_by"] == "Ann" and tags["comment"] == "Street at noon"
        assert container.streams.audio[0].duration == after.num_samples
    length = (
        struct.unpack("<Q", out.read_bytes()[20:28])
        if format == "RF64"
        else struct.unpack("<I", out.read_bytes()[4:8])
    )
    assert length == (out.stat().st_size - 8,)


def test_a_mask_of_channels_is_the_files_own(tmp_path: Path) -> None:
    path, out = tmp_path / "a.wav", tmp_path / "b.wav"
    write_wav(path, "PCM_16", "WAVEX", 4)
    content = path.read_bytes()
    place = content.index(b"fmt ") + 8 + 20
    quad = struct.pack(
        "<I", 0x107
    )  # left, right, centre, back centre: not what libsndfile takes for four channels
    assert content[place : place + 4] != quad
    path.write_bytes(content[:place] + quad + content[place + 4 :])
    edited(path, out)
    assert contents(out)[b"fmt "][20:24] == quad


def test_an_edited_flac_has_comments_and_cover_of_its_file(tmp_path: Path) -> None:
    path, out = tmp_path / "a.flac", tmp_path / "b.flac"
    with soundfile.SoundFile(path, "w", RATE, 2, "PCM_24", format="FLAC") as file:
        file.title, file.artist = "Street", "Ann"
        file.write(noise(2))
    content = path.read_bytes()
    first = 4 + 4 + int.from_bytes(content[5:8], "big")
    cover = (
        struct.pack(">I", 3) + struct.pack(">I", 9) + b"image/png" + bytes(20) + struct.pack(">I", 3) + b"PNG"
    )
    picture = bytes([6]) + len(cover).to_bytes(3, "big") + cover
    path.write_bytes(content[:first] + picture + content[first:])
    before, after = edited(path, out, longer=True)
    assert after.subtype == "PCM_24" and after.num_samples == 3 * before.num_samples // 2
    with soundfile.SoundFile(out) as file:
        assert (file.title, file.artist) == ("Street", "Ann")
    assert picture[1:] in out.read_bytes()
    assert read_tags(out).texts == read_tags(path).texts


def test_an_edited_aiff_has_the_chunks_of_its_file(tmp_path: Path) -> None:
    path, out = tmp_path / "a.aiff", tmp_path / "b.aiff"
    soundfile.write(path, noise(2), RATE, subtype="PCM_16", format="AIFF")
    content = path.read_bytes() + struct.pack(">4sI", b"NAME", 7) + b"Street!\0"
    path.write_bytes(content[:4] + struct.pack(">I", len(content) - 8) + content[8:])
    before, after = edited(path, out, longer=True)
    assert after.num_samples == 3 * before.num_samples // 2
    assert contents(out)[b"NAME"] == b"Street!"


def write_mp3(path: Path) -> None:
    with av.open(str(path), "w") as container:
        container.metadata.update(title="Street", artist="Ann", track="3", composer="Bo")
        stream = container.add_stream("libmp3lame", rate=RATE)
        stream.layout = "mono"
        values_CN = noise(1, 2.0).T.astype(np.float32)
        frame = av.AudioFrame.from_ndarray(values_CN, format="fltp", layout="mono")
        frame.sample_rate = RATE
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def test_tags_of_an_mp3_become_those_of_a_wav_and_the_rest_is_named(tmp_path: Path) -> None:
    path, out = tmp_path / "a.mp3", tmp_path / "b.wav"
    write_mp3(path)
    track, _ = edited(path, out)
    assert track.lost_tags() == ["the tag composer"]
    with soundfile.SoundFile(out) as file:
        assert (file.title, file.artist, file.tracknumber) == ("Street", "Ann", "3")


def test_peaks_of_an_mp3_above_full_scale_are_kept(tmp_path: Path) -> None:
    """A square wave at full scale is above it once it was encoded; clipped peaks are other samples."""
    path, out = tmp_path / "a.mp3", tmp_path / "b.wav"
    square_N = np.sign(np.sin(np.arange(2 * RATE) * 0.3))
    soundfile.write(path, square_N, RATE, format="MP3")
    with av.open(str(path)) as container:
        decoded_CN = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
    assert np.abs(decoded_CN).max() > 1.05
    before, after = edited(path, out)
    middle = before.num_samples // 2
    assert float(np.abs(before.samples_NC).max()) == pytest.approx(float(np.abs(decoded_CN).max()))
    assert np.array_equal(after.samples_NC[:middle], before.samples_NC[:middle])


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32"])
def test_integer_samples_beyond_full_scale_do_not_wrap(subtype: str) -> None:
    track = Track(np.zeros((4, 1), np.int32), RATE, "WAV", subtype)
    waves_CN = torch.tensor([[1.0, 1.5, -1.0, -1.5, 0.5]])
    stored = track.stored(waves_CN)[:, 0].astype(np.int64)
    step = 1 << (32 - (track.bits or 0))
    assert stored.tolist() == [2**31 - step, 2**31 - step, -(2**31), -(2**31), 2**30]
    layer = track.layer(track.replaced(0, waves_CN))
    assert track.replaced(0, waves_CN).without(layer).samples_NC.max() == 0
