"""Text forms against hand-worked answers, and the properties that comparing relies on."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audiollm.data.text import recognition_form, spoken_form


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("7", "seven"),
        ("take 7, please", "take seven, please"),
        ("the 3rd of 21", "the third of twenty-one"),
        ("007", "zero zero seven"),
        ("-5 degrees", "minus five degrees"),
        ("1,200", "one thousand, two hundred"),
        ("0.5", "zero point five"),
        ("10,20", "ten,twenty"),
        ("mp3", "mp three"),
        ("A-4", "A-four"),
        ("1234567890123456", "one two three four five six seven eight nine zero one two three four five six"),
    ],
)
def test_spoken_form(written: str, spoken: str) -> None:
    assert spoken_form(written) == spoken


def test_other_languages_and_unknown_ones() -> None:
    assert spoken_form("Nummer 21", "de") == "Nummer einundzwanzig"
    with pytest.raises(ValueError, match="'qq'"):
        spoken_form("7", "qq")


@given(st.text())
def test_spoken_form_leaves_no_digit_and_nothing_else_changes(text: str) -> None:
    assert not set(spoken_form(text)) & set(string.digits)
    assert spoken_form(spoken_form(text)) == spoken_form(text)
    if not set(text) & set(string.digits):
        assert spoken_form(text) == text


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("Don’t STOP!", "don't stop"),
        ("'Tis rock 'n' roll", "tis rock n roll"),
        ("twenty-one", "twenty one"),
        ("ＡＢＣ ﬁne", "abc fine"),
        ("Müller, naïve", "müller naïve"),
        (" \t\n", ""),
    ],
)
def test_recognition_form(text: str, form: str) -> None:
    assert recognition_form(text) == form


@given(st.text())
def test_recognition_form_is_settled_and_has_single_spaces(text: str) -> None:
    form = recognition_form(text)
    assert recognition_form(form) == form
    assert form == " ".join(form.split())
