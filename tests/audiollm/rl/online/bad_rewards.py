"""Rewards that fail for the first answer to one prompt each, in every way in which a reward can fail."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from audiollm.rl.rewards.batch import RewardBatch

_RAISED_AT = 1 + Path(__file__).read_text().splitlines().index(
    '        raise RuntimeError("no judge is there")'
)
PLACE = "tests.audiollm.rl.online.bad_rewards:"
REASONS = {
    "raises": ("tone1", f"raised RuntimeError: no judge is there (bad_rewards.py, line {_RAISED_AT})"),
    "nan": ("tone2", "gave nan"),
    "none": ("tone3", "gave None"),
    "few": ("tone4", "returned 0 values for 1 answers"),
    "words": ("tone5", "gave str, no number"),
}
"""By reward: the prompt whose first answer has no value, and why."""


def _has(batch: RewardBatch, name: str) -> bool:
    return any(answer.sample.id == REASONS[name][0] and answer.number == 0 for answer in batch)


def _values(batch: RewardBatch, name: str = "", instead: Any = None) -> list[Any]:
    return [
        instead
        if name and answer.sample.id == REASONS[name][0] and answer.number == 0
        else float(sum(map(ord, answer.text)) % 7)
        for answer in batch
    ]


def raises(batch: RewardBatch) -> list[Any]:
    """Raises where that answer is in the batch."""
    if _has(batch, "raises"):
        raise RuntimeError("no judge is there")
    return _values(batch)


def nan(batch: RewardBatch) -> list[Any]:
    """Gives NaN for that answer."""
    return _values(batch, "nan", float("nan"))


def none(batch: RewardBatch) -> list[Any]:
    """Gives None for that answer."""
    return _values(batch, "none", None)


def few(batch: RewardBatch) -> list[Any]:
    """Gives a value less where that answer is in the batch."""
    return _values(batch)[_has(batch, "few") :]


def words(batch: RewardBatch) -> list[Any]:
    """Gives a word for that answer."""
    return _values(batch, "words", "good")


def hangs(batch: RewardBatch) -> list[Any]:
    """Does not come back where the first answer to the first prompt is in the batch."""
    if any(answer.sample.id == "tone0" and answer.number == 0 for answer in batch):
        time.sleep(30)
    return _values(batch)


def judge_of_words(batch: RewardBatch) -> list[Any]:
    """Has no value for an empty answer, as a reward model has none."""
    return [float(len(answer.text)) if answer.text.strip() else None for answer in batch]
