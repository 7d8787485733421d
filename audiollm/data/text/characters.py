"""One form of the same characters: composed (NFC), without those that nobody sees."""

from __future__ import annotations

import re
import unicodedata

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
