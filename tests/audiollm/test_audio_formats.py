"""audiollm.audio on files: every format, time spans, damage, and the odd files of shared/data.

Oracles: the signal that was written, soundfile, and the rule that a span equals the slice of the whole.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from audiollm import audio, audio_decoding
from audiollm.audio import AudioError

SAMPLE_RATE = 48000
DURATION_S = 8.0
SHARED_DATA = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data"
)


def sweep(num_channels: int = 1, sample_rate: int = SAMPLE_RATE, duration_s: float = DURATION_S) -> Tensor:
    """A tone that rises from 200 Hz to 3 kHz: no two places look alike. [C, N]."""
    time_s = np.arange(round(duration_s * sample_rate)) / sample_rate
    phase = 2 * np.pi * (200 * time_s + 0.5 * 2800 / duration_s * time_s**2)
    channels = [0.4 * np.sin(phase + channel) for channel in range(num_channels)]
    return torch.from_numpy(np.stack(channels).astype(np.float32))


def write_av(path: Path, container: str, codec: str, samples: Tensor, **options: str) -> Path:
    """Write with FFmpeg what libsndfile cannot: M4A, ADTS, WebM."""
    layout = {1: "mono", 2: "stereo"}[samples.shape[0]]
    with av.open(str(path), "w", format=container, options=options) as output:
        stream = output.add_stream(codec, rate=SAMPLE_RATE, layout=layout)
        stream.bit_rate = 128_000
        for start in range(0, samples.shape[1], SAMPLE_RATE):
            block = np.ascontiguousarray(samples[:, start : start + SAMPLE_RATE].numpy())
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=layout)
            frame.rate, frame.pts = SAMPLE_RATE, start
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


def write_soundfile(path: Path, samples: Tensor, kind: str, subtype: str) -> Path:
    with soundfile.SoundFile(
        path, "w", SAMPLE_RATE, samples.shape[0], subtype=subtype, format=kind
    ) as handle:
        for block in samples.T.contiguous().split(1 << 16):
            handle.write(block.numpy())
    return path


# name -> (writer, RMS error re the written signal, largest error of a span re the slice of the whole)
FORMATS: dict[str, tuple[Callable[[Path, Tensor], Path], float, float]] = {
    "pcm16.wav": (lambda p, x: write_soundfile(p, x, "WAV", "PCM_16"), 3e-5, 0.0),
    "float.wav": (lambda p, x: write_soundfile(p, x, "WAV", "FLOAT"), 0.0, 0.0),
    "adpcm.wav": (lambda p, x: write_soundfile(p, x, "WAV", "MS_ADPCM"), 0.02, 0.0),
    "gsm.wav": (lambda p, x: write_soundfile(p, x[:1], "WAV", "GSM610"), 0.02, 0.02),
    "a.flac": (lambda p, x: write_soundfile(p, x, "FLAC", "PCM_24"), 1e-7, 0.0),
    "a.ogg": (lambda p, x: write_soundfile(p, x, "OGG", "VORBIS"), 0.02, 0.0),
    "a.opus": (lambda p, x: write_soundfile(p, x, "OGG", "OPUS"), 0.02, 0.01),
    "a.aiff": (lambda p, x: write_soundfile(p, x, "AIFF", "PCM_16"), 3e-5, 0.0),
    "a.au": (lambda p, x: write_soundfile(p, x, "AU", "PCM_16"), 3e-5, 0.0),
    "a.caf": (lambda p, x: write_soundfile(p, x, "CAF", "PCM_16"), 3e-5, 0.0),
    "a.w64": (lambda p, x: write_soundfile(p, x, "W64", "PCM_16"), 3e-5, 0.0),
    "a.sph": (lambda p, x: write_soundfile(p, x, "NIST", "PCM_16"), 3e-5, 0.0),
    "a.mp3": (lambda p, x: write_av(p, "mp3", "libmp3lame", x), 0.02, 1e-4),
    "lame.mp3": (lambda p, x: write_soundfile(p, x, "MP3", "MPEG_LAYER_III"), 0.02, 1e-4),
    "a.m4a": (lambda p, x: write_av(p, "ipod", "aac", x), 0.02, 1e-3),
    "a.mp4": (lambda p, x: write_av(p, "mp4", "aac", x), 0.02, 1e-3),
    "alac.m4a": (lambda p, x: write_av(p, "ipod", "alac", x), 1e-6, 0.0),
    "8-bit.wv": (lambda p, x: write_av(p, "wv", "wavpack", x), 0.005, 0.0),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("formats")
    return {name: write(folder / name, sweep(2)) for name, (write, _, _) in FORMATS.items()}


# Formats


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_signal_that_was_written(files: dict[str, Path], name: str) -> None:
    loaded = audio.load(files[name])
    expected = sweep(2)[: loaded.num_channels]
    assert loaded.sample_rate == SAMPLE_RATE
    assert loaded.num_channels == (1 if name == "gsm.wav" else 2)
    assert loaded.samples_CN.dtype == torch.float32
    assert loaded.samples_CN.is_contiguous()
    # codecs of fixed blocks may pad the end, never the beginning
    assert 0 <= loaded.num_samples - expected.shape[1] < 4096
    inner = slice(4800, expected.shape[1] - 4800)
    error = (loaded.samples_CN[:, inner] - expected[:, inner]).square().mean().sqrt()
    assert error <= FORMATS[name][1]
    shift = (expected[:, inner] - expected[:, 4801 : expected.shape[1] - 4799]).square().mean().sqrt()
    assert shift > 2 * FORMATS[name][1]  # the bound would not let a shift by one sample through


@pytest.mark.parametrize("name", FORMATS)
def test_probe_agrees_with_load(files: dict[str, Path], name: str) -> None:
    info, loaded = audio.probe(files[name]), audio.load(files[name])
    assert (info.sample_rate, info.num_channels) == (loaded.sample_rate, loaded.num_channels)
    assert info.num_samples in (None, loaded.num_samples)
    assert info.duration_s == pytest.approx(loaded.duration_s, abs=0.1)
    assert info.format
    assert info.codec


def test_streams_without_a_length_load_whole(tmp_path: Path) -> None:
    """ADTS and WebM: no header says how long they are. ADTS keeps the encoder's delay, 1024 samples."""
    samples = sweep()
    adts = audio.load(write_av(tmp_path / "a.aac", "adts", "aac", samples)).samples_CN[:, 1024:]
    webm = audio.load(write_av(tmp_path / "a.webm", "webm", "libopus", samples)).samples_CN
    inner = slice(4800, samples.shape[1] - 4800)
    for loaded in (adts, webm):
        assert abs(loaded.shape[1] - samples.shape[1]) < 2048
        assert (loaded[:, inner] - samples[:, inner]).square().mean().sqrt() < 0.02


