"""The batch that a reward function sees, the steps of its thoughts, and what such a function is."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from audiollm.data.chat.question_prompts import AnswerForm, answer_form
from audiollm.data.records.sample import Sample, TextPart
from audiollm.evaluate.listening.answer_parts import AnswerParts, read_answer

if TYPE_CHECKING:
    from torch import Tensor

    from audiollm.audio.samples import Waveform
    from audiollm.data.records.source import LoadedSample
import re

from audiollm.rl.rewards.settings import StepSplit


@dataclass(frozen=True, eq=False)
class SampledAnswer:
    """An answer of the policy to a prompt."""

    sample: Sample
    """The prompt, with the answer key as its last turn where there is one."""
    text: str
    """Text of the answer, with its tags; empty for speech alone."""
    num_tokens: int
    """Sampled tokens: those of text, and the frames of codes."""
    is_truncated: bool = False
    """The answer was cut off at its longest length."""
    codes_KT: Tensor | None = None
    """Codes of its speech `[K, T]`; None for an answer in words."""
    recording: Waveform | None = None
    """Its speech, decoded."""
    number: int = 0
    """Its number in the group of answers to the same prompt."""
    question: LoadedSample | None = None
    """The messages before the answer with their sound; None: that of the paths which `sample` names."""

    @property
    def key(self) -> str | None:
        """The answer key: the text of the prompt's last turn, where that is the assistant's."""
        last = self.sample.messages[-1]
        if last.role != "assistant":
            return None
        texts = [content_part.text for content_part in last.content if isinstance(content_part, TextPart)]
        return read_answer(" ".join(texts)).answer if texts else None

    @property
    def choices(self) -> list[str]:
        """The options of the question, of `metadata.choices`; empty where it has none."""
        return [str(choice) for choice in self.sample.metadata.get("choices") or ()]

    @property
    def form(self) -> AnswerForm:
        """The form in which the prompt wants the answer."""
        return answer_form(self.sample)

    @property
    def parts(self) -> AnswerParts:
        """Thought, answer and form, as `evaluate audio-qa` reads them."""
        return read_answer(self.text)


@dataclass(frozen=True)
class RewardBatch:
    """Answers to be scored, in the order of the values that a reward returns."""

    answers: Sequence[SampledAnswer]

    def __len__(self) -> int:
        return len(self.answers)

    def __iter__(self) -> Iterator[SampledAnswer]:
        return iter(self.answers)


@dataclass(frozen=True)
class ScoredStep:
    """A step with a score. A reward may return a list of these for an answer: its value is then their mean."""

    text: str
    score: float
    end: int | None = None
    """Characters of the answer's text through the end of the step; None: the step is the end of the answer."""


RewardValue = float | Sequence[ScoredStep] | None
"""The value of an answer, or of each of its steps; None: the answer cannot be scored."""
RewardValues = Sequence[RewardValue]
RewardFunction = Callable[[RewardBatch], RewardValues | Awaitable[RewardValues]]
"""`f(batch)` gives a value per answer, plain or by `async def`."""


def each_answer(score: Callable[[SampledAnswer], RewardValue]) -> RewardFunction:
    """The reward function that scores every answer by itself."""
    return lambda batch: [score(answer) for answer in batch]


def called_reward(function: RewardFunction, batch: RewardBatch) -> Any:
    """Call a reward and return what it gives, awaited where it is async and as a list where it is a generator."""
    values: Any = function(batch)
    if inspect.isawaitable(values):
        values = asyncio.run(_awaited(values))
    return list(values) if isinstance(values, Iterator) else values


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


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
