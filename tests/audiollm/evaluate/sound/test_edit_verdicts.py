"""The verdict on an edit: noise that a judge names is not right, a perfect edit that it misses is not wrong."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from audiollm.audio import Waveform, save
from audiollm.evaluate.sound.edited_sounds import DONE, VERDICT, WHY, EditedSound, judge_edits
from audiollm.evaluate.sound.generated_sounds import GeneratedSound, TargetEvent
from audiollm.evaluate.sound.suite import SuiteJudges, evaluate_sounds

RATE = 16_000
SPAN_S = (1.0, 2.0)
EVENT = TargetEvent("bell", 1.0, 2.0)


class Deaf:
    """A judge that hears one of its two classes in everything."""

    def __init__(self, label: str) -> None:
        self.labels, self.label = ["bell", "drum"], label

    def logits(self, sound: Waveform) -> np.ndarray:
        return np.array([float(label == self.label) for label in self.labels])


def tracks(folder: Path) -> dict[str, Path]:
    """A quiet track, the same with a bell, with a bell at another pitch, and with a blast of noise."""
    torch.manual_seed(0)
    times = torch.arange(3 * RATE) / RATE
    track_N = 0.003 * torch.randn(3 * RATE)
    inside_N = (times >= SPAN_S[0]) & (times < SPAN_S[1])
    decay_N = 0.3 * torch.exp(-4 * (times - 1.0).clamp(min=0)) * inside_N
    high_N, low_N = (decay_N * torch.sin(2 * math.pi * hz * times) for hz in (880, 500))
    sounds: dict[str, Tensor] = {
        "track": track_N,
        "bell": track_N + high_N,
        "lower": track_N + low_N,
        "noise": track_N + 0.5 * torch.randn(3 * RATE) * inside_N,
    }
    for name, samples_N in sounds.items():
        save(folder / f"{name}.wav", samples_N[None], RATE)
    return {name: folder / f"{name}.wav" for name in sounds}


def verdict(
    folder: Path, operation: str, before: str, after: str, perfect: str, hears: str
) -> tuple[object, str]:
    paths = tracks(folder)
    edit = EditedSound(
        id="a", case=f"{operation} by words", operation=operation, path=paths[after], before=paths[before],
        reference=paths[perfect], span_s=SPAN_S, event=EVENT, other_events=(), caption="",
    )  # fmt: skip
    row = judge_edits([edit], Deaf(hears)).rows[0]
    assert row[DONE] is ((hears == "bell") is (operation != "remove"))
    return row[VERDICT], row[WHY]


@pytest.mark.parametrize(
    "operation, before, after, perfect, hears, right, why",
    [
        ("add", "track", "lower", "bell", "bell", True, ""),
        ("add", "track", "noise", "bell", "bell", False, "far from a perfect edit"),
        ("inpaint", "track", "noise", "bell", "bell", False, "far from a perfect edit"),
        ("inpaint", "track", "bell", "bell", "drum", True, "as a perfect edit sounds"),
        ("inpaint", "track", "lower", "bell", "drum", None, "the judge misses it in a perfect edit, too"),
        ("add", "track", "track", "bell", "bell", False, "nothing audible is changed"),
        ("remove", "bell", "bell", "track", "bell", False, "nothing audible is changed"),
        ("remove", "bell", "track", "track", "bell", True, "as a perfect edit sounds"),
    ],
)
def test_a_verdict_needs_more_than_a_class(
    tmp_path: Path, operation: str, before: str, after: str, perfect: str, hears: str, right: object, why: str
) -> None:
    assert verdict(tmp_path, operation, before, after, perfect, hears) == (right, why)


def test_noise_in_place_of_a_sound_is_shown_first_though_the_judge_names_it(tmp_path: Path) -> None:
    paths = tracks(tmp_path)
    sounds = [
        GeneratedSound(name, paths[name], paths["bell"], None, None, None, (EVENT,))
        for name in ("lower", "noise")
    ]
    outcome = evaluate_sounds(sounds, SuiteJudges(classes=Deaf("bell")))
    assert [row["far"] for row in outcome.rows] == [[False], [True]]
    assert [example.title for example in outcome.examples] == ["noise", "lower"]
