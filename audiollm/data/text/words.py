"""Words of a text in any language, and one form of the same characters: NFC, without those that nobody sees.

A word is what white space separates, without punctuation around it; in scripts that do not separate words (Chinese,
Japanese, Thai, Lao, Khmer, Burmese) it is one character.
"""

from __future__ import annotations

import re
import unicodedata

_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"([{_UNSPACED}][\u0e31\u0e34-\u0e3a\u0e47-\u0e4e]*)")
_SAME = str.maketrans({"\u0130": "i", "\u0131": "i", "\u2019": "'"})
"""Turkish i, which lower case would take apart, and the curly apostrophe."""


def words_of(text: str) -> list[str]:
    """Words in lower case (NFKC, nothing invisible), without punctuation around them."""
    spaced = _WORD.sub(
        r" \1 ", unicodedata.normalize("NFKC", settle_characters(text)).translate(_SAME).casefold()
    )
    bare = (_strip_punctuation(token) for token in spaced.split())
    return [word for word in bare if word]


def is_unspaced(word: str) -> bool:
    """Whether a word is a character of a script that does not separate words."""
    return _WORD.match(word) is not None


def _strip_punctuation(token: str) -> str:
    """A part of a text without what is neither letter, mark nor number at its ends."""
    word_places = [place for place, letter in enumerate(token) if unicodedata.category(letter)[0] in "LMN"]
    return token[word_places[0] : word_places[-1] + 1] if word_places else ""


_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b\u200e\u200f\u2060-\u206f\ufe00-\ufe0f\ufeff"
    "\ufff9-\ufffb]"
)
"""Soft hyphens, zero-width spaces, direction and variation marks, byte order marks."""
_JOINERS = re.compile("[\u200c\u200d]")
_NEEDS_JOINERS = re.compile("[\u0600-\u06ff\u0750-\u077f\u0900-\u0dff\u1000-\u109f\U0001f000-\U0001faff]")
"""Scripts that are spelled with zero-width joiners, and pictures that are joined by them."""


def settle_characters(text: str) -> str:
    """A text in NFC without soft hyphens, zero-width spaces, direction marks and byte order marks.

    Zero-width joiners stay in scripts that are spelled with them (Persian, Hindi). Two texts that look the same compare
    as equal afterwards. White space stays as it is.
    """
    if text.isascii():
        return text
    text = _INVISIBLE.sub("", text)
    if _JOINERS.search(text) and not _NEEDS_JOINERS.search(text):
        text = _JOINERS.sub("", text)
    return unicodedata.normalize("NFC", text)
