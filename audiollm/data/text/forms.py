"""The two forms of a text that others compare: as spoken, and as a recognizer would write it; tags of sounds."""

from __future__ import annotations

import re
import unicodedata
import warnings
from functools import cache

from audiollm.data.text import normalize, numerals
from audiollm.data.text.abbreviations import read_titles
from audiollm.data.text.languages import language_code, language_of
from audiollm.data.text.words import settle_characters

_NUMBER = re.compile(
    r"(?P<sign>(?<![\w-])-)?(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?P<fraction>\.[0-9]+)?"
    r"(?P<ordinal>(?:st|nd|rd|th)\b)?",
    re.IGNORECASE,
)
_DIGIT = re.compile("[0-9]")
_HAN_DIGITS = str.maketrans("0123456789", "零一二三四五六七八九")
_LONGEST_NUMBER = 15
"""Digits; what is longer (an account, a telephone) is read digit by digit, as is what begins with a zero."""


def spoken_form(text: str, language: str | None = None) -> str:
    """The text as it is spoken: `"Dr. Li paid $5 on 3/4/2024"` -> `"doctor Li paid five dollars on the fourth of ..."`.

    English, Chinese and Japanese by the grammars of `audiollm.data.text.normalize`; other languages by num2words, as
    `audiollm.data.text.numerals` says, and by their titles before names (`Dr. Weber` -> `Doktor Weber`). A language
    that neither knows keeps its digits, which a warning says once.
    Words, markup and white space are kept; characters are brought to one form (`settle_characters`).

    Args:
        language: the code or the English name of a language (`de`, `de-AT`, `German`); by the script where it is not
            given, or names none: Latin letters are English.
    """
    text = settle_characters(text)
    code = language_code(language) or language_of(text)
    code = "zh" if code == "yue" else code  # both write numbers alike
    if code in normalize.LANGUAGES:
        text = normalize.normalize(numerals.read_foreign_money(text) if code == "en" else text, code)
    else:
        text = read_titles(text, code)
        code = numerals.regional(language, code)
        if numerals.can_read(code):
            text = _with_ascii_digits(text)
    if not _DIGIT.search(text):
        return text
    if code not in normalize.LANGUAGES and not numerals.can_read(code):
        _warn_of(code)
        return text
    parts = normalize.MARKUP.split(text)
    return "".join(piece if index % 2 else _say_numbers(piece, code) for index, piece in enumerate(parts))


def prompt_form(text: str, language: str | None = None) -> str:
    """Convert a text to be spoken to the form in prompts, in training and generation: `spoken_form`, sounds as Higgs's
    tags (`[laugh]` as `<SE>[Laughter]</SE>`), single spaces."""
    return " ".join(sound_tags(spoken_form(text, language)).split())


def comparison_form(text: str, language: str | None = None) -> str:
    """The form in which prompts and recognized texts are compared: `recognition_form(spoken_form(text, language))`.

    Args:
        language: the same one for both texts, as in `spoken_form`.
    """
    return recognition_form(spoken_form(text, language))


def recognition_form(text: str) -> str:
    """Lower case, no punctuation but apostrophes inside words, single spaces (Unicode NFKC, nothing invisible)."""
    text = unicodedata.normalize("NFKC", settle_characters(text)).lower()
    text = text.replace("\u2019", "'").replace("\u2018", "'")
    cleaned = "".join(c if c == "'" or unicodedata.category(c)[0] in "LMN" else " " for c in text)
    words = (word.strip("'") for word in cleaned.split())
    return " ".join(word for word in words if word)


def _with_ascii_digits(text: str) -> str:
    """`٢٥` and `২৫` as 25: digits of any script."""
    if text.isascii():
        return text
    return "".join(str(unicodedata.digit(c)) if unicodedata.category(c) == "Nd" else c for c in text)


@cache
def _warn_of(language: str) -> None:
    """Say once for each language and process that its numbers stay digits."""
    warnings.warn(
        f"texts in {language!r} keep their numbers as digits: neither wetext nor num2words knows the language",
        stacklevel=3,
    )


def _say_numbers(text: str, language: str) -> str:
    if language in ("zh", "ja"):
        return text.translate(_HAN_DIGITS)
    if language != "en":
        return numerals.read_numbers(text, language)
    return _NUMBER.sub(_say_english_number, text)


def _say_english_number(match: re.Match[str]) -> str:
    sign, integer, fraction, ordinal = (
        match[name] or "" for name in ("sign", "whole", "fraction", "ordinal")
    )
    digits = integer.replace(",", "")
    if len(digits) > _LONGEST_NUMBER or (digits[0] == "0" and len(digits) > 1):
        words = sign + " ".join(_say(digit) for digit in digits + fraction[1:]) + ordinal
    elif ordinal and not sign and not fraction:
        words = _say(digits, to="ordinal")
    else:
        words = _say(sign + digits + fraction) + ordinal
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return " " * before.isalpha() + words + " " * after.isalpha()


def _say(number: str, to: str = "cardinal") -> str:
    from num2words import num2words

    return str(num2words(number, lang="en", to=to))


_EVENTS = {
    "applause": "Applause",
    "cheering": "Cheering",
    "cough": "Cough",
    "humming": "Humming",
    "laugh": "Laughter",
    "music": "Music",
    "sing": "Singing",
}

_SHORT = re.compile(rf"\[({'|'.join(_EVENTS)})( start| end)?\](?!</SE)", re.IGNORECASE)

_MARKUP = re.compile(r"</?SE(_[se])?>|\[(" + "|".join(_EVENTS.values()) + r")\](?=</SE(_[se])?>)")


def sound_tags(text: str) -> str:
    """`[laugh]` as `<SE>[Laughter]</SE>`, `[music start]` as `<SE_s>[Music]</SE_s>`, its end with `SE_e`."""

    def tag(match: re.Match[str]) -> str:
        mark = {"": "SE", " start": "SE_s", " end": "SE_e"}[(match[2] or "").lower()]
        return f"<{mark}>[{_EVENTS[match[1].lower()]}]</{mark}>"

    return _SHORT.sub(tag, text)


def without_sound_tags(text: str) -> str:
    """The words alone: what a recognizer is to hear. Knows both ways of writing a sound."""
    return " ".join(_MARKUP.sub(" ", sound_tags(text)).split()) if "[" in text else text
