"""An annotation to review, of tones with known rows, and the server of `audiollm review` in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from audiollm.audio import save
from audiollm.files.atomic import write_jsonl
from tests.audiollm.flow.toy import tone

ROOT = Path(__file__).parents[3]
WORDS = ("seven ships sailed", "a dog barked twice", "rain fell all day", "the cat sat on the mat")
PATIENCE_S = 120


def write_annotation(folder: Path, count: int = 16, recordings: int = 4) -> Path:
    """Segments of a second each, in turn of some recordings; the first of each recording is dropped, and every third
    has no text."""
    per_recording = -(-count // recordings)
    kept, dropped, files = [], [], []
    folder.mkdir(parents=True, exist_ok=True)
    for place in range(recordings):
        path = folder.parent / f"{folder.name}-audio" / f"r{place}.wav"
        path.parent.mkdir(exist_ok=True)
        save(path, tone(220.0 * (place + 1), per_recording + 1.0), 8000)
        files.append(
            {"name": path.name, "path": str(path), "digest": f"d{place}", "duration_s": per_recording + 1.0}
        )
    for number in range(count):
        place, second = divmod(number, per_recording)
        row = segment(
            number, folder.parent / f"{folder.name}-audio" / f"r{place}.wav", f"d{place}", float(second)
        )
        if second:
            kept.append(row)
        else:
            drop = {"step": "signal", "rule": "min_level_dbfs", "kind": "too quiet", "value": -50.0, "threshold": -45.0,
                    "reason": "-50 dBFS, the limit is -45 dBFS"}  # fmt: skip
            dropped.append({**row, "dropped": drop})
    write_jsonl(folder / "segments.jsonl", kept)
    write_jsonl(folder / "filtered.jsonl", dropped)
    write_jsonl(folder / "files.jsonl", files)
    return folder


def segment(number: int, path: Path, digest: str, start_s: float) -> dict[str, Any]:
    """A row as `annotate` writes it."""
    text = WORDS[number % len(WORDS)]
    refused = {"step": "text", "rule": "min_token_confidence", "kind": "not sure", "value": 0.2, "threshold": 0.37,
               "reason": "0.2, the limit is 0.37"}  # fmt: skip
    is_refused = number % 3 == 2
    return {
        "id": f"{path.stem}--{number:05d}", "path": str(path), "file": path.name, "digest": digest,
        "start_s": start_s + 0.1, "end_s": start_s + 0.9, "duration_s": 0.8, "kind": "speech",
        "speaker": f"S{number % 2}", "split": "train",
        "text": "" if is_refused else text, "text_source": None if is_refused else "whisper",
        "text_refused": refused if is_refused else None, "language": "en",
        "heard": {"whisper": text, "pocketsphinx": f"{text} up"},
        "measured": {"signal": {"level_dbfs": -20.0 - number}, "quality": {"snr_db": float(number % 7)}},
    }  # fmt: skip


class ReviewServer:
    """The command in a process of its own, on one port for all its starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.starts = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        code = "import sys, typer; from pipelines.review.command import review; typer.run(review)"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, str(self.folder), "--port", str(self.port)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        latest = time.monotonic() + PATIENCE_S
        while time.monotonic() < latest:
            try:
                urllib.request.urlopen(f"{self.url}/facts", timeout=2).close()
                self.starts += 1
                return
            except OSError:
                assert self.process.poll() is None, "the server ended before it answered"
                time.sleep(0.05)
        self.kill()
        raise AssertionError("the server did not answer")

    def kill(self) -> None:
        """Kill it as `kill -9` does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)
