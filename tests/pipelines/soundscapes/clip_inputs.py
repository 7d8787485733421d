"""Sounds, music, rooms and segments of speech, all of them tones, as inputs of `compose_soundscapes`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

from audiollm.audio.files import save
from audiollm.files.atomic import write_jsonl

RATE = 16_000
LABELS = {"001 - Bell": 500, "002 - Horn": 900, "003 - Drum": 1500, "004 - Whistle": 2600, "005 - Hum": 3800}
SPEAKERS = {"ann": "train", "bob": "train", "cid": "test", "dan": "test"}


def tone(seconds: float, hertz: float) -> torch.Tensor:
    return 0.4 * torch.sin(2 * torch.pi * hertz * torch.arange(round(seconds * RATE)) / RATE)[None]


def write_inputs(folder: Path) -> dict[str, Any]:
    """Write tones by label, chords for music, noise for rooms and segments of four speakers; return the settings."""
    for (label, hertz), take in itertools.product(LABELS.items(), "abcd"):
        save(folder / "events" / label / f"{take}.wav", tone(0.3, hertz), RATE)
    noise = torch.randn(1, RATE, generator=torch.Generator().manual_seed(0)) * 0.1
    for take in "ab":
        save(folder / "music" / f"{take}.wav", tone(0.5, 250) + tone(0.5, 375), RATE)
        save(folder / "rooms" / f"{take}.wav", noise, RATE)
    rows = []
    for number, (speaker, split) in enumerate(SPEAKERS.items()):
        save(folder / f"{speaker}.wav", tone(4.0, 120 + 30 * number), RATE)
        rows += [
            {
                "id": f"{speaker}-{take}", "path": str(folder / f"{speaker}.wav"), "start_s": take, "end_s": take + 0.8,
                "speaker": speaker, "text": f"{speaker} says sentence {take}", "split": split,
            }
            for take in range(4)
        ]  # fmt: skip
    write_jsonl(folder / "segments.jsonl", rows)
    return {
        "events": [{"folder": folder / "events", "held_out": "a.*"}],
        "music": [{"folder": folder / "music", "held_out": "a.*"}],
        "backgrounds": [{"folder": folder / "rooms", "held_out": "a.*"}],
        "segments": folder / "segments.jsonl",
        "clips": 210,
        "test_clips": 140,
        "event_s": 0.5,
        "speech_s": 1.0,
        "duration_s": 4.0,
    }
