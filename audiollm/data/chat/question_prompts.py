"""The words in which a question with options is put to a model that listens.

Sources: Ke-Omni-R (github.com/shuaijiang/Ke-Omni-R) and R1-AQA (github.com/xiaomi-research/r1-aqa); the published
models were trained on these prompts, to the letter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Literal

from audiollm.data.records.sample import Sample, TextPart
from audiollm.errors import ConfigError, suggestion

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_WORDS = 50
"""Longest thought that Ke-Omni-R's prompt asks for, in words."""
PLAIN = "options"
_LISTED = "{question} Please choose the answer from the following options: {options}."
PROMPTS: Mapping[str, str] = {
    PLAIN: "{question}\n{lettered}\nAnswer with the text of the right option and nothing else.",
    "ke_omni_r": f"{_LISTED} Output the thinking process (less than {{max_words}} words) in <think> </think> "
    "and final answer in <answer> </answer>.",
    "ke_omni_r_direct": f"{_LISTED} Directly output the final answer in <answer> </answer>.",
    "r1_aqa": f"{_LISTED} Output the final answer in <answer> </answer>.",
}
"""Prompts by name. `{options}` is the list as Python writes it, `{lettered}` a line for each option: `(A) rain`."""
AnswerForm = Literal["tags", "boxed", "free"]
"""Where a prompt wants the answer: in `<answer> </answer>`, in `\\boxed{}`, or in free text."""
FIELDS = ("question", "options", "lettered", "max_words")


def question_prompt(
    question: str, choices: Sequence[str], prompt: str = PLAIN, max_words: int = MAX_WORDS
) -> str:
    """Put a question with its options into words.

    Args:
        prompt: a name of `PROMPTS`, or a text with `{question}` and `{options}` or `{lettered}`.
        max_words: fills in `{max_words}`.

    Raises:
        ConfigError: no such prompt, or a text with other fields.
    """
    lettered = "\n".join(f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
    values = {"question": question, "options": list(choices), "lettered": lettered, "max_words": max_words}
    return prompt_text(prompt).format_map(values)


def prompt_text(prompt: str) -> str:
    """The text of a prompt by its name, or a text of one's own, checked.

    Raises:
        ConfigError: no such prompt, or a text with other fields than `FIELDS`, or without the question or its options.
    """
    text = PROMPTS.get(prompt, prompt)
    if "{" not in text:
        raise ConfigError(f"{prompt}: no such prompt", "prompt", suggestion(prompt, PROMPTS))
    try:
        fields = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
    except ValueError as error:
        raise ConfigError(f"the prompt does not read as a template ({error})", "prompt", _REMEDY) from None
    if unknown := sorted(fields - set(FIELDS)):
        raise ConfigError(f"the prompt has an unknown field {{{unknown[0]}}}", "prompt", _REMEDY)
    if "question" not in fields or not fields & {"options", "lettered"}:
        raise ConfigError("the prompt lacks the question or its options", "prompt", _REMEDY)
    return text


def asks_for_tags(prompt: str) -> bool:
    """Whether a prompt asks for the answer in `<answer> </answer>`."""
    return "<answer>" in prompt_text(prompt)


def answer_form(sample: Sample) -> AnswerForm:
    """The form in which a sample wants its answer, by the words of its prompt.

    The right answer tells it, too, where it is written in tags that the prompt does not ask for.
    """
    wording = " ".join(text for role in ("system", "user") for text in sample.texts(role))
    if sample.messages[-1].role == "assistant":
        wording += " ".join(
            content_part.text
            for content_part in sample.messages[-1].content
            if isinstance(content_part, TextPart)
        )
    if "<answer>" in wording:
        return "tags"
    return "boxed" if r"\boxed" in wording else "free"


_REMEDY = f"a name ({', '.join(PROMPTS)}), or a text with {{question}} and {{options}} or {{lettered}}"
