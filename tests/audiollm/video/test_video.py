"""Videos: frames at given times, damage, rotation, variable rates, regions; writing and replacing sound."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray

from audiollm.audio import decoding_process
from audiollm.audio.files import load, save
from audiollm.audio.samples import Waveform
from audiollm.video.frames import VideoError, frame_times, pictures_end_s, probe_video, read_frames
from audiollm.video.writing import lost_by_replacing, replace_sound, write_video
from tests.audiollm.audio.crashing_decoder import CRASHES, install
from tests.audiollm.video.films import film_of_everything, packets_of

RATE = 10.0
TONE = Waveform(0.3 * torch.sin(torch.arange(24_000) * 0.05)[None], 8_000)


def pictures(count: int = 30, height: int = 48, width: int = 64) -> list[NDArray[np.uint8]]:
    """Frame n has the grey value 8 n, and a white corner at the upper left."""
    frames = [np.full((height, width, 3), 8 * n, np.uint8) for n in range(count)]
    for frame in frames:
        frame[: height // 3, : width // 3] = 255
    return frames


def number(frame_HWC: NDArray[np.uint8]) -> int:
    return round(float(frame_HWC[-8:, -8:].mean()) / 8)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("video") / "a.mp4"
    write_video(path, pictures(), RATE, TONE)
    return path


def test_frames_are_those_that_are_shown_at_the_times(clip: Path) -> None:
    info = probe_video(clip)
    assert (info.width, info.height, info.has_audio, info.rotation) == (64, 48, True, 0)
    assert info.frame_rate == pytest.approx(RATE) and info.duration_s == pytest.approx(3.0, abs=0.1)
    times = [0.0, 0.05, 0.1, 0.99, 1.0, 1.72, 2.9, 2.99]
    assert [number(frame) for frame in read_frames(clip, times)] == [0, 0, 1, 9, 10, 17, 29, 29]
    assert [number(frame) for frame in read_frames(clip, [2.35])] == [23], "after a seek"
    heard = load(clip)
    assert heard.samples_CN.shape[1] == pytest.approx(24_000, abs=2_100)


def test_steady_times_lie_in_the_middle_of_their_shares() -> None:
    assert frame_times(1.0, 2.0, 4) == [1.125, 1.375, 1.625, 1.875]
    assert len(frame_times(0.0, 9.0, 8)) == 72 and len(frame_times(0.0, 9.9, 8)) == 79
    with pytest.raises(ValueError, match="no frames"):
        frame_times(1.0, 1.0, 8)


def test_a_variable_rate_is_followed(tmp_path: Path) -> None:
    path, begins = tmp_path / "v.mkv", [0, 100, 150, 1000, 1010, 2500]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=1000, options={"bf": "0"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for begin_ms, picture in zip(begins, pictures(6), strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = begin_ms, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert [number(f) for f in read_frames(path, [0.05, 0.12, 0.9, 1.005, 2.4, 2.6])] == [0, 1, 2, 3, 4, 5]


def test_a_last_picture_is_shown_for_as_long_as_its_file_says(tmp_path: Path) -> None:
    write_video(tmp_path / "still.mp4", pictures(1), 0.25, TONE)
    assert [number(frame) for frame in read_frames(tmp_path / "still.mp4", [0.0, 1.0, 3.9])] == [0, 0, 0]
    assert pictures_end_s(tmp_path / "still.mp4") == pytest.approx(4.0, abs=0.01)
    write_video(tmp_path / "short.mp4", pictures(10), RATE, TONE)
    assert pictures_end_s(tmp_path / "short.mp4") == pytest.approx(1.0, abs=0.01), "and the sound at 3 s"
    with pytest.raises(VideoError, match="ends at"):
        list(read_frames(tmp_path / "short.mp4", [2.5]))


def test_a_list_that_is_called_a_video_reaches_no_other_file(clip: Path, tmp_path: Path) -> None:
    path = tmp_path / "list.mp4"
    path.write_text(f"ffconcat version 1.0\nfile {clip.name}\n")
    (tmp_path / clip.name).write_bytes(clip.read_bytes())
    for read in (probe_video, pictures_end_s, lambda path: list(read_frames(path, [0.0]))):
        with pytest.raises(VideoError, match="cannot be opened"):
            read(path)
    with pytest.raises(VideoError, match="cannot be written"):
        replace_sound(path, TONE, tmp_path / "new.mkv")


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_pictures_are_rotated_as_marked(clip: Path, tmp_path: Path, turns: int) -> None:
    """The matrix of the track header is written by hand: clockwise by 90 degrees times `turns`."""
    content = bytearray(clip.read_bytes())
    place = content.index(b"tkhd") + 4 + 40
    assert struct.unpack(">3i", content[place : place + 12]) == (1 << 16, 0, 0)
    a, b, c, d = [(1, 0, 0, 1), (0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0)][turns]
    content[place : place + 36] = struct.pack(">9i", *(v << 16 for v in (a, b, 0, c, d, 0, 0, 0)), 1 << 30)
    path = tmp_path / "r.mp4"
    path.write_bytes(bytes(content))
    info = probe_video(path)
    (shown,) = read_frames(path, [0.5])
    assert (info.height, info.width) == shown.shape[:2] == ((48, 64) if turns % 2 == 0 else (64, 48))
    corners = [shown[2, 2], shown[2, -3], shown[-3, -3], shown[-3, 2]]  # clockwise from the upper left
    assert int(np.argmax([corner.mean() for corner in corners])) == turns


def test_a_region_is_cut_and_padded_to_a_square(clip: Path) -> None:
    boxes = [(0.0, 0.0, 0.0, 20.0, 10.0), (2.0, 44.0, 38.0, 20.0, 10.0)]
    first, last = read_frames(clip, [0.0, 2.0], boxes=boxes)
    assert first.shape == last.shape == (10, 20, 3) and first.min() > 200 and abs(last.mean() - 160) < 8
    (square,) = read_frames(clip, [2.0], size=32, boxes=boxes)
    assert square.shape == (32, 32, 3) and square[:6].max() < 30 and abs(square[12:20].mean() - 160) < 8
    with pytest.raises(VideoError, match="outside of the picture of 64 x 48"):
        list(read_frames(clip, [0.0], boxes=[(0.0, 70.0, 0.0, 5.0, 5.0)]))


@pytest.mark.parametrize("kind", ["missing", "text", "cut", "noise", "sound", "late"])
def test_what_cannot_be_read_is_named(clip: Path, tmp_path: Path, kind: str) -> None:
    path, times = tmp_path / "x.mp4", [0.0, 2.5]
    content = bytearray(clip.read_bytes())
    if kind == "text":
        path.write_text("no video")
    elif kind == "cut":
        path.write_bytes(content[: len(content) // 3])
    elif kind == "noise":
        start = content.index(b"mdat") + 40
        end = start + (len(content) - start) // 2
        content[start:end] = np.random.default_rng(0).bytes(end - start)
        path.write_bytes(content)
    elif kind == "sound":
        path = tmp_path / "x.wav"
        save(path, TONE.samples_CN, TONE.sample_rate)
    elif kind == "late":
        path, times = clip, [0.0, 7.0]
    with pytest.raises(VideoError) as told:
        list(read_frames(path, times))
    assert str(path) in str(told.value) and len(told.value.reason) > 10


def test_sound_is_replaced_and_pictures_are_copied(clip: Path, tmp_path: Path) -> None:
    path = tmp_path / "new.mkv"
    other = Waveform(0.2 * torch.randn(2, 16_000, generator=torch.Generator().manual_seed(0)), 16_000)
    replace_sound(clip, other, path)
    times = frame_times(0.0, 3.0, 4)
    for old, new in zip(read_frames(clip, times), read_frames(path, times), strict=True):
        assert np.array_equal(old, new), "decoded from the same packets"
    heard = load(path)
    assert heard.sample_rate == 16_000 and heard.samples_CN.shape == (2, 16_000)
    assert (heard.samples_CN - other.samples_CN).abs().max() < 2**-23, "FLAC of 24 bits"
    long = Waveform(0.5 * torch.rand(1, 600_000, generator=torch.Generator().manual_seed(1)), 48_000)
    replace_sound(clip, long, path)
    heard = load(path)
    assert (heard.samples_CN - long.samples_CN).abs().max() < 2**-23, "in blocks"
    with pytest.raises(VideoError, match=r"ends with .mp4"):
        replace_sound(clip, other, tmp_path / "new.avi")


def tags(path: Path) -> dict[str, str]:
    with av.open(str(path)) as container:
        return {key.lower(): text for key, text in container.metadata.items()}


@pytest.mark.parametrize(
    ("source", "ending", "lost"),
    [
        (".mkv", ".mkv", []),
        (".mkv", ".mp4", ["the attached file (font.ttf)"]),
        (".mkv", ".mov", ["sound (flac, deu)", "the attached file (font.ttf)"]),
        (".mp4", ".mkv", []),
        (".mp4", ".mp4", []),
        (".mp4", ".mov", []),
        (".mov", ".mkv", []),
        (".mov", ".mov", []),
    ],
)
def test_what_a_film_holds_beside_its_sound_is_kept_or_named(
    tmp_path: Path, source: str, ending: str, lost: list[str]
) -> None:
    film, new = tmp_path / f"a{source}", tmp_path / f"b{ending}"
    film_of_everything(film)
    assert lost_by_replacing(film, new, TONE.sample_rate, TONE.num_channels) == lost
    replace_sound(film, TONE, new)
    kept = ("title", "artist", "comment", "date", "genre", "copyright", "location", "creation_time")
    assert {key: tags(new).get(key) for key in kept} == {key: tags(film)[key] for key in kept}
    with av.open(str(new)) as container:
        chapters = [
            (float(part["start"] * part["time_base"]), part["metadata"]["title"])
            for part in container.chapters()
        ]
        assert chapters == [(0.0, "One"), (1.5, "Two")]
        sounds = container.streams.audio
        assert sounds[0].language == "eng" and sounds[0].sample_rate == TONE.sample_rate
        if "sound (flac, deu)" not in lost:
            assert sounds[1].language in ("deu", "ger")
            title = sounds[1].metadata.get("title") or sounds[1].metadata.get("name")
            assert title == "Kommentar"
            assert packets_of(new, "audio", 1) == packets_of(film, "audio", 1), "copied, not encoded anew"
        (texts,) = (stream for stream in container.streams if stream.type == "subtitle")
        assert texts.language == "fra"
    assert [text for text in packets_of(new, "subtitle", 0) if b"Hello" in text or b"dog" in text] != []
    heard = load(new)
    assert abs(heard.num_samples - TONE.num_samples) <= 2048


def test_sound_and_pictures_stand_side_by_side_in_a_file(clip: Path, tmp_path: Path) -> None:
    """A player does not have to read all pictures before the first sound."""
    long = Waveform(torch.zeros(1, 40 * 48_000), 48_000)
    write_video(tmp_path / "long.mp4", pictures(30) * 13, RATE, TONE)
    replace_sound(tmp_path / "long.mp4", long, tmp_path / "new.mkv")
    with av.open(str(tmp_path / "new.mkv")) as container:
        times = [
            (packet.stream.type, float(packet.pts * packet.time_base))
            for packet in container.demux()
            if packet.size
        ]
    latest = {"video": 0.0, "audio": 0.0}
    for kind, time_s in times:
        latest[kind] = max(latest[kind], time_s)
        if max(latest.values()) < 38:
            assert abs(latest["video"] - latest["audio"]) < 11


def test_samples_above_full_scale_are_not_clipped(clip: Path, tmp_path: Path) -> None:
    loud = Waveform(TONE.samples_CN * 5, TONE.sample_rate)
    for ending in (".mkv", ".mov"):
        replace_sound(clip, loud, tmp_path / f"new{ending}")
        with av.open(str(tmp_path / f"new{ending}")) as container:
            frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
        samples_N = np.concatenate(frames, axis=1).reshape(-1)[: loud.num_samples]
        assert np.array_equal(samples_N, loud.samples_CN[0].numpy()), ending


@pytest.mark.parametrize(("pictures_s", "sound_s"), [(2.0, 2.0), (0.7, 0.0), (0.0, 0.7)])
def test_sound_and_pictures_share_their_beginning(tmp_path: Path, pictures_s: float, sound_s: float) -> None:
    """A part copied out of a longer file does not begin at 0 s, and one of the two may begin later."""
    path, other = tmp_path / "later.mkv", Waveform(torch.full((1, 24_000), 0.25), 8_000)
    with av.open(str(path), "w") as container:
        shown = container.add_stream("libx264", rate=1000, options={"bf": "0"})
        shown.width, shown.height, shown.pix_fmt = 64, 48, "yuv420p"
        heard = container.add_stream("pcm_s16le", rate=8_000)
        heard.layout = "mono"
        for count, picture in enumerate(pictures()):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = round(1000 * pictures_s) + 100 * count, Fraction(1, 1000)
            container.mux(shown.encode(frame))
        samples = av.AudioFrame.from_ndarray(
            np.full((1, 24_000), 8192, np.int16), format="s16", layout="mono"
        )
        samples.sample_rate, samples.time_base, samples.pts = (
            8_000,
            Fraction(1, 8_000),
            round(8_000 * sound_s),
        )
        for each in (shown.encode(None), heard.encode(samples), heard.encode(None)):
            container.mux(each)
    begins_s = min(pictures_s, sound_s)
    for start_s, end_s in ((0.0, None), (0.0, 0.5), (0.5, 1.0), (1.2, 2.0)):
        sound_N = load(path, start_s, end_s).samples_CN[0]
        expected_N = torch.zeros(round(8_000 * (sound_s - begins_s + 3.0)))
        expected_N[round(8_000 * (sound_s - begins_s)) :] = 0.25
        last = None if end_s is None else round(8_000 * end_s)
        torch.testing.assert_close(sound_N, expected_N[round(8_000 * start_s) : last])
    times = [0.05, 0.95, 1.95]
    asked = [number(frame) for frame in read_frames(path, times)]
    assert asked == [max(0, round((time - 0.05 + begins_s - pictures_s) * 10)) for time in times]
    for ending in (".mkv", ".mp4", ".mov"):
        new = tmp_path / f"new{ending}"
        replace_sound(path, other, new)
        assert [number(frame) for frame in read_frames(new, times)] == asked
        assert load(new).samples_CN[0, 2_000] == pytest.approx(0.25, abs=0.02)


def test_a_film_that_crashes_ffmpeg_costs_its_own_call(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "hook", monkeypatch)
    try:
        film = tmp_path / "film.mp4"
        film.write_bytes(CRASHES + clip.read_bytes()[8:])
        before = sorted(path.name for path in tmp_path.iterdir())
        for _ in "ab":
            with pytest.raises(VideoError, match=r"crashes its decoder \(SIGSEGV\)"):
                replace_sound(film, TONE, tmp_path / "new.mkv")
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        replace_sound(clip, TONE, tmp_path / "new.mkv")
        assert load(tmp_path / "new.mkv").num_samples == 24_000
    finally:
        decoding_process.end_all()


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak of a process's memory is read from /proc"
)
def test_a_long_film_takes_the_memory_of_a_short_one(tmp_path: Path) -> None:
    """All pictures of 1,000 are 230 MB: the process that decodes them holds a few."""
    peaks_mb = []
    for count in (100, 1000):
        frames = (np.full((240, 320, 3), n % 251, np.uint8) for n in range(count))
        path = tmp_path / f"{count}.mp4"
        write_video(path, frames, 25)
        assert sum(1 for _ in read_frames(path, frame_times(0.0, count / 25, 25))) == count
        peaks = []
        for child in psutil.Process().children():
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{child.pid}/status").read_text().splitlines()
            )
            peaks.append(int(status["VmHWM"].split()[0]) / 1024)
        peaks_mb.append(max(peaks))
    assert peaks_mb[1] < peaks_mb[0] + 30, peaks_mb