def test_variable_bit_rate_mp3_without_a_length_is_not_cut_short(tmp_path: Path) -> None:
    """libsndfile estimates the length from the first frames: here it would stop at about half."""
    parts = []
    for bit_rate in (256_000, 32_000):
        path = tmp_path / f"{bit_rate}.mp3"
        with av.open(str(path), "w", options={"write_xing": "0", "id3v2_version": "0"}) as output:
            stream = output.add_stream("libmp3lame", rate=SAMPLE_RATE, layout="mono")
            stream.bit_rate = bit_rate
            frame = av.AudioFrame.from_ndarray(sweep().numpy(), format="fltp", layout="mono")
            frame.rate, frame.pts = SAMPLE_RATE, 0
            output.mux(stream.encode(frame))
            output.mux(stream.encode(None))
        parts.append(path.read_bytes())
    path = tmp_path / "vbr.mp3"
    path.write_bytes(b"".join(parts))
    assert soundfile.info(path).frames < 0.7 * 2 * DURATION_S * SAMPLE_RATE  # the trap is set
    assert audio.load(path).duration_s == pytest.approx(2 * DURATION_S, abs=0.1)
    late = audio.load(path, start_s=14.0, end_s=15.0).samples_CN
    assert torch.allclose(
        late, audio.load(path).samples_CN[:, 14 * SAMPLE_RATE : 15 * SAMPLE_RATE], atol=1e-4
    )


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_eight_channels(tmp_path: Path, kind: str) -> None:
    path = write_soundfile(tmp_path / "a", sweep(8), kind, "PCM_16")
    loaded = audio.load(path, end_s=1.0)
    assert torch.allclose(loaded.samples_CN, sweep(8)[:, :SAMPLE_RATE], atol=1e-4)
    assert torch.allclose(
        audio.load(path, end_s=1.0, mono=True).samples_CN[0], loaded.samples_CN.mean(0), atol=1e-6
    )


