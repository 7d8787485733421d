"""The two forms of a text that others compare: as it is spoken, and as a recognizer would write it."""

from __future__ import annotations

import re
import unicodedata

_NUMBER = re.compile(
    r"(?P<sign>(?<![\w-])-)?(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?P<fraction>\.[0-9]+)?"
    r"(?P<ordinal>(?:st|nd|rd|th)\b)?",
    re.IGNORECASE,
)
_LONGEST_NUMBER = 15
"""Digits; what is longer (an account, a telephone) is read digit by digit, as is what begins with a zero."""


def spoken_form(text: str, language: str = "en") -> str:
    """Digits as words (`"take 7"` -> `"take seven"`, `"3rd"` -> `"third"`); everything else is kept.

    Args:
        language: a language code of num2words; ordinals by suffix are read in English only.

    Raises:
        ValueError: num2words knows no such language.
    """
    if not any(character in "0123456789" for character in text):
        return text
    return _NUMBER.sub(lambda match: _say_number(match, language), text)


def recognition_form(text: str) -> str:
    """Lower case, no punctuation but apostrophes inside words, single spaces (Unicode NFKC).

    Wherever asked and recognized texts are compared, both are `recognition_form(spoken_form(text))`.
    """
    text = unicodedata.normalize("NFKC", text).lower().replace("\u2019", "'").replace("\u2018", "'")
    kept = "".join(c if c == "'" or unicodedata.category(c)[0] in "LMN" else " " for c in text)
    words = (word.strip("'") for word in kept.split())
    return " ".join(word for word in words if word)


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
