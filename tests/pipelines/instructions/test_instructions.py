"""Instructions in everyday words: times, wordings of made edits, what is asked, and with which choices."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import yaml

from audiollm.data.records.thoughts import ThoughtEvent, ThoughtRecord
from pipelines.audiocot.made.words import _WORDINGS
from pipelines.instructions import EditPlan, InstructionQuestion, names_times, read_instruction, tokens
from tests.pipelines.instructions.test_sentences import DURATION_S, RECORD, read_table


def question(
    words: str, span: tuple[float, float] | None = None, has_object: bool = False
) -> InstructionQuestion:
    with pytest.raises(InstructionQuestion) as caught:
        read_instruction(words, RECORD, DURATION_S, span, has_object)
    return caught.value


@pytest.mark.parametrize(
    ("when", "start_s", "end_s"),
    [
        ("at 2 minutes", 120.0, 121.0), ("at 1:30", 90.0, 91.0), ("at 1:30 min", 90.0, 91.0), ("at 1m30s", 90.0, 91.0),
        ("at 1 minute and 30 seconds", 90.0, 91.0), ("at one and a half minutes", 90.0, 91.0),
        ("from 1 to 2 minutes", 60.0, 120.0), ("from 0:50 to 1:02.5", 50.0, 62.5),
        ("from 50 s to 1 minute", 50.0, 60.0),
        ("in the last half a minute", 170.0, 200.0), ("in the first minute", 0.0, 60.0), ("at 0:01:30", 90.0, 91.0),
        ("at 1:30 for a minute", 90.0, 150.0), ("after 3 minutes", 180.0, 200.0), ("until 1:10", 0.0, 70.0),
        ("from 2 s to the end", 2.0, 200.0),
        ("at 2,5 s", 2.5, 3.5), ("after second 2", 2.0, 200.0), ("until second 3", 0.0, 3.0),
        ("for 30 s at 1:00", 60.0, 90.0), ("between 1 and 2.5 min", 60.0, 150.0),
    ],
)  # fmt: skip
def test_times_are_read_in_minutes_too(when: str, start_s: float, end_s: float) -> None:
    for words in (f"mute the train {when}", f"{when} mute the train"):
        assert read_instruction(words, RECORD, 200.0) == [EditPlan("remove", "train", start_s, end_s)]


def test_wordings_of_made_edits_are_read() -> None:
    """Every eighth wording: the operation, the sound, and where the span begins."""
    sounds = itertools.cycle(["bell", "water drop", "car door repair"])
    for operation, wordings in _WORDINGS.items():
        sentences = [*wordings.sentences(held_out=False), *wordings.sentences(held_out=True)]
        for sentence, sound in zip(sentences[::8], sounds, strict=False):
            end = "seven" if operation == "extend" else "2.5"
            words = sentence.format(sound=sound, start="one", end=end, more="two")
            if operation == "remove":
                words += " everywhere"
            (plan,) = read_instruction(words, ThoughtRecord(), 5.0)
            assert plan.kind == operation and plan.caption in (sound, ""), words
            assert plan.caption == sound or "{sound}" not in sentence, words
            assert plan.start_s == {"extend": 5.0, "remove": 0.0}.get(operation, 1.0), words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "fit no operation"),
        ("what a nice day", "fit no operation"),
        ("don’t remove the dog", "not to be done"),
        ("add a bell at 19 s", "name 19 to 20 s.*extend it first"),
        ("add", "fit no operation"),
        ("add this", "click its object"),
        ("fill it", "Which seconds"),
        ("extend it", "By how much"),
        ("remove the third bark", "There are 2 sounds of the name “bark”"),
        ("remove the cat", "“cat” is not among the sounds"),
        ("add a cat after the bark", "There are 2 sounds of the name “bark”"),
        ("replace the dog", "By what is the dog to be replaced"),
        ("cut the last second", "does not shorten"),
        ("insert a second of silence at 2 s", "keeps its length"),
        ("make the dog louder", "“louder” is no edit of the studio"),
        ("fill 3 to 5 s with wind but do not touch the rooster", "rooster in 3 to 5 s is to stay"),
        ("add a bell " * 40, "fit no operation"),
    ],
)
def test_what_is_not_read_is_asked(words: str, sentence: str) -> None:
    assert re.search(sentence, question(words).sentence)


def test_every_choice_is_an_instruction_that_is_read() -> None:
    asked = [sentence for sentence in read_table() if sentence.edits == "asks"]
    choices = [choice for sentence in asked for choice in question(sentence.words, sentence.span).choices]
    assert len(choices) >= 20
    for choice in dict.fromkeys(choices):
        assert read_instruction(choice, RECORD, DURATION_S)


@pytest.mark.parametrize(
    "record",
    [
        ThoughtRecord(),
        ThoughtRecord(events=[ThoughtEvent(sound="sound", start_s=1.0, end_s=2.0)]),
        ThoughtRecord(background=["a steady sound"]),
    ],
)
def test_a_name_that_no_sound_has_is_asked_about_where_sounds_have_no_names(record: ThoughtRecord) -> None:
    assert read_instruction("extend it by 2 s", record, 5.0) == [EditPlan("extend", "", 5.0, 7.0)]
    for words in (
        "remove the dog", "mute the dog", "replace the dog with a cat", "keep only the dog", "regenerate the dog",
        "remove everything but the dog", "remove the dog and mute 1-2 s", "add a bell after the dog",
    ):  # fmt: skip
        with pytest.raises(InstructionQuestion, match="names no sound: where is “dog”") as caught:
            read_instruction(words, record, 5.0)
        assert caught.value.is_open
        spans = [(0.0, 5.0), *((event.start_s, event.end_s) for event in record.events)]
        assert [read_instruction(choice, record, 5.0) for choice in caught.value.choices] == [
            [EditPlan("remove", "dog", *span)] for span in spans
        ]
    with pytest.raises(InstructionQuestion) as caught:
        read_instruction("remove the dog", record, 5.0, has_object=True)
    assert "remove this" in caught.value.choices
    assert read_instruction("remove the dog", record, 5.0, (1.0, 2.0)) == [
        EditPlan("remove", "dog", 1.0, 2.0)
    ]


def test_times_of_choices_are_as_exact_in_a_long_recording() -> None:
    with pytest.raises(InstructionQuestion) as caught:
        read_instruction("cut 3600.25 to 3601.5 s", RECORD, 7200.0)
    assert caught.value.choices[0] == "mute 3600.25 to 3601.5 s"


def test_choices_name_no_sound_without_a_name() -> None:
    events = [
        ThoughtEvent(sound=sound, start_s=float(n), end_s=n + 0.5)
        for n, sound in enumerate(("a sound", "A dog"))
    ]
    with pytest.raises(InstructionQuestion) as caught:
        read_instruction("remove the cat", ThoughtRecord(events=events), 5.0)
    assert caught.value.choices == ("remove the cat everywhere", "remove the dog")


def test_an_object_or_a_selection_is_what_this_is() -> None:
    assert read_instruction("remove this", RECORD, 12.0, has_object=True) == [
        EditPlan("remove", "", 0.0, 12.0)
    ]
    assert read_instruction("add it at 2 s", RECORD, 12.0, has_object=True) == [EditPlan("add", "", 2.0, 3.0)]
    assert read_instruction("keep only this", RECORD, 12.0, (1.0, 2.0), True) == [
        EditPlan("extract", "", 1.0, 2.0)
    ]
    assert read_instruction("remove this", RECORD, 12.0, (1.0, 2.0)) == [EditPlan("mute", "", 1.0, 2.0)]
    assert question("remove this").sentence.startswith("Which seconds?")


def test_an_event_name_and_its_words_for_the_same_are_told_apart() -> None:
    """A crow is no rooster where both are heard, and the rooster's crowing is no crow."""
    record = ThoughtRecord(
        events=[
            ThoughtEvent(sound="crow", start_s=1.0, end_s=2.0),
            ThoughtEvent(sound="rooster", start_s=3.0, end_s=4.0),
        ]
    )
    assert [plan.start_s for plan in read_instruction("remove the crow", record, 5.0)] == [1.0]
    assert [plan.start_s for plan in read_instruction("remove the cockerel", record, 5.0)] == [3.0]


def test_words_name_times_or_not() -> None:
    assert (
        names_times("add a bell at 2 s") and names_times("at the end") and not names_times("let a bell ring")
    )


def test_no_phrase_stands_for_two_tokens() -> None:
    content = yaml.safe_load(Path(tokens.__file__).with_name("vocabulary.yaml").read_text())
    phrases = [
        " ".join(phrase.split())
        for listed in content.values()
        for phrase in listed.replace('","', "").split(",")
    ]
    assert len(phrases) == len(set(phrases)) > 500


def test_a_first_or_last_before_a_verb_counts_the_edits_and_no_sounds() -> None:
    remove, mute = EditPlan("remove", "bell", 8.0, 9.0), EditPlan("mute", "", 3.0, 4.0)
    for words in ("first remove the bell and then mute 3-4 s", "remove the bell and last mute 3-4 s"):
        assert read_instruction(words, RECORD, DURATION_S) == [remove, mute], words
