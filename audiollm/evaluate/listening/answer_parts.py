"""Reading a reply of a reasoner: its thought, its answer, and whether it is in the form that was asked for.

`evaluate audio-qa`, MMAU's string match and the rewards of reinforcement learning all read an answer through here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from audiollm.data.text.words import words_of

THINK = ("<think>", "</think>")
ANSWER = ("<answer>", "</answer>")
_TAG = re.compile(r"</?(?:think|answer)>")
_WITH_THOUGHT = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
_WITHOUT_THOUGHT = re.compile(r"\s*<answer>.*</answer>\s*", re.DOTALL)


@dataclass(frozen=True)
class AnswerParts:
    """A reply, taken apart."""

    thought: str
    """Text of the thought, without its tags; empty where there is none."""
    answer: str
    """The part that counts as the answer, without its tags and the space around it."""
    tags: tuple[str, ...]
    """Tags in the order in which they stand in the reply."""
    thinks_well: bool
    """The reply is `<think>...</think> <answer>...</answer>`: each tag once, nothing before or after them."""
    answers_well: bool
    """The reply is `<answer>...</answer>`: each tag once, no thought, nothing before or after them."""

    @property
    def thought_words(self) -> int:
        """Words of the thought, as `words_of` counts them."""
        return len(words_of(self.thought))

    @property
    def is_tagged(self) -> bool:
        return bool(self.tags)


def read_answer(reply: str) -> AnswerParts:
    """Take a reply apart.

    The thought begins at the first `<think>`, or at the beginning where the tag is missing, and ends at the last
    `</think>`. Of what follows, the answer is the text in the last `<answer>...</answer>`; an `<answer>` that is cut
    off counts to the end, and without the tag all that follows is the answer. A thought that never ends leaves no
    answer, unless an `<answer>` stands in it: that one ends the thought.
    """
    thought, rest = _split_thought(reply)
    tags = tuple(_TAG.findall(reply))
    return AnswerParts(
        thought.strip(),
        _tagged_answer(rest).strip(),
        tags,
        tags == THINK + ANSWER and _WITH_THOUGHT.fullmatch(reply) is not None,
        tags == ANSWER and _WITHOUT_THOUGHT.fullmatch(reply) is not None,
    )


def _split_thought(reply: str) -> tuple[str, str]:
    before, closing, after = reply.rpartition(THINK[1])
    if closing:
        return before.partition(THINK[0])[2] if THINK[0] in before else before, after
    before, opening, thought = reply.partition(THINK[0])
    if not opening:
        return "", reply
    if ANSWER[0] in thought:
        thought, tag, rest = thought.partition(ANSWER[0])
        return thought, tag + rest
    return thought, before


def _tagged_answer(text: str) -> str:
    _, opening, last = text.rpartition(ANSWER[0])
    return last.partition(ANSWER[1])[0] if opening else text.replace(ANSWER[1], "")
