"""The phrases of a text that is said, with the longest time that each may take."""

from __future__ import annotations

from collections.abc import Iterable

from audiollm.data.text.forms import without_sound_tags
from audiollm.data.text.phrases import PhraseLayout, split_phrases
from audiollm.generation.engine.request import SpokenPhrase
from audiollm.generation.speaking.long_text import spoken_seconds

PHRASE_SLACK, PHRASE_SLACK_S = 3.0, 1.0
"""A phrase is cut at `PHRASE_SLACK` times its estimated duration plus `PHRASE_SLACK_S`."""


def phrases_of(text: str, layout: PhraseLayout | None, frame_rate: float) -> tuple[SpokenPhrase, ...]:
    """Split a text into the phrases of a model; none for a model that was trained without them.

    Args:
        layout: None: the model says its texts as they are.
        frame_rate: code frames per second.
    """
    if layout is None:
        return ()
    phrases = split_phrases(without_sound_tags(text), layout.words)
    return limited_phrases(((phrase, layout.reading(phrase)) for phrase in phrases), frame_rate)


def limited_phrases(phrases: Iterable[tuple[str, str]], frame_rate: float) -> tuple[SpokenPhrase, ...]:
    """Return these phrases with the most frames of each.

    Args:
        phrases: the words of each, by which its time is estimated, and what the model reads of it.
    """
    return tuple(
        SpokenPhrase(reading, round((PHRASE_SLACK * spoken_seconds(text) + PHRASE_SLACK_S) * frame_rate))
        for text, reading in phrases
    )
