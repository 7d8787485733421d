"""Whether an answer is the key: numbers with and without their units, tolerances, and the sentence that states it."""

from __future__ import annotations

import pytest

from audiollm.data.records.sample import Message, Sample, TextPart
from audiollm.rl.rewards.batch import SampledAnswer
from audiollm.rl.rewards.matching import is_right
from audiollm.rl.rewards.settings import AccuracySettings, Match
from audiollm.rl.rewards.texts import accuracy


@pytest.mark.parametrize(
    ("answer", "key", "match", "tolerance", "right"),
    [
        ("2 dogs", "2", "number", 1e-6, True),
        ("2 s", "2", "number", 1e-6, False),
        ("2 seconds", "2", "number", 1e-6, False),
        ("about 7", "7", "number", 1e-6, True),
        ("roughly seven dogs", "7", "number", 1e-6, True),
        ("about 7 or 8", "7", "number", 1e-6, False),
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


@pytest.mark.parametrize(
    ("answer", "key", "choices", "language", "right"),
    [
        ("zwei", "2", (), "de", True),
        ("2", "zwei", (), "German", True),
        ("Einundzwanzig.", "21", (), "de", True),
        ("zwei Hunde", "2 Hunde", (), "de-AT", True),
        ("drei", "2", (), "de", False),
        ("vingt-deux", "22", (), "fr", True),
        ("dieciséis", "16", (), "es", True),
        ("двадцать", "20", (), "ru", True),
        ("二", "2", (), "zh", True),
        ("minus fünf Grad", "-5 Grad", (), "de", True),
        ("fünf Grad", "-5 Grad", (), "de", False),
        ("zwei", "2", ("2", "3"), "de", True),
        ("drei", "2", ("2", "3"), "de", False),
        ("Es sind zwei.", "2", ("2", "3"), "de", True),
        ("two", "2", (), "de", True),
        ("zwei", "2", (), None, False),
        ("zwei", "2", (), "en", False),
    ],
)  # fmt: skip
def test_number_words_of_the_samples_language(
    answer: str, key: str, choices: tuple[str, ...], language: str | None, right: bool
) -> None:
    turns = (("user", "How many?"), ("assistant", key))
    messages = [Message(role=role, content=[TextPart(text=text)]) for role, text in turns]  # type: ignore[arg-type]
    metadata = {"choices": list(choices), **({"language": language} if language else {})}
    assert is_right(answer, key, choices, "auto", 0.0, True, language) is right
    sample = Sample(id="a", messages=messages, task="question", metadata=metadata)
    assert accuracy(SampledAnswer(sample, answer, 0), AccuracySettings(form="free")) == float(right)
