"""audiollm.audio on whole files: every format, and time spans.

Oracles: the signal that was written, soundfile, and the rule that a span equals the slice of the whole.
"""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from audiollm.audio import AudioError
from audiollm.audio import decoders as audio_decoders
from audiollm.audio import decoding as audio_decoding
from audiollm.audio import files as audio
from tests.audiollm.audio.audio_files import (
    DURATION_S,
    FORMATS,
    SAMPLE_RATE,
    sweep,
    write_av,
    write_formats,
    write_soundfile,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_formats(tmp_path_factory.mktemp("formats"))


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
    mono = audio.load(path, end_s=1.0, mono=True)
    assert torch.equal(mono.samples_CN, audio.to_mono(loaded.samples_CN))


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
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.parametrize("samples_in_the_last_packet", [1, 44, 140])
def test_a_block_does_not_end_in_the_last_packet_of_an_opus_file(
    files: dict[str, Path], samples_in_the_last_packet: int
) -> None:
    """libsndfile gives other samples where a read begins there."""
    whole = audio.load(files["a.opus"]).samples_CN
    length = audio_decoders.BLOCK_FRAMES // len(whole) + samples_in_the_last_packet
    part = audio.load(files["a.opus"], start_s=(whole.shape[1] - length) / SAMPLE_RATE).samples_CN
    assert part.shape[1] == length
    assert (part - whole[:, -length:]).abs().max() <= FORMATS["a.opus"][2]


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


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoders run where a test can watch them."""
    decoders = {"soundfile": audio_decoders.soundfile_blocks, "av": audio_decoders.av_blocks}
    monkeypatch.setattr(
        audio_decoding, "contained_blocks", lambda decoder, request: decoders[decoder](request)
    )


@pytest.mark.usefixtures("in_this_process")
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


@pytest.mark.usefixtures("in_this_process")
def test_ffmpeg_reads_and_decodes_only_around_the_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_av(tmp_path / "long.m4a", "ipod", "aac", sweep(duration_s=120.0))
    bytes_read, frames_decoded = [], []
    frame_samples = audio_decoders.frame_samples

    class CountingFile(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size) or b""
            bytes_read.append(len(data))
            return data

    monkeypatch.setattr(
        audio_decoders, "open", lambda name, mode, **_: CountingFile(name, mode), raising=False
    )
    monkeypatch.setattr(
        audio_decoders, "frame_samples", lambda frame: frames_decoded.append(1) or frame_samples(frame)
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
