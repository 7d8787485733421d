"""The form in which the options of a question are looked for in a reply."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence

from audiollm.data.text.forms import recognition_form

OPENING, CLOSING = "\"'([*`", "\"')]*`.,:;!?"
"""Characters around a word that are no part of it."""
_SIGNS = str.maketrans({"♯": "#", "♭": "b", "\u2212": "-"})


def option_form(choices: Sequence[str]) -> Callable[[str], str]:
    """Return the function that brings options and replies to one form.

    It is `recognition_form`; where that makes two options one (`F` and `F#`, `5 dB` and `-5 dB`), signs are kept.
    """
    return max((recognition_form, signed_form), key=lambda form: len({form(each) for each in choices} - {""}))


def are_told_apart(choices: Sequence[str]) -> bool:
    """Whether a reply with the text of an option names that one alone."""
    form = option_form(choices)
    return len({form(each) for each in choices} - {""}) == len(choices)


def signed_form(text: str) -> str:
    """Lower case and single spaces, without the punctuation around words; signs within and before them stay."""
    text = unicodedata.normalize("NFKC", text).lower().translate(_SIGNS)
    words = (word.lstrip(OPENING).rstrip(CLOSING) for word in text.split())
    return " ".join(word for word in words if word)
