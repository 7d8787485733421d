"""The report of a run: sounds, lengths, disagreements, players, and the agreement of the review."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from audiollm.audio.files import save
from audiollm.audio.samples import Waveform
from audiollm.video.writing import write_video
from pipelines.audiocot.steps.tags import Tags
from tests.pipelines.audiocot.cot_run import RATE, ChatServer, made, rows, texts_of, think, tone

HEARD = {
    "events": [
        {"sound": "bell", "start_s": 0.1, "end_s": 0.4},
        {"sound": "horn", "start_s": 0.5, "end_s": 0.6},
    ]
}
TAGGED = {
    "events": [{"label": label, "start_s": 0.1, "end_s": 0.4, "score": 0.9} for label in ("Bell", "Dog")],
    "tags": [],
    "kinds": {"voice": 0.1, "music": 0.1},
}


@pytest.fixture
def server() -> Iterator[ChatServer]:
    def reply(request: dict[str, Any]) -> str:
        return json.dumps(HEARD) if "cannot be used" in texts_of(request) else "A bell."

    started = ChatServer(reply)
    yield started
    started.close()


def section(page: str, name: str) -> str:
    """The text of a section of the page, without marks, each run of spaces one."""
    found = re.search(rf'<section id="{name}">(.*?)</section>', page, re.DOTALL)
    assert found is not None, name
    return " ".join(re.sub(r"<[^>]+>", " ", found[1]).split())


def test_the_report_says_what_there_is_and_what_disagrees(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tags, "process", lambda self, item: TAGGED)
    monkeypatch.setattr(Tags, "setup", lambda self: None)
    (tmp_path / "tagger.onnx").touch()
    for number in range(3):
        save(made(tmp_path / "in" / f"{number}.wav"), tone(0.8, 300 + 100 * number), RATE)
    frames = [np.full((32, 32, 3), 20 * n, np.uint8) for n in range(8)]
    write_video(tmp_path / "in" / "film.mkv", frames, 8, Waveform(tone(1.0, 700), RATE))
    save(tmp_path / "in" / "silent.wav", torch.zeros(1, RATE), RATE)
    run: dict[str, Any] = {
        "steps": {"tags": {"model": str(tmp_path / "tagger.onnx")}, "listen": server.step()},
        "review_share": 0.75,
        "shards": False,
        "made": {"edits": ["inpaint"], "sample_rate": RATE, "channels": 1},
    }
    think(tmp_path / "out", tmp_path / "in", **run)
    listed = rows(tmp_path / "out", "review.jsonl")
    assert len(listed) == 3
    for row, verdict in zip(listed, ("accepted", "accepted", "rejected"), strict=True):
        row.update(verdict=verdict, note="no horn" if verdict == "rejected" else None)
    (tmp_path / "out" / "review.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    think(tmp_path / "out", tmp_path / "in", **run)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "could not be made" not in page
    sounds = section(page, "sounds")
    assert "bell 4" in sounds and "horn 4" in sounds and "2 events 4" in sounds
    answers = section(page, "answers")
    assert "listen 2 4" in answers  # each of four answers took two requests
    assert re.search(r"not in the record 4 Dog .*not heard by the tagger 4 horn", answers)
    review = section(page, "review")
    assert re.search(r"Accepted: 66\.7\s% of", review) and "no horn" in review
    assert "1 silent" in section(page, "funnel")
    clips = re.search(r'<section id="clips">(.*?)</section>', page, re.DOTALL)
    assert clips is not None and clips[1].count("<audio") == 5 and clips[1].count("data:image/jpeg") == 1
    numbers = section(page, "numbers")
    assert "dBFS" in numbers
    assert "Filtered (1) file length reason silent.wav 1.0 s 1 silent" in section(page, "files")