@pytest.mark.parametrize(
    ("source", "disguise"),
    [
        ("pcm16.wav", "a.aac"),
        ("pcm16.wav", "a.mp3"),
        ("pcm16.wav", "a.raw"),
        ("pcm16.wav", "a"),
        ("a.mp3", "a.wav"),
        ("a.m4a", "a.aac"),
        ("a.m4a", "a.flac"),
        ("a.ogg", "a.wav"),
        ("a.flac", "a.m4a"),
    ],
)
def test_the_content_decides_not_the_extension(
    files: dict[str, Path], tmp_path: Path, source: str, disguise: str
) -> None:
    path = tmp_path / disguise
    path.write_bytes(files[source].read_bytes())
    assert torch.equal(audio.load(path).samples_CN, audio.load(files[source]).samples_CN)


def test_rate_and_mono_are_applied(files: dict[str, Path]) -> None:
    whole = audio.load(files["a.flac"])
    loaded = audio.load(str(files["a.flac"]), sample_rate=16000, mono=True)
    expected = audio.resample(whole.samples_CN.mean(0, keepdim=True), SAMPLE_RATE, 16000)
    assert loaded.sample_rate == 16000
    assert torch.allclose(loaded.samples_CN, expected.clamp(-1, 1), atol=1e-6)


def test_overs_are_clipped(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.array([0.5, 1.75, -2.0]), 16000, subtype="FLOAT")
    assert audio.load(tmp_path / "a.wav").samples_CN.tolist() == [[0.5, 1.0, -1.0]]


# Time spans


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start_s=st.floats(0, DURATION_S - 0.01), length_s=st.floats(0.001, 2.0))
def test_a_span_is_the_slice_of_the_whole(
    files: dict[str, Path], name: str, start_s: float, length_s: float
) -> None:
    whole = audio.load(files[name]).samples_CN
    part = audio.load(files[name], start_s=start_s, end_s=start_s + length_s).samples_CN
    start, stop = round(start_s * SAMPLE_RATE), round((start_s + length_s) * SAMPLE_RATE)
    expected = whole[:, start:stop]
    assert part.shape == expected.shape
    assert (part - expected).abs().max() <= FORMATS[name][2]


@pytest.mark.parametrize("seconds_before_the_end", [0.02, 0.3, 0.9, 3.0])
def test_a_span_in_the_last_page_of_a_vorbis_file(tmp_path: Path, seconds_before_the_end: float) -> None:
    """libsndfile's own seek lands elsewhere there; a faint signal makes the page long."""
    samples = 0.01 * sweep(duration_s=30.0)
    whole = audio.load(write_soundfile(tmp_path / "a.ogg", samples, "OGG", "VORBIS")).samples_CN
    assert whole.shape == samples.shape
    start = round((30.0 - seconds_before_the_end) * SAMPLE_RATE)
    part = audio.load(tmp_path / "a.ogg", start_s=start / SAMPLE_RATE).samples_CN
    assert torch.equal(part, whole[:, start:])


def test_a_span_of_webm_is_in_place_to_a_millisecond(tmp_path: Path) -> None:
    path = write_av(tmp_path / "a.webm", "webm", "libopus", sweep())
    whole = audio.load(path).samples_CN
    for start_s in (0.3, 2.5, 5.123):
        part = audio.load(path, start_s=start_s, end_s=start_s + 0.5).samples_CN
        start = round(start_s * SAMPLE_RATE)
        errors = [
            float((part - whole[:, start + lag : start + lag + part.shape[1]]).abs().max())
            for lag in range(-48, 49)
        ]
        assert min(errors) < 0.02


def test_an_open_or_long_span_ends_with_the_file(files: dict[str, Path]) -> None:
    whole = audio.load(files["a.flac"]).samples_CN
    for end_s in (None, DURATION_S, 1e6, 1e300):
        assert torch.equal(
            audio.load(files["a.flac"], start_s=7.0, end_s=end_s).samples_CN, whole[:, 336000:]
        )


