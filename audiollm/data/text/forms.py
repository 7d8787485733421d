"""The two forms of a text that others compare: as it is spoken, and as a recognizer would write it."""

from __future__ import annotations

import re
import unicodedata

from audiollm.data.text import normalize
from audiollm.data.text.sound_tags import sound_tags

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

    English, Chinese and Japanese by the grammars of `audiollm.data.text.normalize`; of other languages, and of what the
    grammars leave, digits by num2words. Words, markup and white space are kept, and no ASCII digit is left outside
    of markup.

    Args:
        language: `en`, `zh`, `ja`, or another language code of num2words; by the script where it is not given.

    Raises:
        ValueError: num2words knows no such language.
    """
    language = language or language_of(text)
    if language in normalize.LANGUAGES:
        text = normalize.normalize(text, language)
    if not _DIGIT.search(text):
        return text
    parts = normalize.MARKUP.split(text)
    return "".join(part if kept % 2 else _say_numbers(part, language) for kept, part in enumerate(parts))


def prompt_form(text: str, language: str | None = None) -> str:
    """Convert a text to be spoken to the form in prompts, in training and generation: `spoken_form`, sounds as Higgs's
    tags (`[laugh]` as `<SE>[Laughter]</SE>`), single spaces."""
    return " ".join(sound_tags(spoken_form(text, language)).split())


def language_of(text: str) -> str:
    """`ja` where there are kana, `zh` where there are Han characters, else `en`."""
    if re.search(r"[\u3041-\u30ff]", text):
        return "ja"
    return "zh" if re.search(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]", text) else "en"


def recognition_form(text: str) -> str:
    """Lower case, no punctuation but apostrophes inside words, single spaces (Unicode NFKC).

    Wherever asked and recognized texts are compared, both are `recognition_form(spoken_form(text))`.
    """
    text = unicodedata.normalize("NFKC", text).lower().replace("\u2019", "'").replace("\u2018", "'")
    kept = "".join(c if c == "'" or unicodedata.category(c)[0] in "LMN" else " " for c in text)
    words = (word.strip("'") for word in kept.split())
    return " ".join(word for word in words if word)


def _say_numbers(text: str, language: str) -> str:
    if language in ("zh", "ja"):
        return text.translate(_HAN_DIGITS)
    return _NUMBER.sub(lambda match: _say_number(match, language), text)


def _say_number(match: re.Match[str], language: str) -> str:
    sign, whole, fraction, ordinal = (match[name] or "" for name in ("sign", "whole", "fraction", "ordinal"))
    digits = whole.replace(",", "")
    if len(digits) > _LONGEST_NUMBER or (digits[0] == "0" and len(digits) > 1):
        said = sign + " ".join(_say(digit, language) for digit in digits + fraction[1:]) + ordinal
    elif ordinal and not sign and not fraction and language == "en":
        said = _say(digits, language, to="ordinal")
    else:
        said = _say(sign + digits + fraction, language) + ordinal
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return " " * before.isalpha() + said + " " * after.isalpha()


def _say(number: str, language: str, to: str = "cardinal") -> str:
    from num2words import num2words

    try:
        return str(num2words(number, lang=language, to=to))
    except NotImplementedError:
        raise ValueError(f"num2words knows no language {language!r}") from None
