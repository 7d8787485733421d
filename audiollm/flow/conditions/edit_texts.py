"""The words of edits, without the sounds: loads no torch."""

from __future__ import annotations

from typing import Literal, get_args

EditName = Literal["add", "overlay", "remove", "extract"]
EDITS: tuple[EditName, ...] = get_args(EditName)
THIS = "this"
"""The name of a sound that is pointed at: the region of its object says which one it is."""


def edit_words(operation: EditName, name: str, other_names: list[str]) -> str:
    """The caption of an edit."""
    if operation == "extract" and other_names:
        return f"extract {name}, without {' and '.join(other_names)}"
    return f"{operation} {name}"


def edit_thought(words: str, start_s: float, end_s: float) -> str:
    """The chain of thought of an edit: its words, and when the sound is heard."""
    return f"{words} from {start_s:.1f} to {end_s:.1f} s"
