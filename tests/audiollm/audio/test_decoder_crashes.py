"""A file on which a decoder crashes or hangs is set aside like any other that cannot be read, wherever it is read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from audiollm.audio import AudioError, decoding_process
from audiollm.audio import files as audio
from audiollm.audio.streams import stream_mono
from audiollm.data.hearing.features import FeatureShape, num_clip_rows
from audiollm.data.records.source import AudioClip, BadSample
from audiollm.errors import ConfigError
from audiollm.evaluate.judges.judging import load_clip
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.generation.speaking.voice import read_voice
from tests.audiollm.audio import every_encoder
from tests.audiollm.audio.audio_files import SAMPLE_RATE, sweep, write_av
from tests.audiollm.audio.crashing_decoder import CRASHES, DAMAGES, HANGS, install, write
from tests.audiollm.generation.toy_speech import ToyCodec


@pytest.fixture(autouse=True)
def crashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(tmp_path / "hook", monkeypatch)
    yield
    decoding_process.end_all()


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_av(tmp_path / "good.m4a", "ipod", "aac", sweep(duration_s=3.0))


def decoders_of(process: psutil.Process) -> list[psutil.Process]:
    return [each for each in process.children() if "decoding_process" in command_of(each)]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # ended since it was listed
        return ""


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_crash_is_an_audio_error_and_the_next_file_is_read(tmp_path: Path, good: Path) -> None:
    bad = write(tmp_path / "bad.m4a", CRASHES)
    whole = audio.load(good).samples_CN
    readers = [
        audio.load,
        audio.probe,
        lambda path: audio.load(path, 0.1, 0.2),
        lambda path: audio.load_bytes(path.read_bytes(), str(path)),
        lambda path: list(stream_mono(path, 16000)),
    ]
    for read in readers:
        bad.touch()  # what is known of the file as it was holds no more
        with pytest.raises(AudioError, match=r"crashes its decoder \(SIGSEGV\)") as caught:
            read(bad)
        assert str(caught.value.path) == str(bad)
        assert torch.equal(audio.load(good).samples_CN, whole)


def test_files_over_which_ffmpeg_itself_crashes(tmp_path: Path, good: Path) -> None:
    """FFmpeg 8.0 divides by zero over an ADX without its mark, and frees the layout of 7.1 channels in a CAF twice."""
    adx = every_encoder.write(tmp_path / "a.adx", "adx", "adpcm_adx", "s16", "stereo", 48000)
    caf = every_encoder.write(tmp_path / "a.caf", "caf", "pcm_s16le", "s16", "7.1", 48000)
    assert adx and caf
    content = bytearray((tmp_path / "a.adx").read_bytes())
    content[31] ^= 0x20
    (tmp_path / "a.adx").write_bytes(content)
    content = bytearray((tmp_path / "a.caf").read_bytes())
    (tmp_path / "a.caf").write_bytes(
        content[: content.index(b"data") + 20]
    )  # which libsndfile leaves to FFmpeg
    for name in ("a.adx", "a.caf"):
        for read in (audio.load, audio.probe, lambda path: list(stream_mono(path, 16000))):
            with suppress(AudioError):
                read(tmp_path / name)
            assert audio.load(good).num_samples >= 3 * SAMPLE_RATE


def test_a_decoder_that_hangs_is_given_up(
    tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding_process, "LONGEST_SILENCE_S", 1.0)
    with pytest.raises(AudioError, match="has given nothing for 1 s"):
        audio.load(write(tmp_path / "bad.m4a", HANGS))
    assert audio.load(good).num_samples >= 3 * SAMPLE_RATE


def test_a_file_that_crashed_is_not_tried_again_until_it_changes(tmp_path: Path, good: Path) -> None:
    bad = write(tmp_path / "bad.m4a", CRASHES)
    for reader in (audio.load, lambda path: audio.load_bytes(path.read_bytes())):
        for _ in range(2):
            with pytest.raises(AudioError, match="crashes its decoder"):
                reader(bad)
    before = time.monotonic()
    for _ in range(50):
        with pytest.raises(AudioError, match="crashes its decoder"):
            audio.load(bad)
    assert time.monotonic() - before < 1.0
    bad.write_bytes(good.read_bytes())
    assert audio.load(bad).num_samples >= 3 * SAMPLE_RATE


def test_a_file_is_not_blamed_for_the_damage_of_an_earlier_one(tmp_path: Path, good: Path) -> None:
    damaging = write(tmp_path / "damaging.m4a", DAMAGES)
    for _ in range(2):
        with pytest.raises(AudioError, match="cannot be read as audio"):
            audio.load(damaging)
        assert audio.load(good).num_samples >= 3 * SAMPLE_RATE


def test_one_process_serves_many_files_and_those_of_threads_do_not_mix(tmp_path: Path) -> None:
    paths = [
        write_av(tmp_path / f"{number}.m4a", "ipod", "aac", 0.1 * number * sweep(duration_s=1.0))
        for number in range(1, 9)
    ]
    alone = [audio.load(path).samples_CN for path in paths]
    assert len(decoders_of(psutil.Process())) == 1
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda path: audio.load(path).samples_CN, paths * 8))
    assert all(torch.equal(a, b) for a, b in zip(alone * 8, together, strict=True))
    assert 1 <= len(decoders_of(psutil.Process())) <= 4


def test_a_stream_that_is_left_early_does_no_harm(good: Path) -> None:
    whole = audio.load(good).samples_CN
    for _ in range(3):
        next(stream_mono(good, SAMPLE_RATE))
        assert torch.equal(audio.load(good).samples_CN, whole)
    assert len(decoders_of(psutil.Process())) == 1


def test_plain_files_need_no_process(tmp_path: Path) -> None:
    for name in ("a.wav", "a.flac"):
        audio.save(tmp_path / name, sweep(duration_s=1.0), SAMPLE_RATE)
        audio.probe(tmp_path / name)
        audio.load(tmp_path / name)
        list(stream_mono(tmp_path / name, 16000))
    assert not decoders_of(psutil.Process())


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_process_ends_with_the_one_that_it_serves(tmp_path: Path, end: signal.Signals) -> None:
    """Even in the midst of a file, which takes 1000 s: the kernel ends it, as soon as a busy machine comes to that."""
    bad = write(tmp_path / "bad.m4a", HANGS)
    code = f"from audiollm import audio; print('ready', flush=True); audio.load({str(bad)!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    with process:
        process.stdout.readline()
        children: list[psutil.Process] = []
        while not children:
            children = decoders_of(psutil.Process(process.pid))
            time.sleep(0.05)
        time.sleep(1.0)
        process.send_signal(end)
        process.wait()
        ended = time.monotonic()
        while any(map(is_alive, children)) and time.monotonic() - ended < 30:
            time.sleep(0.01)
        assert not any(map(is_alive, children))


def test_a_forked_process_has_its_own(good: Path) -> None:
    whole = audio.load(good).samples_CN
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(audio.load(good).samples_CN, whole) else 1)
    assert torch.equal(audio.load(good).samples_CN, whole)
    assert os.waitpid(child, 0)[1] == 0


# Who reads files


def test_a_judged_clip(tmp_path: Path) -> None:
    with pytest.raises(MetricError, match="crashes its decoder"):
        load_clip(write(tmp_path / "bad.mp3", CRASHES))


def test_a_sample_of_training(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.mp3", CRASHES)
    for content in (str(bad), bad.read_bytes()):
        with pytest.raises(BadSample, match="crashes its decoder"):
            AudioClip("here", "id", content).load()


def test_the_survey_of_a_training(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.mp3", CRASHES)
    for content in (str(bad), bad.read_bytes()):
        with pytest.raises(BadSample, match="crashes its decoder"):
            num_clip_rows(AudioClip("here", "id", content), FeatureShape())


def test_a_reference_to_speak_like(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="crashes its decoder"):
        read_voice(write(tmp_path / "bad.mp3", CRASHES), None, ToyCodec())
