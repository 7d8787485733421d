"""Replies with thoughts in odd places: which part is the thought, which the answer, and where a prompt wants it."""

from __future__ import annotations

import pytest

from audiollm.data.chat.question_prompts import AnswerForm, answer_form
from audiollm.data.records.sample import Message, Sample, TextPart
from audiollm.evaluate.listening.answer_parts import answer_in_form, read_answer


@pytest.mark.parametrize(
    ("reply", "thought", "answer"),
    [
        ("<think>a <think>b</think> c <answer>Man</answer></think><answer>Woman</answer>",
         "a <think>b</think> c <answer>Man</answer>", "Woman"),
        ("<think>a <think>b</think>Woman", "a <think>b", "Woman"),
        ("<think>a <think>b</think> c</think><think>d</think>Woman", "a <think>b</think> c</think><think>d", "Woman"),
        ("Woman <think>is it?</think>", "is it?", "Woman"),
        ("<answer>Woman</answer> it sounds high</think> or not", "", "Woman"),
        ("<think>a</think>Woman</s>", "a", "Woman"),
    ],
)  # fmt: skip
def test_thoughts_within_thoughts_and_behind_answers(reply: str, thought: str, answer: str) -> None:
    parts = read_answer(reply)
    assert (parts.thought, parts.answer) == (thought, answer)
    assert reply[parts.thought_start :].startswith(thought)


@pytest.mark.parametrize(
    ("reply", "form", "answer"),
    [
        ("<think>so <answer>Man</answer></think><answer>Woman</answer>", "tags", "Man"),  # as published
        ("<think>so <answer>Man</answer></think>Woman", "tags", "Man"),
        ("<think>so <answer>Man</answer></think><answer>Woman</answer>", "free", "Woman"),
        (r"<think>\boxed{Man}</think>Woman", "boxed", None),
        (r"<think>\boxed{Man}</think>\boxed{Woman}", "boxed", "Woman"),
        (r"\boxed{x^{2}} \boxed{Woman", "boxed", "x^{2}"),
    ],
)
def test_an_answer_is_read_in_the_form_of_its_prompt(
    reply: str, form: AnswerForm, answer: str | None
) -> None:
    assert answer_in_form(reply, form) == answer


@pytest.mark.parametrize("role", ["system", "user"])
@pytest.mark.parametrize(
    ("wording", "form"),
    [
        ("Answer in <answer> </answer>.", "tags"),
        (r"Answer in \boxed{}.", "boxed"),
        ("Answer.", "free"),
    ],
)
def test_the_system_prompt_may_ask_for_a_form(role: str, wording: str, form: AnswerForm) -> None:
    texts = {"system": "You listen.", "user": "Who speaks?", role: wording}
    messages = [
        Message.model_validate({"role": name, "content": [TextPart(text=text)]})
        for name, text in texts.items()
    ]
    assert answer_form(Sample(id="a", messages=messages, task="question")) == form
