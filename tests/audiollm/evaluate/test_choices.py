"""Options that a reply names: several letters, several texts, lists, refusals, and denials that are far away."""

from __future__ import annotations

import pytest

from audiollm.evaluate.listening.choices import read_choice

ANIMALS = ["a dog", "a cat", "a horse"]


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        ("The answer is B.", 1),
        ("The answer is B or C.", None),
        ("The answer is (B) and (C).", None),
        ("The answer is a cat.", 1),
        ("The answer is a cat or a horse.", None),
        ("(A) a dog\n(B) a cat\n(C) a horse", None),
        ("I cannot hear the audio, so I cannot say whether it is a dog.", None),
        ("It is not a dog.", None),
        ("I have no other clear sounds to report from this short recording than a dog", 0),
        ("No, it is a cat.", 1),
    ],
)
def test_a_reply_names_one_option_or_none(reply: str, choice: int | None) -> None:
    assert read_choice(reply, ANIMALS) == choice


def test_yes_and_no_begin_an_answer_where_they_are_the_options() -> None:
    assert read_choice("Yes, somebody speaks.", ["Yes", "No"]) == 0
    assert read_choice("No, it is a cat.", ["No", "a cat"]) != 0
