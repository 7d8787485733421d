"""Voice and music by names: AudioSet's classes as its ontology has them, and the names of answers by their words."""

from __future__ import annotations

import numpy as np
import pytest

from audiollm.evaluate.judges.taggers import WindowScores
from pipelines.audiocot.answers.evidence import kind_scores
from pipelines.audiocot.answers.kinds import kinds_of, kinds_of_class

VOICES = """
Speech | Child speech, kid speaking | Conversation | Narration, monologue | Babbling | Speech synthesizer |
Shout | Bellow | Whoop | Yell | Children shouting | Screaming | Whispering | Laughter | Baby laughter |
Giggle | Snicker | Belly laugh | Chuckle, chortle | Crying, sobbing | Baby cry, infant cry | Whimper |
Wail, moan | Sigh | Singing | Yodeling | Child singing | Synthetic singing | Rapping | Humming | Groan |
Grunt | Male singing | Cheering | Chatter | Hubbub, speech noise, speech babble | Children playing
"""
MUSIC = """
Music | Musical instrument | Tapping (guitar technique) | Strum | Sampler | Synthesizer | Percussion | Drum |
Hi-hat | Cowbell | Rattle (instrument) | Trumpet | French horn | Bell | Bicycle bell | Tuning fork |
Wind chime | Singing bowl | Scratching (performance technique) | Beatboxing | Country | Funk | Opera |
Drum and bass | A capella | Music for children | Song | Jingle (music) | Lullaby | Scary music
"""
BOTH = "Choir | Chant | Mantra"
NEITHER = """
Whistling | Breathing | Snoring | Gasp | Cough | Throat clearing | Sneeze | Run | Walk, footsteps | Gargling |
Hands | Finger snapping | Clapping | Applause | Crowd | Bird | Bird vocalization, bird call, bird song |
Chirp, tweet | Crowing, cock-a-doodle-doo | Whale vocalization | Whimper (dog) | Howl | Caterwaul | Roar |
Growling | Hum | Mains hum | Doorbell | Telephone bell ringing | Whistle | Rattle | Scratch | Tap |
Jingle, tinkle | Electronic tuner | Effects unit | Chorus effect | Television | Radio |
Vehicle horn, car horn, honking | Computer keyboard | Power windows, electric windows
"""


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split("|")]


@pytest.mark.parametrize(
    ("classes", "kinds"),
    [(VOICES, ("voice",)), (MUSIC, ("music",)), (BOTH, ("voice", "music")), (NEITHER, ())],
    ids=["voices", "music", "both", "neither"],
)
def test_classes_of_audioset_have_the_kinds_of_their_branches(classes: str, kinds: tuple[str, ...]) -> None:
    assert {name: kinds_of_class(name) for name in names(classes)} == dict.fromkeys(names(classes), kinds)


def test_classes_of_other_taggers_are_known_by_their_words() -> None:
    assert [kinds_of_class(label) for label in ("human_voice", "electric_guitar", "dog_bark")] == [
        ("voice",),
        ("music",),
        (),
    ]


def kinds_heard(labels: list[str], *windows: list[float]) -> dict[str, float]:
    return kind_scores(WindowScores(labels, np.array(windows, np.float32)))


def test_a_bird_is_no_voice_and_a_scream_is_one() -> None:
    bird = "Bird vocalization, bird call, bird song"
    assert kinds_heard([bird], [0.9]) == {"voice": 0.0, "music": 0.0}
    assert kinds_heard([bird, "Screaming"], [0.9, 0.4]) == {"voice": 0.4, "music": 0.0}


def test_a_voice_in_one_window_among_instruments_counts() -> None:
    """By the tags, which are means over a clip, a song of two minutes had no voice at all."""
    labels = ["Music", "Guitar", "Piano", "Drum", "Violin, fiddle", "Banjo", "Singing"]
    instruments = [[0.99, 0.6, 0.5, 0.5, 0.4, 0.4, 0.0] for _ in range(60)]
    assert kinds_heard(labels, *instruments)["voice"] == 0.0
    assert kinds_heard(labels, *instruments, [0.99, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])["voice"] == 0.1


@pytest.mark.parametrize(
    ("sound", "kinds"),
    [
        ("a man talking", ["voice"]), ("human voice", ["voice"]), ("laughter", ["voice"]), ("a baby crying", ["voice"]),
        ("woman screaming", ["voice"]), ("human scream", ["voice"]), ("people laughing and dogs barking", ["voice"]),
        ("dog bark and speech", ["voice"]), ("woman singing", ["voice", "music"]), ("a choir", ["voice", "music"]),
        ("guitars", ["music"]), ("a sad song", ["music"]), ("drums", ["music"]),
        ("bird song", []), ("birds chirping and singing", []), ("whale song", []), ("singing bowl", []),
        ("elephant trumpet", []), ("whispering wind", []), ("goat screaming", []), ("tires screaming", []),
        ("babbling brook", []), ("engine humming", []), ("person walking on gravel", []), ("a child running", []),
        ("bell", []), ("car horn", []), ("heart beat", []), ("loudspeaker pop", []),
    ],
)  # fmt: skip
def test_words_of_answers_tell_a_kind_only_where_they_are_sure(sound: str, kinds: list[str]) -> None:
    assert kinds_of(sound) == kinds
