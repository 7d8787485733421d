"""`benchmarks/interpret_long.py`: the talk that it makes changes its speaker."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import interpret_long as bench


def test_the_speaker_changes_every_five_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes of half a second, told apart by their level; a change comes with the first group of a period."""
    levels = {"a": 1.0, "b": 2.0, "c": 3.0}

    def takes(talk: bench.DigitTalk) -> dict[str, list[list[Tensor]]]:
        return {
            name: [[torch.full((1, bench.RATE // 2), level)] for _ in bench.DIGITS]
            for name, level in levels.items()
        }

    monkeypatch.setattr(bench.DigitTalk, "_takes", takes)
    talk = bench.DigitTalk(Path(), 950.0)
    heard: dict[int, set[float]] = {}
    made = 0
    for sound_1N in talk._sounds():
        heard.setdefault(made // round(bench.SPEAKER_S * bench.RATE), set()).add(float(sound_1N[0, 0]))
        made += sound_1N.shape[1]
    assert [len(each) for each in heard.values()] == [1, 1, 1, 1]
    speakers = [each.pop() for each in heard.values()]
    assert all(before != after for before, after in pairwise(speakers))
