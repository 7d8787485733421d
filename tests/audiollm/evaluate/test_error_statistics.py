"""Text errors and their intervals against closed forms."""

from __future__ import annotations

import pytest

from audiollm.evaluate.report.statistics import bootstrap_ratio
from audiollm.evaluate.report.text_errors import choose_form, count_errors, error_table


def test_an_interval_is_that_of_95_percent() -> None:
    """A share of one half among 400: 1.96 standard errors of 0.025 to either side, as the normal law has it."""
    interval = bootstrap_ratio([0.0, 1.0] * 200, [1.0] * 400)
    assert interval is not None
    low, high = interval
    assert high - low == pytest.approx(2 * 1.96 * 0.025, rel=0.06)
    assert (low + high) / 2 == pytest.approx(0.5, abs=0.005)


def test_errors_and_words_of_an_utterance_stay_together() -> None:
    """Where every text has one error in ten words, there is nothing to be unsure of."""
    words = [10.0, 200.0, 30.0, 1000.0]
    assert bootstrap_ratio([n / 10 for n in words], words) == pytest.approx((0.1, 0.1))
    assert bootstrap_ratio([1.0], [10.0]) is None


def test_long_texts_weigh_more_in_the_rate_and_not_in_the_mean_of_texts() -> None:
    errors = [count_errors("a b c d e f g h", "a b c d e f g h"), count_errors("a b", "x y z")]
    table = error_table(errors)
    assert [each.units for each in errors] == [8, 2], "words that were asked for"
    assert (table["rate"], table["utterance_mean"]) == (pytest.approx(3 / 10), pytest.approx(3 / 4))
    made_up = error_table([*errors, count_errors("", "words out of nothing")])
    assert (made_up["rate"], made_up["insertions"], made_up["n"]) == (pytest.approx(7 / 10), 5, 3)
    assert count_errors("two words", "").deletions == 2


@pytest.mark.parametrize(
    ("language", "text", "tokens"),
    [
        ("zh", "你好 吗", 3),
        ("ja", "おはよう", 4),
        ("th", "ดี", 2),
        ("en", "good day", 2),
        ("de", "guten Tag", 2),
    ],
)
@pytest.mark.parametrize("form", ["seed-tts", "spoken"])
def test_languages_without_spaces_are_compared_by_characters(
    form: str, language: str, text: str, tokens: int
) -> None:
    chosen = choose_form(form, language)
    assert chosen.unit == ("character" if language in ("zh", "ja", "th") else "word")
    assert len(chosen.apply(text).split()) == tokens
