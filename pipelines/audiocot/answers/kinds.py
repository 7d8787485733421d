"""Kinds of sounds, voice and music, by the name of a tagger's class or by the words of an answer."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from audiollm.evaluate.judges.audioset import branch_of

KINDS = ("voice", "music")
_BRANCHES = {
    "voice": (
        "Human voice",
        "Cheering",
        "Chatter",
        "Hubbub, speech noise, speech babble",
        "Booing",
        "Children playing",
    ),
    "music": ("Music",),
}
"""AudioSet's branches of each kind. Voices are also those sounds of groups that it describes as speech or
vocalizations; choirs, chants and mantras are in both branches."""


def _word_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


class _KindWords(NamedTuple):
    """Words that tell the kind of a sound, by what else its name must hold."""

    always: frozenset[str]
    not_of_others: frozenset[str]
    """They tell nothing where an animal or a thing is named that makes such a sound, too, and no person."""
    of_persons: frozenset[str]
    """They tell something only where a person is named."""


_WORDS = {
    "voice": _KindWords(
        _word_set(
            "speech talk talks talking speak speaks speaking conversation dialogue monologue narration narrator "
            "commentary shout shouts shouting yell yells yelling giggle giggling chuckle chuckling yodel yodeling"
        ),
        _word_set(
            "voice vocal sing sings singing singer choir chant chanting laugh laughs laughing laughter whisper "
            "whispers whispering"
        ),
        _word_set(
            "cry crying sob sobbing scream screaming whimper whimpering wail wailing moan moaning sigh sighing "
            "groan groaning grunt grunting hum humming rap rapping babble babbling call calling cheer cheering "
            "chatter chattering murmur murmuring vocalization"
        ),
    ),
    "music": _KindWords(
        _word_set(
            "music musical musician melody guitar guitarist piano pianist drums drummer violin violinist fiddle "
            "cello orchestra symphony synthesizer trombone saxophone clarinet oboe flute harp harmonica accordion "
            "banjo ukulele mandolin sitar xylophone marimba jazz reggae techno opera lullaby"
        ),
        _word_set("song sing sings singing singer choir chant chanting trumpet"),
        frozenset(),
    ),
}
_PERSONS = _word_set(
    "human person people man men woman women boy girl child children kid baby babies infant toddler lady guy "
    "crowd audience"
)
_OTHER_MAKERS = _word_set(
    "animal bird birdsong songbird cricket cicada insect frog toad whale dolphin seal dog puppy wolf coyote fox "
    "hyena cat kitten goat sheep lamb cow cattle horse donkey pig elephant lion monkey ape gull seagull "
    "kookaburra crow raven rooster hen chicken duck goose owl pigeon dove canary nightingale robin sparrow wind "
    "breeze leaf leaves grass bowl kettle saw"
)


@lru_cache(maxsize=4096)
def kinds_of_class(label: str) -> tuple[str, ...]:
    """Return the kinds of a tagger's class: those of AudioSet by its branches, others by their words.

    Remembered: a tagger is asked about the same hundreds of classes for every clip.
    """
    branches = tuple(kind for kind in KINDS if any(label in branch_of(root) for root in _BRANCHES[kind]))
    return branches or tuple(kinds_of(label))


def kinds_of(sound: str, source: str = "") -> list[str]:
    """Return the kinds that a sound is surely of, by its words and those for what makes it.

    Singing names music, too, which accompanies it in most recordings.
    """
    words, makers = word_forms(sound), word_forms(f"{sound} {source}")
    by_person = bool(makers & _PERSONS)
    by_other = bool(makers & _OTHER_MAKERS) and not by_person
    kinds = []
    for kind, telling in _WORDS.items():
        if (
            words & telling.always
            or (words & telling.not_of_others and not by_other)
            or (words & telling.of_persons and by_person)
        ):
            kinds.append(kind)
    return kinds


def word_forms(name: str) -> set[str]:
    """Return the words of a name, those with a plural's s also without it."""
    words = set(re.findall(r"[^\W\d_]+", name.casefold()))
    return words | {word[:-1] for word in words if word.endswith("s") and len(word) > 3}
