"""Names of sounds by window scores: whole, at the level of AudioSet's tree that the scores support, one for a sound."""

from __future__ import annotations

import numpy as np
import pytest

from audiollm.evaluate.judges.taggers import WindowScores
from pipelines.audiocot.answers.naming import NAME_SCORE, SoundSpan, name_sounds, whole_name

WINDOWS = 10


def sounds_of(scores: dict[str, dict[range, float]]) -> list[SoundSpan]:
    """The sounds of classes with these scores in these windows of a second; 0 elsewhere."""
    scores_FK = np.zeros((WINDOWS, len(scores)), np.float32)
    for column, parts in enumerate(scores.values()):
        for windows, score in parts.items():
            scores_FK[windows.start : windows.stop, column] = score
    middles_s = [window + 0.5 for window in range(WINDOWS)]
    return name_sounds(WindowScores(list(scores), scores_FK), middles_s, float(WINDOWS), 0.5, 0.25)


def labels_of(scores: dict[str, float]) -> list[str | None]:
    """The names of classes that all have these scores in the first three windows."""
    return [sound.label for sound in sounds_of({label: {range(3): score} for label, score in scores.items()})]


def test_the_narrowest_sure_class_names_a_sound() -> None:
    assert labels_of({"Animal": 0.98, "Dog": 0.95, "Bark": 0.9, "Bow-wow": 0.3}) == ["Bark"]
    assert labels_of({"Animal": 0.98, "Dog": 0.95, "Bark": 0.6}) == ["Dog"]


def test_a_sound_that_only_a_broad_class_is_sure_of_has_no_name() -> None:
    assert labels_of({"Animal": 0.95, "Dog": 0.6}) == [None]
    assert labels_of({"Vehicle": 0.98, "Engine": 0.3}) == [None]
    assert labels_of({"Music": 0.9, "Musical instrument": 0.4}) == ["Music"]


def test_a_sound_that_no_class_is_sure_of_has_no_name_and_its_time() -> None:
    (sound,) = sounds_of({"Typing": {range(2, 5): 0.6}})
    assert sound == (None, 2.0, 5.0, pytest.approx(0.6))
    assert labels_of({"Typing": NAME_SCORE + 0.001}) == ["Typing"]
    assert labels_of({"Typing": NAME_SCORE - 0.001}) == [None]
    assert labels_of({"Typing": 0.4}) == []


def test_of_rivals_the_class_above_names_the_sound() -> None:
    assert labels_of({"Water": 0.9, "Ocean": 0.85, "Stream": 0.8}) == ["Water"]
    assert labels_of({"Water": 0.9, "Ocean": 0.85, "Stream": 0.4}) == ["Ocean"]


def test_of_unsure_kinds_the_group_that_no_model_knows_names_the_sound() -> None:
    assert labels_of({"Cough": 0.5, "Sneeze": 0.3, "Throat clearing": 0.1}) == ["Respiratory sounds"]
    assert labels_of({"Cough": 0.5, "Sneeze": 0.1}) == [None]
    assert labels_of({"Cough": 0.2, "Sneeze": 0.95}) == ["Sneeze"]
    assert labels_of({"Rain": 0.95, "Wind": 0.92}) == ["Rain", "Wind"]


def test_one_bird_has_one_name() -> None:
    bird = {"Bird": 0.9, "Bird vocalization, bird call, bird song": 0.85, "Chirp, tweet": 0.8, "Crow": 0.55}
    assert len(labels_of(bird)) == 1
    early, late = {range(3): 0.9, range(6, 9): 0.9}, {range(3): 0.1, range(6, 9): 0.8}
    sounds = sounds_of({"Dog": early, "Bark": late})
    assert [(sound.label, sound.start_s) for sound in sounds] == [("Dog", 0.0), ("Dog", 6.0)]


def test_a_sound_is_named_after_its_relative_in_the_clip() -> None:
    sounds = sounds_of({"Crying, sobbing": {range(3): 0.9, range(6, 9): 0.6}, "Typing": {range(4, 5): 0.6}})
    assert [sound.label for sound in sounds] == ["Crying, sobbing", None, "Crying, sobbing"]


def test_a_dog_and_a_cat_at_two_times_are_two_sounds() -> None:
    sounds = sounds_of({"Dog": {range(3): 0.95}, "Cat": {range(6, 9): 0.95}})
    assert [sound.label for sound in sounds] == ["Dog", "Cat"]


def test_another_class_in_the_same_windows_is_a_second_sound_only_where_it_is_sure() -> None:
    assert labels_of({"Chainsaw": 0.98, "Fart": 0.6}) == ["Chainsaw"]
    assert labels_of({"Music": 0.98, "Speech": 0.95}) == ["Music", "Speech"]
    assert labels_of({"Neigh, whinny": 0.98, "Squeal": 0.95}) == ["Neigh, whinny"]
    assert labels_of({"Rain": 0.98, "Dog": 0.85}) == ["Rain"]


def test_a_part_of_a_long_sound_may_be_another_sound() -> None:
    rain = {range(10): 0.98}
    assert [s.label for s in sounds_of({"Rain": rain, "Dog": {range(4, 6): 0.8}})] == ["Rain", "Dog"]
    assert [s.label for s in sounds_of({"Rain": rain, "Dog": {range(4, 6): 0.7}})] == ["Rain"]


def test_places_and_silence_name_no_sound() -> None:
    assert labels_of({"Silence": 0.99, "Inside, small room": 0.95, "Television": 0.9}) == []


def test_classes_of_other_taggers_name_sounds_by_themselves() -> None:
    assert labels_of({"dog_bark": 0.92, "siren_2": 0.95}) == ["siren_2", "dog_bark"]


def test_names_are_whole() -> None:
    names = ["Chicken, rooster", "Fire engine, fire truck (siren)", "Bee, wasp, etc.", "Dog"]
    wanted = ["chicken or rooster", "fire engine or fire truck (siren)", "bee or wasp", "dog"]
    assert [whole_name(name) for name in names] == wanted
