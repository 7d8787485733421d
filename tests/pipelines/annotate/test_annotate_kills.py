"""Killed at any moment and run again, an annotation ends with the files of a run that nobody disturbed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import psutil
import pytest

from pipelines.annotate.input.synthetic import CorpusConfig, speak_corpus

CORPUS = CorpusConfig(words=["one", "seven", "nine"], voices=2, takes=4, test_takes=1)
OF_THE_RUN = {"timings.json", "report.html"}
"""Files that depend on the run's time and not only on the data."""


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spoken")
    speak_corpus(folder, CORPUS, seed=0, on_done=lambda done: None)
    (folder / "torn.wav").write_bytes((folder / "one_anna_0.wav").read_bytes()[:30])
    return folder


def _command(source: Path, out: Path, engine: str) -> list[str]:
    steps = ["--set", "steps.prosody={}", "--set", "steps.fingerprint={}", "--set", "steps.repetition={}"]
    return [
        *(str(Path(sys.executable).with_name("audiollm")), "annotate", str(source), "-o", str(out)),
        *("--transcripts", "{text}_{speaker}_{take}.wav", "--workers", "2", "--engine", engine),
        *("--set", "quality_sample=2", *steps),
    ]


def _content(out: Path) -> dict[str, str]:
    """Every file that is made of the data, by its digest; the ledger is how it is made."""
    files = [path for path in out.rglob("*") if path.is_file() and "ledger" not in path.parts]
    return {
        path.relative_to(out).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name not in OF_THE_RUN and "config.yaml" not in path.name
    }


def _descendants(process: subprocess.Popen[bytes]) -> set[int]:
    try:
        return {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def _kill_often(source: Path, folder: Path, engine: str, kills: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    plain = folder / "plain"
    began = time.monotonic()
    subprocess.run(_command(source, plain, engine), check=True, env=environment, stdout=subprocess.DEVNULL)
    whole_s = time.monotonic() - began
    expected = _content(plain)
    assert {"segments.jsonl", "files.jsonl", "shards/000000.tar"} <= set(expected)
    killed, moments, left_behind = folder / "killed", random.Random(0), set[int]()
    for _ in range(kills):
        process = subprocess.Popen(
            _command(source, killed, engine),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(moments.uniform(0.2, 1.0) * whole_s)
        left_behind |= _descendants(process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(1.0)
    subprocess.run(_command(source, killed, engine), check=True, env=environment, stdout=subprocess.DEVNULL)
    assert _content(killed) == expected
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in left_behind) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not [pid for pid in left_behind if psutil.pid_exists(pid)]


def _is_alive(process: psutil.Process) -> bool:
    """Not ended, and not waiting for whoever adopted it to take note that it has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.slow
def test_workers_end_with_the_command_that_is_killed(tmp_path: Path, spoken: Path) -> None:
    """In the midst of native code too (recognition, voice activity), within 0.2 s."""
    seconds = []
    for number, wait_s in enumerate((3.0, 4.5, 6.0)):
        process = subprocess.Popen(
            _command(spoken, tmp_path / str(number), "local"),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(wait_s)
        begun = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        killed_at = time.monotonic()
        while alive := [each for each in begun if _is_alive(each)]:
            assert time.monotonic() - killed_at < 20, alive
            time.sleep(0.005)
        seconds += [time.monotonic() - killed_at] * bool(begun)
    assert len(seconds) >= 2 and sorted(seconds)[len(seconds) // 2] < 0.2, seconds


@pytest.mark.slow
def test_killed_once(tmp_path: Path, spoken: Path) -> None:
    _kill_often(spoken, tmp_path, "local", 1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_killed_twenty_times(tmp_path: Path, spoken: Path, engine: str) -> None:
    if engine == "ray":
        pytest.importorskip("ray")
    _kill_often(spoken, tmp_path, engine, 20)
