"""Runs whose endpoint sends damaged answers alone: they end, every clip is kept or set aside, what is kept is right."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from audiollm.audio.files import save
from audiollm.audio.samples import Waveform
from audiollm.video.writing import write_video
from tests.audiollm.data.test_thoughts import damaged
from tests.pipelines.audiocot.cot_run import RATE, ChatServer, made, rows, think

CLIP_S = 0.6
PLAIN: dict[str, Any] = {"shards": False, "made": {"edits": [], "pairs": False}}
HEARD = {
    "events": [
        {"sound": "dog bark", "start_s": 0.05, "end_s": 0.5, "place": "on the left"},
        {"sound": "bell", "start_s": 0.2, "end_s": 0.4},
    ],
    "background": ["rain"],
}
SEEN = {
    "happenings": [
        {"what": "a dog jumps", "start_s": 0.05, "end_s": 0.5, "where": "on the left"},
        {"what": "a bell swings", "start_s": 0.2, "end_s": 0.4},
    ],
    "objects": ["a dog", "a bell"],
    "scene": "a yard",
}


def noise(seconds: float, seed: int) -> torch.Tensor:
    return 0.1 * torch.randn(1, round(seconds * RATE), generator=torch.Generator().manual_seed(seed))


def write_sounds(folder: Path) -> int:
    """Recordings of 150 clips, no two of which are equal."""
    for number in range(6):
        save(made(folder / f"{number}.wav"), noise(25 * CLIP_S, number), RATE)
    return 150


def write_film(folder: Path) -> int:
    """A video of 20 clips."""
    dice = np.random.default_rng(0)
    frames = [dice.integers(0, 255, (32, 32, 3), dtype=np.uint8) for _ in range(round(20 * CLIP_S * 5))]
    write_video(made(folder / "v.mkv"), frames, 5, Waveform(noise(20 * CLIP_S, 0), RATE))
    return 20


def are_right(spans: list[dict[str, Any]], names: tuple[str, ...]) -> bool:
    """The schema of spans again, written without the library that checks it."""
    for span in spans:
        texts = [value for key, value in span.items() if key not in ("start_s", "end_s")]
        if not all(isinstance(text, str) and 0 < len(text) <= 160 and text.isprintable() for text in texts):
            return False
        if (
            set(span) - {"start_s", "end_s", *names}
            or not 0 <= span["start_s"] < span["end_s"] <= CLIP_S + 0.05
        ):
            return False
    return len(spans) <= 32


@pytest.mark.parametrize(
    ("step", "right", "write", "fewest"),
    [("listen", HEARD, write_sounds, 1000), ("watch", SEEN, write_film, 100)],
    ids=["listen", "watch"],
)
def test_a_run_ends_whatever_its_endpoint_says(
    step: str, right: dict[str, Any], write: Callable[[Path], int], fewest: int, tmp_path: Path
) -> None:
    count, dice = write(tmp_path / "in"), random.Random(2)
    server = ChatServer(lambda request: damaged(dice, right))
    try:
        funnel = think(
            tmp_path / "out", tmp_path / "in", clip_s=CLIP_S, steps={step: server.step(asks=10)}, **PLAIN
        )
    finally:
        server.close()
    assert len(server.requests) >= fewest
    kept, filtered = rows(tmp_path / "out", "clips.jsonl"), rows(tmp_path / "out", "filtered.jsonl")
    assert len(kept) + len(filtered) == funnel["segments_found"] == count and kept and filtered
    assert funnel["reasons"] == {"answers refused": len(filtered)}
    aside = {row["id"]: row["reason"] for row in rows(tmp_path / "out", "set_aside.jsonl")}
    assert set(aside) == {row["id"] for row in filtered} and not set(aside) & {row["id"] for row in kept}
    assert all("10 answers could not be used" in reason for reason in aside.values())
    for clip in kept:
        found = clip["measured"][step]
        assert set(found) <= {*right, "asks"} and 1 <= found["asks"] <= 10
        names = ("what", "where") if step == "watch" else ("sound", "source", "place", "manner")
        assert are_right(found[next(iter(right))], names)
        assert are_right(clip["record"]["events"], ("sound", "source", "place", "manner"))
