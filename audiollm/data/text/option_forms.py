"""The form in which the options of a question are looked for in a reply."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from audiollm.data.text.forms import recognition_form
from audiollm.data.text.words import settle_characters

OPENING, CLOSING = "\"'([*`", "\"')]*`.,:;!?"
"""Characters around a word that are no part of it."""
SIGNS = str.maketrans({"♯": "#", "♭": "b", "\u2212": "-"})
_ARTICLE = re.compile(
    r"(?<![\w.'-])(?:[Aa]n?|AN|[Tt]he|THE)\s+(?=[^\W\d_])(?!(?i:major|minor|flat|sharp|maj|min)\b)"
)
_QUOTE = re.compile(r"(?<!\w)['\"]|['\"](?!\w)")
_SIGN = re.compile(r"[#\u266f\u266d]|\b[A-G]b(?:m|maj|min|dim|aug|\d)*\b|(?<!\w)[-+\u2212]\d")
"""Signs that tell one option from another: those of notes and of numbers."""
_UNIT = re.compile(r"(?<=\d)(?=[a-z]{2,})")
_Strictness = Literal["loose", "words", "signs"]


@dataclass(frozen=True)
class OptionForm:
    """Brings options and replies to one form.

    Args:
        strictness: `words` is `recognition_form`; `loose` also leaves articles out and has numbers in digits; `signs`
            keeps signs within and before words.
    """

    strictness: _Strictness

    def __call__(self, text: str) -> str:
        plain = self.plain(text)
        return signed_form(plain) if self.strictness == "signs" else recognition_form(plain)

    def plain(self, text: str) -> str:
        """A text in lower case with its punctuation, in which forms of options are looked for (`edges`)."""
        text = (
            unicodedata.normalize("NFKC", settle_characters(html.unescape(text)))
            .translate(SIGNS)
            .replace("\u2019", "'")
        )
        if self.strictness == "loose":
            text = _ARTICLE.sub("", _QUOTE.sub(" ", text))
            text = in_digits(text).replace("&", " and ")
        text = text.lower()
        return _UNIT.sub(" ", text) if self.strictness == "loose" else text

    @property
    def edges(self) -> tuple[str, str, str]:
        """Patterns of what stands before, between and behind the words of an option."""
        if self.strictness == "signs":
            opening, closing = re.escape(OPENING), re.escape(CLOSING)
            return rf"(?<![^\s{opening}])", rf"[\s{opening}{closing}]+", rf"(?![^\s{closing}])"
        return r"(?<!\w)", r"[\W_]+", r"(?!\w)"


def option_form(choices: Sequence[str]) -> OptionForm:
    """Return what brings options and replies to one form.

    It is the loosest form that tells the options apart; of `F#` and `Eb`, of `-5 dB`, signs are kept.
    """
    if loosest_form(choices).strictness == "signs":
        return OptionForm("signs")
    forms = [OptionForm(strictness) for strictness in ("loose", "words", "signs")]
    return max(forms, key=lambda form: len({form(choice) for choice in choices} - {""}))


def loosest_form(texts: Iterable[str]) -> OptionForm:
    """The loosest form of texts, which keeps signs where one of them has some: `C# major` is not `C major`."""
    return OptionForm("signs" if any(_SIGN.search(text) for text in texts) else "loose")


def are_told_apart(choices: Sequence[str]) -> bool:
    """Whether a reply with the text of an option names that one alone."""
    form = option_form(choices)
    return len({form(choice) for choice in choices} - {""}) == len(choices)


def signed_form(text: str) -> str:
    """Lower case and single spaces, without the punctuation around words; signs within and before them stay."""
    text = unicodedata.normalize("NFKC", settle_characters(text)).lower().translate(SIGNS)
    words = (word.lstrip(OPENING).rstrip(CLOSING) for word in text.split())
    return " ".join(word for word in words if word)


def in_digits(text: str) -> str:
    """A text with its English number words in digits: `twenty-one dogs` -> `21 dogs`, `the second` -> `the 2nd`."""
    from text_to_num import alpha2digit

    return str(alpha2digit(text, "en", threshold=0))
