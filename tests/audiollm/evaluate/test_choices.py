"""Options that a reply names: several letters, several texts, lists, refusals, and denials that are far away."""

from __future__ import annotations

import pytest

from audiollm.evaluate.listening.choices import read_choice

ANIMALS = ["a dog", "a cat", "a horse"]


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        ("The answer is B.", 1),
        ("The answer is B or C.", None),
        ("The answer is (B) and (C).", None),
        ("The answer is a cat.", 1),
        ("The answer is a cat or a horse.", None),
        ("(A) a dog\n(B) a cat\n(C) a horse", None),
        ("I cannot hear the audio, so I cannot say whether it is a dog.", None),
        ("It is not a dog.", None),
        ("I have no other clear sounds to report from this short recording than a dog", 0),
        ("No, it is a cat.", 1),
    ],
)
def test_a_reply_names_one_option_or_none(reply: str, choice: int | None) -> None:
    assert read_choice(reply, ANIMALS) == choice


SOUNDS = ["rain", "a dog barking", "a siren", "people talking"]


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        # words in another form
        ("A dog barks in the audio.", 1),
        ("Based on the audio, a dog is barking.", 1),
        ("dogs barking", 1),
        ("People talk.", 3),
        ("It is clearly not a siren. People are talking.", 3),
        ("Nobody talks, and no dog barks.", None),
        ("A dog barks while people talk.", None),
        ("anything but a dog that barks", None),
        # what the writer takes for it, behind others
        ("It could be rain, but I think it's a siren.", 2),
        ("I think it is rain or a siren.", None),
        ("I think a siren is unlikely.", None),
        ("I am not sure, but B", 1),
        ("Probably B", 1),
        ("Probably a siren", 2),
        ("The answer's D.", 3),
        ("1. D", 3),
        # the place of an option
        ("Option 3", 2),
        ("third option", 2),
        ("The third one.", 2),
        ("option 9", None),
    ],
)
def test_replies_in_other_words(reply: str, choice: int | None) -> None:
    assert read_choice(reply, SOUNDS) == choice


def test_a_place_is_told_where_no_option_has_a_number() -> None:
    assert read_choice("option 2", ["2 dogs", "3 dogs"]) is None


def test_words_that_differ_in_their_form_alone_stay_apart() -> None:
    assert read_choice("A dog barks.", ["a dog barking", "dogs bark"]) is None


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        ("Yeah", 0), ("Nope.", 1), ("是", 0), ("不是。", 1), ("No doubt, yes", 0), ("Yes and no", None),
        ("yes or no?", None),
    ],
)  # fmt: skip
def test_other_words_for_yes_and_no(reply: str, choice: int | None) -> None:
    assert read_choice(reply, ["Yes", "No"]) == choice


def test_yes_and_no_begin_an_answer_where_they_are_the_options() -> None:
    assert read_choice("Yes, somebody speaks.", ["Yes", "No"]) == 0
    assert read_choice("No, it is a cat.", ["No", "a cat"]) != 0
