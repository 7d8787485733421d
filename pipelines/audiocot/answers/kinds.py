"""Kinds of sounds, voice and music, by the name of a tagger's class or by the words of an answer."""

from __future__ import annotations

import re
from typing import NamedTuple

KINDS = ("voice", "music")
_VOICE_CLASSES = """
Human voice | Speech | Male speech, man speaking | Female speech, woman speaking |
Child speech, kid speaking | Conversation | Narration, monologue | Babbling | Speech synthesizer | Shout |
Bellow | Whoop | Yell | Battle cry | Children shouting | Screaming | Whispering | Laughter | Baby laughter |
Giggle | Snicker | Belly laugh | Chuckle, chortle | Crying, sobbing | Baby cry, infant cry | Whimper |
Wail, moan | Sigh | Singing | Choir | Yodeling | Chant | Mantra | Male singing | Female singing |
Child singing | Synthetic singing | Rapping | Humming | Groan | Grunt | Yawn |
Cheering | Chatter | Hubbub, speech noise, speech babble | Booing | Children playing
"""
"""AudioSet's branch "Human voice", and those of its sounds of groups that it describes as speech or vocalizations."""
_MUSIC_CLASSES = """
Music | Musical instrument | Plucked string instrument | Guitar | Electric guitar | Bass guitar |
Acoustic guitar | Steel guitar, slide guitar | Tapping (guitar technique) | Strum | Banjo | Sitar | Mandolin |
Zither | Ukulele | Keyboard (musical) | Piano | Electric piano | Clavinet | Rhodes piano | Organ |
Electronic organ | Hammond organ | Synthesizer | Sampler | Mellotron | Harpsichord | Percussion | Drum kit |
Drum machine | Drum | Snare drum | Rimshot | Drum roll | Bass drum | Timpani | Tabla | Cymbal | Hi-hat |
Crash cymbal | Cowbell | Wood block | Tambourine | Rattle (instrument) | Maraca | Gong | Tubular bells |
Mallet percussion | Marimba, xylophone | Glockenspiel | Vibraphone | Steelpan | Orchestra | Brass instrument |
French horn | Trumpet | Trombone | Cornet | Bugle | Bowed string instrument | String section |
Violin, fiddle | Pizzicato | Cello | Double bass | Wind instrument, woodwind instrument | Flute | Saxophone |
Alto saxophone | Soprano saxophone | Clarinet | Oboe | Bassoon | Harp | Choir | Bell | Church bell |
Jingle bell | Bicycle bell | Tuning fork | Chime | Wind chime | Change ringing (campanology) | Harmonica |
Accordion | Bagpipes | Didgeridoo | Shofar | Theremin | Singing bowl | Musical ensemble |
Bass (instrument role) | Scratching (performance technique) | Music genre | Pop music | Hip hop music |
Grime music | Trap music | Beatboxing | Rock music | Heavy metal | Punk rock | Grunge | Progressive rock |
Rock and roll | Psychedelic rock | Rhythm and blues | Soul music | Reggae | Dub | Country | Swing music |
Bluegrass | Funk | Folk music | Middle Eastern music | Jazz | Disco | Classical music | Opera |
Electronic music | House music | Techno | Dubstep | Electro | Drum and bass | Oldschool jungle | Electronica |
Electronic dance music | Ambient music | Drone music | Trance music | Noise music | UK garage |
Music of Latin America | Cumbia | Salsa music | Soca music | Kuduro | Funk carioca | Flamenco | Blues |
Music for children | New-age music | Vocal music | A capella | Chant | Mantra | Music of Africa | Afrobeat |
Kwaito | Christian music | Gospel music | Music of Asia | Carnatic music | Music of Bollywood | Ska |
Traditional music | Independent music | Musical concepts | Song | Melody | Musical note | Beat | Drum beat |
Chord | Harmony | Bassline | Loop | Drone | Music role | Background music | Theme music | Jingle (music) |
Soundtrack music | Lullaby | Video game music | Christmas music | Dance music | Wedding music |
Birthday music | Music mood | Happy music | Funny music | Sad music | Tender music | Exciting music |
Angry music | Scary music
"""
"""AudioSet's branch "Music". Choirs, chants and mantras are in both branches."""
_CLASSES = {
    kind: frozenset(name.strip() for name in names.split("|"))
    for kind, names in zip(KINDS, (_VOICE_CLASSES, _MUSIC_CLASSES), strict=True)
}


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
_OTHERS = _word_set(
    "animal bird birdsong songbird cricket cicada insect frog toad whale dolphin seal dog puppy wolf coyote fox "
    "hyena cat kitten goat sheep lamb cow cattle horse donkey pig elephant lion monkey ape gull seagull "
    "kookaburra crow raven rooster hen chicken duck goose owl pigeon dove canary nightingale robin sparrow wind "
    "breeze leaf leaves grass bowl kettle saw"
)


def kinds_of_class(label: str) -> list[str]:
    """Return the kinds of a tagger's class: those of AudioSet by its branches, others by their words."""
    return [kind for kind in KINDS if label in _CLASSES[kind]] or kinds_of(label)


def kinds_of(sound: str, source: str = "") -> list[str]:
    """Return the kinds that a sound is surely of, by its words and those for what makes it.

    Singing names music, too, which accompanies it in most recordings.
    """
    words, makers = word_forms(sound), word_forms(f"{sound} {source}")
    by_person = bool(makers & _PERSONS)
    by_other = bool(makers & _OTHERS) and not by_person
    found = []
    for kind, telling in _WORDS.items():
        if (
            words & telling.always
            or (words & telling.not_of_others and not by_other)
            or (words & telling.of_persons and by_person)
        ):
            found.append(kind)
    return found


def word_forms(name: str) -> set[str]:
    """Return the words of a name, those with a plural's s also without it."""
    words = set(re.findall(r"[^\W\d_]+", name.casefold()))
    return words | {word[:-1] for word in words if word.endswith("s") and len(word) > 3}
