"""audiollm.audio on damaged files, and on the odd files of shared/data.

What cannot be read is an `AudioError` that says why. Oracles: the signal that was written, soundfile, the headers.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from audiollm.audio import AudioError
from audiollm.audio import files as audio
from tests.audiollm.audio.audio_files import (
    SAMPLE_RATE,
    sweep,
    write_av,
    write_formats,
    write_soundfile,
)

SHARED_DATA = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[3].parent / "shared" / "data"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_formats(tmp_path_factory.mktemp("formats"))


# Damage


def test_missing_files_folders_and_empty_files(tmp_path: Path) -> None:
    (tmp_path / "folder.wav").mkdir()
    (tmp_path / "empty.wav").touch()
    soundfile.write(tmp_path / "no-frames.wav", np.zeros(0), 16000)
    os.mkfifo(tmp_path / "pipe.wav")
    reasons = {
        "missing.wav": "does not exist",
        "folder.wav": "not a file",
        "pipe.wav": "not a file",
        "empty.wav": "0 bytes",
        "no-frames.wav": "no samples",
        "nul\0.wav": "does not exist",
    }
    for name, reason in reasons.items():
        with pytest.raises(AudioError, match=reason) as caught:
            audio.load(tmp_path / name)
        assert caught.value.path == tmp_path / name
        assert name in str(caught.value)
        if name != "no-frames.wav":
            with pytest.raises(AudioError, match=reason):
                audio.probe(tmp_path / name)


@pytest.mark.parametrize("extension", sorted(audio.AUDIO_EXTENSIONS))
@pytest.mark.parametrize("kind", ["random", "text", "html", "zeros", "ones"])
def test_garbage_is_an_audio_error_under_every_extension(tmp_path: Path, extension: str, kind: str) -> None:
    content = {
        "random": np.random.default_rng(0).bytes(40_000),
        "text": b"this is no recording\n" * 1000,
        "html": b"<!DOCTYPE html><html><body>404 Not Found</body></html>" * 20,
        "zeros": bytes(40_000),
        "ones": b"\xff" * 40_000,
    }[kind]
    path = tmp_path / f"garbage{extension}"
    path.write_bytes(content)
    for read in (audio.load, audio.probe):
        with pytest.raises(AudioError) as caught:
            read(path)
        assert caught.value.path == path


def test_raw_samples_are_refused_with_a_remedy(tmp_path: Path) -> None:
    for name in ("a.raw", "b.PCM"):
        (tmp_path / name).write_bytes(np.zeros(1000, dtype="<i2").tobytes())
        with pytest.raises(AudioError, match="convert it first"):
            audio.load(tmp_path / name)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_samples_are_named(tmp_path: Path, value: float) -> None:
    samples = np.zeros(16000, dtype=np.float32)
    samples[9000] = value
    soundfile.write(tmp_path / "a.wav", samples, 16000, subtype="FLOAT")
    for options in ({}, {"mono": True}, {"sample_rate": 8000}):
        with pytest.raises(AudioError, match="NaN or infinite"):
            audio.load(tmp_path / "a.wav", **options)
    assert audio.load(tmp_path / "a.wav", end_s=0.5).duration_s == 0.5


@pytest.mark.parametrize(
    "name", ["pcm16.wav", "a.flac", "a.aiff", "a.w64", "a.ogg", "a.opus", "a.mp3", "a.m4a", "alac.m4a"]
)
@pytest.mark.parametrize("kept", [0.0001, 0.01, 0.4, 0.999])
def test_a_file_cut_short_loads_its_beginning_or_is_an_audio_error(
    files: dict[str, Path], tmp_path: Path, name: str, kept: float
) -> None:
    whole = audio.load(files[name]).samples_CN
    content = files[name].read_bytes()
    path = tmp_path / name
    path.write_bytes(content[: max(1, int(len(content) * kept))])
    try:
        loaded = audio.load(path).samples_CN
    except AudioError as error:
        assert error.path == path
        assert kept < 0.4 or name in ("a.m4a", "alac.m4a")  # M4A has its index at the end
        return
    assert 0.25 * kept * whole.shape[1] < loaded.shape[1] <= whole.shape[1] + 4096
    shared = min(loaded.shape[1], whole.shape[1])
    inner = slice(0, max(0, shared - 8192))
    assert torch.allclose(loaded[:, inner], whole[:, inner], atol=1e-4)


@pytest.mark.parametrize("name", ["a.flac", "a.ogg", "a.mp3", "a.m4a"])
def test_a_hole_in_the_middle_is_an_audio_error(files: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Closing the gap would shift all that follows against its transcript."""
    content = bytearray(files[name].read_bytes())
    middle = len(content) // 2
    content[middle : middle + 6000] = np.random.default_rng(1).bytes(6000)
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(AudioError, match=r"damaged at about [2345]\.\d s"):
        audio.load(path)
    part = audio.load(path, end_s=1.0).samples_CN  # the good part can still be had
    assert torch.allclose(part, audio.load(files[name], end_s=1.0).samples_CN, atol=1e-4)


