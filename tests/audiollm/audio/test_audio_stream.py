"""Files piece by piece: the same samples as the whole file at once, whatever the format, rate and channels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from audiollm.audio import AudioError, load, save
from audiollm.audio import streams as audio_stream
from audiollm.audio.streams import save_stream, stream_mono


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks of an odd length even of short files."""
    monkeypatch.setattr(audio_stream, "BLOCK_FRAMES", 1237)


def noise(seconds: float, rate: int, channels: int) -> np.ndarray:
    random = np.random.default_rng(0)
    return (0.4 * random.standard_normal((round(seconds * rate), channels))).astype(np.float32)


def write(path: Path, rate: int, channels: int, seconds: float = 1.234) -> Path:
    save(path, torch.from_numpy(noise(seconds, rate, channels).T.copy()), rate)
    return path


@pytest.mark.parametrize("rate", [8000, 22_050, 24_000, 44_100, 192_000])
@pytest.mark.parametrize("channels", [1, 2])
def test_equals_the_whole_file(tmp_path: Path, rate: int, channels: int) -> None:
    path = write(tmp_path / "clip.wav", rate, channels)
    pieces = list(stream_mono(path, 24_000))
    whole_1N = load(path, sample_rate=24_000, mono=True).samples_CN
    assert len(pieces) > 3
    streamed_1N = torch.cat(pieces, dim=1)
    assert streamed_1N.shape == whole_1N.shape
    assert float((streamed_1N - whole_1N).abs().max()) <= 1e-6


@pytest.mark.parametrize("name", ["clip.flac", "clip.ogg", "clip.mp3"])  # the last is left to FFmpeg
def test_other_formats(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, 44_100, 2)
    streamed_1N = torch.cat(list(stream_mono(path, 24_000)), dim=1)
    whole_1N = load(path, sample_rate=24_000, mono=True).samples_CN
    assert streamed_1N.shape == whole_1N.shape
    assert float((streamed_1N - whole_1N).abs().max()) <= 1e-6


@pytest.mark.parametrize("name", ["clip.flac", "clip.mp3"])
@pytest.mark.parametrize("span", [(0.31, None), (0.2, 0.9), (0.5, 99.0)])
def test_spans(
    tmp_path: Path, name: str, span: tuple[float, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audio_stream, "WHOLE_SPAN_S", 0.0)  # short spans by the way of long ones
    path = write(tmp_path / name, 16_000, 1)
    streamed_1N = torch.cat(list(stream_mono(path, 24_000, *span)), dim=1)
    whole_1N = load(path, *span, sample_rate=24_000, mono=True).samples_CN
    assert streamed_1N.shape == whole_1N.shape
    assert float((streamed_1N - whole_1N).abs().max()) <= 1e-6


def test_a_span_beyond_the_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AudioError, match="beyond the end"):
        list(stream_mono(write(tmp_path / "clip.wav", 8000, 1), 8000, start_s=5.0))


def test_ffmpeg_goes_on_where_libsndfile_fails(tmp_path: Path) -> None:
    path = write(tmp_path / "cut.flac", 16_000, 1, seconds=3.0)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    streamed_1N = torch.cat(list(stream_mono(path, 16_000)), dim=1)
    whole_1N = load(path, sample_rate=16_000, mono=True).samples_CN
    assert torch.equal(streamed_1N, whole_1N)


def test_bad_files_are_named(tmp_path: Path) -> None:
    samples_NC = noise(0.5, 16_000, 1)
    samples_NC[7000] = np.nan
    soundfile.write(tmp_path / "nan.wav", samples_NC, 16_000, "FLOAT")
    (tmp_path / "empty.wav").touch()
    (tmp_path / "text.wav").write_text("not sound at all")
    soundfile.write(tmp_path / "header.wav", samples_NC[:0], 16_000)
    for name, reason in (
        ("nan.wav", "NaN"),
        ("empty.wav", "empty"),
        ("text.wav", "cannot be read"),
        ("header.wav", "no samples"),
        ("none.wav", "not exist"),
    ):
        with pytest.raises(AudioError, match=reason) as caught:
            list(stream_mono(tmp_path / name, 24_000))
        assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("name", ["out.wav", "out.flac"])
def test_saving_pieces_gives_the_file_of_saving_all(tmp_path: Path, name: str) -> None:
    samples_1N = torch.from_numpy(noise(0.4, 24_000, 1).T.copy()) * 2.5  # clips
    assert save_stream(tmp_path / name, samples_1N.split(777, dim=1), 24_000) == samples_1N.shape[1]
    save(tmp_path / f"whole_{name}", samples_1N, 24_000)
    ours, theirs = load(tmp_path / name), load(tmp_path / f"whole_{name}")
    assert ours.sample_rate == theirs.sample_rate and torch.equal(ours.samples_CN, theirs.samples_CN)


def test_a_file_that_was_cut_short_is_not_there(tmp_path: Path) -> None:
    def pieces():
        yield torch.zeros(1, 500)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_stream(tmp_path / "out.flac", pieces(), 24_000)
    with pytest.raises(AudioError, match="no samples"):
        save_stream(tmp_path / "out.wav", [], 24_000)
    with pytest.raises(AudioError, match="flac"):
        save_stream(tmp_path / "out.mp3", [torch.zeros(1, 5)], 24_000)
    assert list(tmp_path.iterdir()) == []
