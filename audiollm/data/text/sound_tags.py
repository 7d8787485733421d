"""Sounds written into a text: `[laugh]` as Higgs Audio V2 writes it, and the words without them."""

from __future__ import annotations

import re

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
