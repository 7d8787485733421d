"""Whether an answer is the key: numbers with and without their units, tolerances, and the sentence that states it."""

from __future__ import annotations

import pytest

from audiollm.rl.rewards.matching import is_right
from audiollm.rl.rewards.settings import Match


@pytest.mark.parametrize(
    ("answer", "key", "match", "tolerance", "right"),
    [
        ("2 dogs", "2", "number", 1e-6, True),
        ("2 s", "2", "number", 1e-6, False),
        ("2 seconds", "2", "number", 1e-6, False),
        ("2", "2 s", "number", 1e-6, False),
        ("2000 ms", "2 s", "number", 1e-6, True),
        ("2.01", "2", "number", 1e-2, True),
        ("2.01", "2", "number", 1e-3, False),
        ("It barks a lot. The animal is a dog.", "a dog", "text", 0.0, True),
        ("The animal is a dog. It barks a lot.", "a dog", "text", 0.0, True),
        ("It barks a lot. The animal is not a dog.", "a dog", "text", 0.0, False),
    ],
)
def test_a_free_answer(answer: str, key: str, match: Match, tolerance: float, right: bool) -> None:
    assert is_right(answer, key, (), match, tolerance) is right


@pytest.mark.parametrize(("answer", "right"), [("A dog.", True), ("The animal is a dog.", False)])
def test_an_answer_in_tags_is_the_key_alone(answer: str, right: bool) -> None:
    assert is_right(answer, "a dog", (), "text", 0.0, is_free=False) is right


@pytest.mark.parametrize(("terms", "right"), [(3, True), (120, False)])
def test_a_formula_of_more_than_two_hundred_characters_is_compared_as_text(terms: int, right: bool) -> None:
    formula = "+".join(["1"] * terms)
    assert is_right(formula, str(terms), (), "math", 0.0) is right
    assert is_right(formula, formula, (), "math", 0.0)
