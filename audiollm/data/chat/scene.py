"""Prompt notation of Higgs Audio V2 for scenes, speakers, turns and sounds.

The published form (boson-ai/higgs-audio, `examples/generation.py`) of a system prompt with a scene:

    Generate audio following instruction.

    <|scene_desc_start|>
    Audio is recorded from a quiet room.

    SPEAKER0: masculine, moderate pitch
    SPEAKER1: <reference audio>
    <|scene_desc_end|>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from audiollm.data.records.sample import AudioPart, ContentPart, TextPart


def speaker_names(speakers: Sequence[str]) -> dict[str, str]:
    """`{"ann": "SPEAKER0", ...}` in order of first appearance."""
    return {name: f"SPEAKER{number}" for number, name in enumerate(dict.fromkeys(speakers))}


def dialogue_text(turns: Sequence[tuple[str, str]]) -> str:
    """(speaker, text) turns as one text, a line a turn: `[SPEAKER0] Hello.` and so on."""
    names = speaker_names([speaker for speaker, _ in turns])
    return "\n".join(f"[{names[speaker]}] {text}" for speaker, text in turns)


def voices(described: Mapping[str, str | AudioPart]) -> list[ContentPart]:
    """A line a speaker, `SPEAKER0: …`, with a description or a recording of each voice."""
    parts: list[ContentPart] = []
    text = ""
    for number, voice in enumerate(described.values()):
        text += "\n" * (number > 0) + f"SPEAKER{number}: "
        if isinstance(voice, AudioPart):
            parts += [TextPart(text=text), voice]
            text = ""
        else:
            text += voice
    return [*parts, *([TextPart(text=text)] if text else [])]