@pytest.mark.parametrize("name", ["pcm16.wav", "a.flac", "a.ogg", "a.mp3", "a.m4a"])
@pytest.mark.parametrize(
    ("start_s", "end_s", "reason"),
    [
        (-0.1, 1.0, "start_s"),
        (float("nan"), 1.0, "start_s"),
        (float("inf"), None, "start_s"),
        (1.0, 1.0, "end_s"),
        (1.0, 0.5, "end_s"),
        (1.0, float("nan"), "end_s"),
        (1.0, float("inf"), "end_s"),
        (1.0, 1.000001, "no sample"),
        (9.0, None, "beyond the end at 8"),
        (9.0, 10.0, "beyond the end at 8"),
        (1e9, None, "beyond the end"),
        (1e305, None, ""),
    ],
)
def test_bad_spans_are_audio_errors(
    files: dict[str, Path], name: str, start_s: float, end_s: float | None, reason: str
) -> None:
    with pytest.raises(AudioError) as caught:
        audio.load(files[name], start_s=start_s, end_s=end_s)
    assert caught.value.path == files[name]
    assert reason in caught.value.reason


@pytest.mark.parametrize("sample_rate", [0, -1, 16000.5])
def test_a_bad_target_rate_is_an_audio_error(files: dict[str, Path], sample_rate: Any) -> None:
    with pytest.raises(AudioError, match="sample_rate"):
        audio.load(files["a.flac"], sample_rate=sample_rate)


@pytest.mark.parametrize("name", ["pcm16.wav", "a.flac", "a.opus"])
def test_libsndfile_decodes_only_the_span(
    files: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    read = soundfile.SoundFile.read

    def counting_read(self: soundfile.SoundFile, *args: Any, **kwargs: Any) -> Any:
        block = read(self, *args, **kwargs)
        decoded.append(len(block))
        return block

    monkeypatch.setattr(soundfile.SoundFile, "read", counting_read)
    audio.load(files[name], start_s=6.0, end_s=6.5)
    assert sum(decoded) == SAMPLE_RATE // 2
    audio.load(files[name])
    assert sum(decoded) == SAMPLE_RATE // 2 + round(DURATION_S * SAMPLE_RATE)


def test_ffmpeg_reads_and_decodes_only_around_the_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_av(tmp_path / "long.m4a", "ipod", "aac", sweep(duration_s=120.0))
    bytes_read, frames_decoded = [], []
    frame_samples = audio_decoding.frame_samples

    class CountingFile(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size) or b""
            bytes_read.append(len(data))
            return data

    monkeypatch.setattr(
        audio_decoding, "open", lambda name, mode, **_: CountingFile(name, mode), raising=False
    )
    monkeypatch.setattr(
        audio_decoding, "frame_samples", lambda frame: frames_decoded.append(1) or frame_samples(frame)
    )
    assert audio.load(path, start_s=80.0, end_s=81.0).num_samples == SAMPLE_RATE
    assert 0 < sum(bytes_read) < 0.1 * path.stat().st_size
    assert len(frames_decoded) <= 1 + SAMPLE_RATE // 1024 + 1


def test_a_span_of_a_huge_file_is_read_at_once(tmp_path: Path) -> None:
    """A sparse 3 GB recording (26 hours at 16 kHz), silent but for one second."""
    path, start = tmp_path / "huge.wav", 20 * 3600 * 16000
    size = 26 * 3600 * 16000 * 2
    fields = (b"fmt ", 16, 1, 1, 16000, 32000, 2, 16, b"data", size)
    header = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + size, b"WAVE", *fields)
    marks = np.arange(16000, dtype="<i2")
    with open(path, "wb") as file:
        file.write(header)
        file.seek(len(header) + 2 * start)
        file.write(marks.tobytes())
        file.truncate(len(header) + size)
    assert audio.probe(path).duration_s == 26 * 3600
    part = audio.load(path, start_s=20 * 3600, end_s=20 * 3600 + 1)
    assert torch.equal(part.samples_CN[0], torch.from_numpy(marks.astype(np.float32)) / 2**15)


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
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
