"""Text forms against hand-worked answers, and the properties that comparing relies on."""

from __future__ import annotations

import os
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audiollm.data.text.forms import recognition_form, spoken_form
from audiollm.data.text.normalize import MARKUP
from audiollm.data.text.option_forms import OptionForm
from audiollm.data.text.words import settle_characters, words_of
from audiollm.evaluate.report.text_errors import FORMS, choose_form

SHARED = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data"
)


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("7", "seven"),
        ("0", "zero"),
        ("take 7, please", "take seven, please"),
        ("the 3rd of 21", "the third of twenty one"),
        ("007", "oh oh seven"),
        ("-5 degrees", "negative five degrees"),
        ("1,200", "one thousand two hundred"),
        ("21,000 men, 1,000 women", "twenty one thousand men, one thousand women"),
        ("several thousand of 5", "several thousand of five"),
        ("1000 people", "one thousand people"),
        ("0.5", "zero point five"),
        ("10,20", "ten,twenty"),
        ("A-4", "A-four"),
        ("Dr. Smith came at 10:30 a.m. today", "doctor Smith came at ten thirty AM today"),
        ("$12.50 on June 3, 2024", "twelve point five dollars on the third of june, twenty twenty four"),
        ("5% of 3.5 kg", "five percent of three point five kilograms"),
        ("5 m away", "five meters away"),
        ("in the 1990s", "in the nineteen nineties"),
        ("1999-2003", "nineteen ninety nine to two thousand and three"),
        ("call 555-123-4567", "call five five five, one two three, four five six seven"),
        ("World War II", "World War two"),
        ("no. 5", "number five"),
        ('say "5" now', 'say "five" now'),
        ("共465篇，约315万字", "共四百六十五篇，约三百一十五万字"),
        ("2024年5月6日10:30", "二零二四年五月六日十点三十分"),
        ("价格是￥12.50", "价格是十二点五零元"),
        ("50%的人", "百分之五十的人"),
        ("雪の花 5個", "雪の花 五個"),
    ],
)
def test_spoken_form(written: str, spoken: str) -> None:
    assert spoken_form(written) == spoken


@pytest.mark.parametrize(
    "text",
    [
        "[SPEAKER0] Hello.\n[SPEAKER1] <SE>[Laughter]</SE> Hi!",
        "<|eot_id|> stays",
        "I don't mix; I am here - Henry said so...",
        "  two  spaces\tand\x00control\n\n",
        "\ud800 a lone surrogate",
        "مرحبا привет",
        "می\u200cخواهم",
        "",
    ],
)
def test_markup_white_space_and_what_nobody_can_read_are_kept(text: str) -> None:
    assert spoken_form(text) == text


def test_what_the_grammars_have_no_path_for_is_still_spoken() -> None:
    assert spoken_form("@home #1") == "at home number one"
    assert spoken_form("₿500 \u200b6") == "₿five hundred six"
    assert spoken_form("see @home on May 3 at 5pm") == "see at home on the third of May at five PM"


def test_a_long_text_takes_time_in_proportion_and_loses_nothing() -> None:
    text = "I have 5 apples and 3.2 km to go. " * 1500
    said = spoken_form(text)
    assert said == "I have five apples and three point two kilometers to go. " * 1500
    assert spoken_form("1" * 1000).count("one") == 1000


@pytest.mark.parametrize(
    ("folder", "language", "least"),
    [("english", "en", 0.89), ("chinese", "zh", 0.91), ("japanese", "ja", 1.0)],
)
def test_published_cases(folder: str, language: str, least: float) -> None:
    """WeTextProcessing's own cases; the rest asks for filler words or erhua to be removed, which we do not, or for
    abbreviations without any context (`Rev.`) to be read."""
    cases = SHARED / "text_benchmarks" / "WeTextProcessing" / "tn" / folder / "test" / "data"
    if not cases.is_dir():
        pytest.skip("the published cases are not at hand")
    lines = [line for file in sorted(cases.glob("*.txt")) for line in file.read_text("utf-8").split("\n")]
    pairs = [line.split(" => ", 1) for line in lines if " => " in line]
    right = sum(
        recognition_form(spoken_form(written, language)) == recognition_form(spoken)
        for written, spoken in pairs
    )
    assert right / len(pairs) >= least


def test_signs_are_read_by_name() -> None:
    assert [spoken_form(sign) for sign in "πΩº"] == ["pi", "omega", "degree"]


@settings(max_examples=60)
@given(st.text())
def test_spoken_form_never_raises_and_leaves_no_digit(text: str) -> None:
    said = spoken_form(text, "en")
    assert not set(MARKUP.sub("", said)) & set(string.digits)
    assert not settle_characters(text).strip() or said.strip()


READ_BY_NAME = "º\u00b5\u2126" + "".join(map(chr, range(0x391, 0x3CA)))
"""Greek letters, the signs of micro and ohm, and what is typed for a degree."""


@given(st.text(alphabet=st.characters(categories=["L"], exclude_characters=READ_BY_NAME)))
def test_spoken_form_keeps_letters(text: str) -> None:
    assert spoken_form(text) == settle_characters(text)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("Don’t STOP!", "don't stop"),
        ("'Tis rock 'n' roll", "tis rock n roll"),
        ("twenty-one", "twenty one"),
        ("ＡＢＣ ﬁne", "abc fine"),
        ("Müller, naïve", "müller naïve"),
        (" \t\n", ""),
        ("Mu\u0308ller na\u00efve", "müller naïve"),
        ("co\u00adoperate zero\u200bwidth \ufeffmark\u200e", "cooperate zerowidth mark"),
    ],
)
def test_recognition_form(text: str, form: str) -> None:
    assert recognition_form(text) == form


NFC, NFD = "Zoë’s na\u00efve caf\u00e9", "Zoe\u0308’s na\u0131\u0308ve cafe\u0301".replace("\u0131", "i")


@pytest.mark.parametrize(
    "text",
    [NFD, "Z\u200bo\u00adë’s na\ufeffïve\u200e caf\u2060é", "\ufeff" + NFC, NFC.replace(" ", " \u200d")],
)
def test_texts_that_look_the_same_compare_as_equal(text: str) -> None:
    assert settle_characters(text) == settle_characters(NFC) == NFC
    assert words_of(text) == words_of(NFC)
    assert spoken_form(text) == spoken_form(NFC)
    for form in FORMS:
        compared = choose_form(form, "en").apply
        assert compared(text) == compared(NFC)
    for strictness in ("loose", "words", "signs"):
        assert OptionForm(strictness)(text) == OptionForm(strictness)(NFC)  # type: ignore[arg-type]


def test_joiners_stay_where_a_script_is_spelled_with_them() -> None:
    for text in ("می\u200cخواهم", "क्\u200dष", "\U0001f468\u200d\U0001f469"):
        assert settle_characters(text) == text


@given(st.text())
def test_recognition_form_is_settled_and_has_single_spaces(text: str) -> None:
    form = recognition_form(text)
    assert recognition_form(form) == form
    assert form == " ".join(form.split())
