"""What Higgs Audio V2 writes into its prompts besides the text: scene, speakers, turns, sounds.

The published form (boson-ai/higgs-audio, `examples/generation.py`) of a system prompt with a scene:

    Generate audio following instruction.

    <|scene_desc_start|>
    Audio is recorded from a quiet room.

    SPEAKER0: masculine, moderate pitch
    SPEAKER1: <reference audio>
    <|scene_desc_end|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from audiollm.data.records.sample import AudioPart, Part, TextPart

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


def speaker_names(speakers: Sequence[str]) -> dict[str, str]:
    """`{"ann": "SPEAKER0", ...}` in order of first appearance."""
    return {name: f"SPEAKER{number}" for number, name in enumerate(dict.fromkeys(speakers))}


def dialogue_text(turns: Sequence[tuple[str, str]]) -> str:
    """(speaker, text) turns as one text, a line a turn: `[SPEAKER0] Hello.` and so on."""
    names = speaker_names([speaker for speaker, _ in turns])
    return "\n".join(f"[{names[speaker]}] {text}" for speaker, text in turns)


def voices(described: Mapping[str, str | AudioPart]) -> list[Part]:
    """A line a speaker, `SPEAKER0: …`, with a description or a recording of each voice."""
    parts: list[Part] = []
    text = ""
    for number, voice in enumerate(described.values()):
        text += "\n" * (number > 0) + f"SPEAKER{number}: "
        if isinstance(voice, AudioPart):
            parts += [TextPart(text=text), voice]
            text = ""
        else:
            text += voice
    return [*parts, *([TextPart(text=text)] if text else [])]


def sound_tags(text: str) -> str:
    """`[laugh]` as `<SE>[Laughter]</SE>`, `[music start]` as `<SE_s>[Music]</SE_s>`, its end with `SE_e`."""

    def tag(match: re.Match[str]) -> str:
        mark = {"": "SE", " start": "SE_s", " end": "SE_e"}[(match[2] or "").lower()]
        return f"<{mark}>[{_EVENTS[match[1].lower()]}]</{mark}>"

    return _SHORT.sub(tag, text)


def without_sound_tags(text: str) -> str:
    """The words alone: what a recognizer is to hear. Knows both ways of writing a sound."""
    return " ".join(_MARKUP.sub(" ", sound_tags(text)).split()) if "[" in text else text
