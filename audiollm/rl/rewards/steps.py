"""Steps of a thought: where each ends in the answer's text, and the score that a reward gives to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from audiollm.evaluate.listening.answer_parts import THINK
from audiollm.rl.rewards.batch import SampledAnswer
from audiollm.rl.rewards.settings import StepSplit

_ENDS: dict[StepSplit, re.Pattern[str]] = {
    "sentences": re.compile(r"(?<=[.!?;。！？；])\s+|\n+|(?<=[。！？；])"),
    "lines": re.compile(r"\n+"),
    "numbered": re.compile(r"\n\s*(?=(?:step\s*)?\d+\s*[.):])", re.IGNORECASE),
}
"""What stands between two steps."""


@dataclass(frozen=True)
class ThoughtStep:
    """A step of a thought: a sentence, a line, or a numbered item."""

    text: str
    end: int
    """Characters of the answer's text through the end of the step."""


def thought_steps(answer: SampledAnswer, split: StepSplit = "sentences") -> list[ThoughtStep]:
    """Return the steps of an answer's thought, without the empty ones."""
    start = _thought_start(answer.text)
    thought = answer.parts.thought
    begin = answer.text.find(thought, start)
    return [ThoughtStep(text, begin + end) for text, end in _parts(thought, split)]


def _thought_start(text: str) -> int:
    """Return the place behind the `<think>` that opens the thought; 0 where there is none."""
    before, closing, _ = text.rpartition(THINK[1])
    place = (before if closing else text).find(THINK[0])
    return place + len(THINK[0]) if place >= 0 else 0


def _parts(thought: str, split: StepSplit) -> Iterator[tuple[str, int]]:
    """Yield each part that is not empty, and the characters of the thought through its end."""
    first = 0
    for found in [*_ENDS[split].finditer(thought), None]:
        part = thought[first : len(thought) if found is None else found.start()]
        if part.strip():
            yield part.strip(), first + len(part.rstrip())
        first = len(thought) if found is None else found.end()
