"""The events of a chain of thought that words name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from audiollm.data.records.thoughts import ThoughtEvent, ThoughtRecord
from pipelines.instructions.tokens import stem

_ANIMALS = frozenset({
    "dog", "bark", "cat", "meow", "rooster", "crow", "hen", "chicken", "bird", "chirp", "cow", "moo", "pig", "oink",
    "sheep", "frog", "hors", "insect", "cricket",
})  # fmt: skip
"""Stems of names of animals and their sounds."""
_EMPTY = frozenset({
    "the", "a", "an", "of", "in", "on", "at", "sound", "sounds", "noise", "noises", "and", "with", "from", "by", "is",
    "my", "all", "that",
})  # fmt: skip
"""Words that tell no sound from another."""
_GENERIC = frozenset({"sound", "steadi", "quiet", "nois", "event", "unknown", "someth", "unnam", "burst"})
"""Stems of names that name nothing."""


@dataclass(frozen=True)
class NamedSounds:
    """The sounds of a recording that words name."""

    events: tuple[ThoughtEvent, ...] = ()
    background: str = ""
    """The sound that lasts for the whole recording; empty: none of that name."""


def name_stems(record: ThoughtRecord) -> frozenset[str]:
    """The stems of all words that name sounds of a record, by its own words or others for the same."""
    names = frozenset(word for sound in _list_sounds(record) for word in _stems(sound))
    return names.union(*(group for group in _synonyms() if group & names))


def sounds_with_names(record: ThoughtRecord) -> list[str]:
    """The sounds of a record that have a name, without articles: not "a sound"."""
    named = [sound for sound in record.sounds() if _stems(sound) - _GENERIC]
    return [re.sub(r"^(?:an?|the)\s+", "", sound, flags=re.IGNORECASE) for sound in named]


def named_sounds(words: Sequence[str], record: ThoughtRecord) -> NamedSounds:
    """The events and the background that words name: as they are written, by other words for the same, or as a class.

    All words must fit: "the loud bark on the left" is no other bark.
    """
    word_stems = _stems(" ".join(words))
    if not word_stems:
        return NamedSounds()
    for fits in (_has_all, _has_head, _has_alike, _is_of_class):
        events = tuple(
            event for event in record.events if fits(word_stems, _stems(_describe_thought_event(event)))
        )
        background = next((sound for sound in record.background if fits(word_stems, _stems(sound))), "")
        if events or background:
            return NamedSounds(events, background)
    return NamedSounds()


# Private


@cache
def _synonyms() -> dict[frozenset[str], str]:
    """The stems of words for the same, each group with its first one."""
    lines = yaml.safe_load(Path(__file__).with_name("synonyms.yaml").read_text(encoding="utf-8"))
    return {frozenset(map(stem, line.split())): stem(line.split()[0]) for line in lines}


def _list_sounds(record: ThoughtRecord) -> list[str]:
    return [*map(_describe_thought_event, record.events), *record.background]


def _describe_thought_event(event: ThoughtEvent) -> str:
    return " ".join(filter(None, (event.manner, event.sound, event.source, event.place)))


def _stems(text: str) -> frozenset[str]:
    words = (word.strip("'\".,()-") for word in text.lower().replace("-", " ").split())
    return frozenset(stem(word) for word in words if word and word not in _EMPTY)


def _has_all(word_stems: frozenset[str], present: frozenset[str]) -> bool:
    return word_stems.issubset(present)


def _has_head(word_stems: frozenset[str], present: frozenset[str]) -> bool:
    """Whether words stand for a sound by the first word of their group: a cockerel is a rooster before it is a crow."""
    return word_stems <= present.union(*(group for group, head in _synonyms().items() if head in present))


def _has_alike(word_stems: frozenset[str], present: frozenset[str]) -> bool:
    return word_stems <= present.union(*(group for group in _synonyms() if group & present))


def _is_of_class(word_stems: frozenset[str], present: frozenset[str]) -> bool:
    return word_stems <= {"animal"} and bool(present & _ANIMALS)
