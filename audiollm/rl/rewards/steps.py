"""Steps of a thought: where each ends in the answer's text, and the score that a reward gives to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

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
    parts = answer.parts
    return [
        ThoughtStep(text, parts.thought_start + end)
        for text, end in _split_thought_steps(parts.thought, split)
    ]


def _split_thought_steps(thought: str, split: StepSplit) -> Iterator[tuple[str, int]]:
    """Yield each part that is not empty, and the characters of the thought through its end."""
    first = 0
    for boundary in [*_ENDS[split].finditer(thought), None]:
        segment = thought[first : len(thought) if boundary is None else boundary.start()]
        if segment.strip():
            yield segment.strip(), first + len(segment.rstrip())
        first = len(thought) if boundary is None else boundary.end()
