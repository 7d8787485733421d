"""Reading a reply of a reasoner: its thought, its answer, and whether it is in the form that was asked for.

`evaluate audio-qa`, MMAU's string match, the selection of answers and the rewards of reinforcement learning all read an
answer through here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from audiollm.data.chat.question_prompts import AnswerForm
from audiollm.data.text.words import words_of

THINK = ("<think>", "</think>")
ANSWER = ("<answer>", "</answer>")
_TAG = re.compile(r"</?(?:think|answer)>")
_WITH_THOUGHT = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
_WITHOUT_THOUGHT = re.compile(r"\s*<answer>.*</answer>\s*", re.DOTALL)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_THOUGHT_TAG = re.compile(
    r"<(/?)(?:think|thinking|thoughts?|reason|reasoning|planning|caption|summary|analysis)>|[\[◁](/?)think[\]▷]",
    re.IGNORECASE,
)
"""Tags of thoughts: `<think>` of Ke-Omni-R, Audio-Reasoner's `<THINK>` and the tags in it, and those of their kin."""
_ANSWER_TAG = re.compile(r"<(answer|response|conclusion|final|final_answer)>", re.IGNORECASE)
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_BRACE = re.compile(r"\\boxed\s*\{|[{}]")
_CONTROL_TOKEN = re.compile(r"<\|[^|<>]*\|>|</?s>|<(?:eos|bos|pad|unk|end_of_turn|start_of_turn)>")


@dataclass(frozen=True)
class AnswerParts:
    """A reply, taken apart."""

    thought: str
    """Text of the thought, without its tags; empty where there is none."""
    answer: str
    """The part that counts as the answer, without tags, control tokens and the space around it."""
    tags: tuple[str, ...]
    """Tags of `<think>` and `<answer>` in the order in which they stand in the reply."""
    thinks_well: bool
    """The reply is `<think>...</think> <answer>...</answer>`: each tag once, nothing before or after them, at least a
    word in the thought, and an answer."""
    answers_well: bool
    """The reply is `<answer>...</answer>`: each tag once, no thought, nothing before or after them, and an answer."""
    tagged: str | None = None
    """Text of the first `<answer>...</answer>` of the reply, as Ke-Omni-R and R1-AQA read it; None: there is none."""
    thought_is_closed: bool = False
    """The thought ends with its closing tag."""
    thought_start: int = 0
    """Characters of the reply before the thought."""

    @property
    def thought_words(self) -> int:
        """Words of the thought, as `words_of` counts them."""
        return len(words_of(self.thought))

    @property
    def has_thought(self) -> bool:
        """Whether there is a thought that is closed and holds at least a word."""
        return self.thought_is_closed and self.thought_words > 0

    @property
    def is_tagged(self) -> bool:
        return bool(self.tags)


def read_answer(reply: str) -> AnswerParts:
    """Take a reply apart.

    The thought begins at the first `<think>`, or at the beginning where the tag is missing, and ends at the last
    `</think>`; `<thinking>`, `<THINK>` and their kin count, too. Of what is outside of thoughts, the answer is the text
    in the first `<answer>...</answer>`; an `<answer>` that is cut off counts to the end, and without the tag all that
    is outside is the answer. A thought that never ends leaves no answer, unless an `<answer>` stands in it: that one
    ends the thought.
    """
    split = _split_thought(reply)
    tags = tuple(_TAG.findall(reply))
    tagged = _TAGGED.search(reply)
    has_thought = bool(words_of(split.thought))
    has_answer = tagged is not None and bool(tagged[1].strip())
    return AnswerParts(
        split.thought,
        _answer_in(split.outside, tagged[1] if tagged else ""),
        tags,
        tags == THINK + ANSWER and has_thought and has_answer and _WITH_THOUGHT.fullmatch(reply) is not None,
        tags == ANSWER and has_answer and _WITHOUT_THOUGHT.fullmatch(reply) is not None,
        tagged[1].strip() if tagged else None,
        split.is_closed,
        split.start,
    )


def answer_in_form(reply: str, form: AnswerForm) -> str | None:
    r"""The answer where a prompt wants it: the first `<answer>...</answer>`, the last `\boxed{...}`, or the free text.

    Returns:
        None where the reply is not in the form.
    """
    parts = read_answer(reply)
    if form == "tags":
        return parts.tagged
    return last_boxed(parts.answer) if form == "boxed" else parts.answer


def last_boxed(text: str) -> str | None:
    r"""The text in the last `\boxed{...}` whose braces are closed; None where there is none."""
    opened: list[re.Match[str]] = []
    start, boxed = -1, None
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and (opening := opened.pop())[0] != "{" and opening.start() > start:
            start, boxed = opening.start(), text[opening.end() : brace.start()].strip()
    wrapped = _LATEX_TEXT.fullmatch(boxed or "")
    return wrapped[1].strip() if wrapped else boxed


# ------------------------------------------------------------------------------------------------ private


@dataclass(frozen=True)
class _Split:
    thought: str
    outside: str
    is_closed: bool
    start: int


def _split_thought(reply: str) -> _Split:
    """Split a reply into its thought, from the first to the last one, and all that is outside of thoughts."""
    spans = list(_thought_spans(reply))
    if not spans:
        return _Split("", reply, False, 0)
    outside, place = "", 0
    for span in spans:
        outside += reply[place : span.opening]
        place = span.after
    start, end = spans[0].start, spans[-1].end
    thought = reply[start:end]
    lead = len(thought) - len(thought.lstrip())
    return _Split(thought.strip(), outside + reply[place:], end < place, start + lead)


class _Span(NamedTuple):
    """A thought in a reply, in characters."""

    opening: int
    """Beginning of the opening tag."""
    start: int
    end: int
    after: int
    """End of the closing tag; `end` where there is none."""


def _thought_spans(reply: str) -> Iterator[_Span]:
    """Yield each thought. A thought within a thought belongs to it.

    All before a closing tag that nothing opens is a thought, unless an answer in its tags is in it.
    """
    depth, opening, start, last = 0, 0, 0, None
    for tag in _THOUGHT_TAG.finditer(reply):
        if not (tag[1] or tag[2]):
            if not depth:
                opening, start = tag.span()
            depth += 1
        elif depth > 1:
            depth, last = depth - 1, tag
        elif depth or not _TAGGED.search(reply, start, tag.start()):
            yield _Span(opening, start, tag.start(), tag.end())
            depth, opening, start, last = 0, tag.end(), tag.end(), None
    if depth and last is not None:  # more are opened than closed
        yield _Span(opening, start, last.start(), last.end())
    elif depth:
        answer = _ANSWER_TAG.search(reply, start)
        end = answer.start() if answer else len(reply)
        yield _Span(opening, start, end, end)


def _answer_in(outside: str, tagged: str) -> str:
    """The answer in what is outside of thoughts; where nothing is there, that of tags within a thought."""
    text = _CONTROL_TOKEN.sub(" ", outside)
    opening = _ANSWER_TAG.search(text)
    if opening:
        closing = re.compile(rf"</{opening[1]}>", re.IGNORECASE).search(text, opening.end())
        text = text[opening.end() : closing.start() if closing else len(text)]
    text = text.replace(ANSWER[1], "").strip()
    return text or tagged.strip()