@pytest.mark.parametrize("name", ["pcm16.wav", "a.flac", "a.mp3", "a.m4a", "a.ogg"])
def test_junk_behind_the_recording_is_ignored(files: dict[str, Path], tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(files[name].read_bytes() + b"TAG" + np.random.default_rng(2).bytes(3000))
    assert torch.equal(audio.load(path).samples_CN, audio.load(files[name]).samples_CN)


def test_headers_that_lie_about_the_length(files: dict[str, Path], tmp_path: Path) -> None:
    """A WAV from a pipe or a crashed recorder, a FLAC from a stream, a FLAC that claims 49 days."""
    wav, flac = files["pcm16.wav"].read_bytes(), files["a.flac"].read_bytes()
    data_size = wav.index(b"data") + 4
    frames_high = 21  # of STREAMINFO: 4 bits, then 4 bytes
    lies = {
        "pipe.wav": wav[:data_size] + b"\xff\xff\xff\xff" + wav[data_size + 4 :],
        "huge.wav": wav[:data_size] + struct.pack("<I", 0x7FFF0000) + wav[data_size + 4 :],
        "crashed.wav": wav[:data_size] + bytes(4) + wav[data_size + 4 :],
        "stream.flac": flac[:frames_high]
        + bytes([flac[frames_high] & 0xF0])
        + bytes(4)
        + flac[frames_high + 5 :],
        "huge.flac": flac[:frames_high]
        + bytes([flac[frames_high] | 0x0F])
        + b"\xff" * 4
        + flac[frames_high + 5 :],
    }
    for name, content in lies.items():
        (tmp_path / name).write_bytes(content)
        truth = files["pcm16.wav" if name.endswith(".wav") else "a.flac"]
        assert torch.equal(audio.load(tmp_path / name).samples_CN, audio.load(truth).samples_CN), name
        assert audio.load(tmp_path / name, start_s=5.0, end_s=6.0).num_samples == SAMPLE_RATE, name
        assert audio.probe(tmp_path / name).sample_rate == SAMPLE_RATE
    assert audio.probe(tmp_path / "stream.flac").num_samples is None


def test_unsigned_samples_by_ffmpeg_are_those_by_libsndfile(tmp_path: Path) -> None:
    """8-bit WAV is unsigned; a header of no length leaves it to FFmpeg."""
    path = write_soundfile(tmp_path / "a.wav", sweep(), "WAV", "PCM_U8")
    intact, content = audio.load(path).samples_CN, path.read_bytes()
    data_size = content.index(b"data") + 4
    path.write_bytes(content[:data_size] + bytes(4) + content[data_size + 4 :])
    assert torch.equal(audio.load(path).samples_CN, intact)


def test_impossible_headers(files: dict[str, Path], tmp_path: Path) -> None:
    wav = bytearray(files["pcm16.wav"].read_bytes())
    for offset, size in ((22, 2), (24, 4)):  # no channels, no rate
        broken = bytearray(wav)
        broken[offset : offset + size] = bytes(size)
        path = tmp_path / f"{offset}.wav"
        path.write_bytes(broken)
        with pytest.raises(AudioError, match=str(path)):
            audio.load(path)


def test_a_playlist_cannot_reach_other_files(tmp_path: Path) -> None:
    target = write_av(tmp_path / "secret.ts", "mpegts", "aac", sweep())
    hls = f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{target}\n#EXT-X-ENDLIST\n"
    concat = f"ffconcat version 1.0\nfile '{target.name}'\n"
    for name, content in (("a.m3u8", hls), ("a.m4a", hls), ("b.m4a", concat), ("b.ffconcat", concat)):
        (tmp_path / name).write_text(content)
        with pytest.raises(AudioError):
            audio.load(tmp_path / name)
    with av.open(str(tmp_path / "a.m3u8")) as container:  # the trap is set: FFmpeg alone would follow it
        assert container.streams.audio


@pytest.mark.parametrize(("broken_frame", "loads"), [(0, True), (150, False)])
def test_one_broken_packet(tmp_path: Path, broken_frame: int, loads: bool) -> None:
    """Before the sound begins it does no harm; within it, 21 ms would be missing without a trace."""
    path = write_av(tmp_path / "a.aac", "adts", "aac", sweep())
    whole, content = audio.load(path).samples_CN, bytearray(path.read_bytes())

    def frame_bytes(start: int) -> int:  # 13 bits of the ADTS header
        return (content[start + 3] & 3) << 11 | content[start + 4] << 3 | content[start + 5] >> 5

    start = 0
    for _ in range(broken_frame):
        start += frame_bytes(start)
    stop = start + frame_bytes(start)
    content[start + 9 : stop] = b"\xff" * (stop - start - 9)
    path.write_bytes(content)
    if loads:
        assert audio.load(path).num_samples == whole.shape[1] - 1024
    else:
        with pytest.raises(AudioError, match=r"damaged at about 3\.2 s"):
            audio.load(path)


@pytest.mark.parametrize("name", ["pcm16.wav", "float.wav", "a.flac", "a.ogg", "a.m4a", "a.caf", "a.aiff"])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_headers_load_or_are_audio_errors(
    files: dict[str, Path], tmp_path: Path, name: str, flips: list[tuple[int, int]]
) -> None:
    content = bytearray(files[name].read_bytes())
    for position, value in flips:
        content[position] = value
    path = tmp_path / name
    path.write_bytes(content)
    try:
        waveform = audio.load(path, end_s=0.5)
    except AudioError as error:
        assert error.path == path
    else:
        assert waveform.num_samples > 0
        assert waveform.samples_CN.abs().max() <= 1.0  # false for NaN


# The odd files of shared/data

MUST_LOAD = {  # name -> (rate in Hz, channels, seconds) as the file's own header says
    "test-192khz-32bit.flac": (192000, 2, 6.959),
    "ms_adpcm.wav": (11024, 1, 81.23),
    "mono_float64.wav": (44100, 1, 0.0005),
    "mono_int24.wav": (44100, 1, 0.0005),
    "mono_int32.wav": (44100, 1, 0.0005),
    "stereo_24bit.WAV": (16000, 2, 1.115),
    "test1-8bit.wav": (32000, 2, 10.009),
    "bus.opus": (48000, 1, 0.764),
    "stereo.opus": (8000, 2, 1.005),
    "testing.m4a": (44100, 1, 3.204),
    "format_test.m4a": (44100, 1, 9.66),
    "wrong_extension.aac": (44100, 1, 9.66),
    "tessst.mp3": (44100, 1, 1.567),
    "stereo.mp3": (8000, 2, 1.0),
    "jfk.mp3": (16000, 1, 11.0),
    "stereo.sph": (8000, 2, 1.0),
    "digital_silence.wav": (48000, 1, 0.6245),
}
MUST_BE_REFUSED = {"test1_empty.wav": "no samples", "mono.raw": "convert it first"}


@pytest.fixture(scope="module")
def odd_files() -> dict[str, Path]:
    folder = SHARED_DATA / "odd_formats"
    if not folder.is_dir():
        pytest.skip(f"no odd_formats in {SHARED_DATA} (set AUDIOLLM_SHARED_DATA to shared/data)")
    return {str(path.relative_to(folder)): path for path in audio.find_audio(folder)[0]}


def test_every_odd_file_loads_or_says_why_not(odd_files: dict[str, Path]) -> None:
    refused = {}
    for path in odd_files.values():
        try:
            waveform = audio.load(path)
        except AudioError as error:
            assert error.path == path
            refused[path.name] = error.reason
            continue
        assert waveform.samples_CN.abs().max() <= 1.0  # false for NaN
        assert 0 < waveform.duration_s < 100
        assert 8000 <= waveform.sample_rate <= 192000
        duration_s = audio.probe(path).duration_s
        assert duration_s is not None
        assert waveform.duration_s == pytest.approx(duration_s, abs=0.05), path
    assert refused.keys() <= MUST_BE_REFUSED.keys(), refused
    for name, reason in refused.items():
        assert MUST_BE_REFUSED[name] in reason


@pytest.mark.parametrize("name", MUST_LOAD)
def test_known_odd_files_load(odd_files: dict[str, Path], name: str) -> None:
    paths = [path for path in odd_files.values() if path.name == name]
    if not paths:
        pytest.skip(f"{name} is not in this pack")
    sample_rate, num_channels, duration_s = MUST_LOAD[name]
    for path in paths:
        waveform = audio.load(path)
        assert (waveform.sample_rate, waveform.num_channels) == (sample_rate, num_channels)
        assert waveform.duration_s == pytest.approx(duration_s, abs=0.01, rel=0.01)


def test_the_same_speech_in_two_containers_is_in_the_same_place(odd_files: dict[str, Path]) -> None:
    paths = {path.name: path for path in odd_files.values()}
    pairs = [("jfk.wav", "jfk.mp3"), ("format_test.m4a", "wrong_extension.aac")]
    found = [pair for pair in pairs if set(pair) <= paths.keys()]
    if not found:
        pytest.skip("none of the pairs is in this pack")
    for one, other in found:
        a, b = (audio.load(paths[name]).samples_CN for name in (one, other))
        assert a.shape == b.shape
        error = audio.rms_dbfs(a - b) - audio.rms_dbfs(a)
        assert error < -15  # a shift by two samples would leave more
