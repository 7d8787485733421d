"""The vote over several texts: alignments and votes worked out by hand, and jiwer's edits as the oracle."""

from __future__ import annotations

from itertools import permutations

import jiwer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audiollm.evaluate.alignment.written_words import written_words
from audiollm.evaluate.report.text_errors import choose_form
from pipelines.annotate.step import RecordingMetadata, Segment
from pipelines.annotate.steps.consensus import ConfidencesConfig, ConsensusConfig, spoken_language
from pipelines.annotate.steps.consensus import Consensus as ConsensusStep
from pipelines.annotate.words.rover import (
    Confidences,
    Hypothesis,
    VotedText,
    align,
    pairwise_error_rate,
    vote,
)
from pipelines.steps.step import Listener, Value

WORDS = st.lists(st.sampled_from(["a", "bee", "see", "dee", "eel"]), max_size=7)
TEXTS = st.lists(WORDS, min_size=1, max_size=4)


def _vote(*texts: str, **settings: object) -> VotedText:
    return vote([Hypothesis(text) for text in texts], **settings)  # type: ignore[arg-type]


def _sure(text: str, *confidences: float | None) -> Hypothesis:
    return Hypothesis(text, list(zip(text.split(), confidences, strict=True)))


# -------------------------------------------------------------------------------------------- alignment


def test_a_network_worked_out_by_hand() -> None:
    """Fiscus's figure: a word replaced, one lost, one too many."""
    texts = [
        ["the", "cat", "sat", "on", "mats"],
        ["the", "cat", "on", "mats"],
        ["the", "hat", "sat", "on", "the", "mats"],
    ]
    assert align(texts) == [(0, 0, 0), (1, 1, 1), (2, None, 2), (3, 2, 3), (None, None, 4), (4, 3, 5)]


def test_words_that_are_spelled_alike_meet() -> None:
    """Both alignments have two edits; `modem` stands for `modern`, and not for `so`."""
    assert align([["is", "modern"], ["is", "so", "modem"]]) == [(0, 0), (None, 1), (1, 2)]


@given(WORDS, WORDS)
def test_two_texts_differ_in_as_many_slots_as_jiwer_counts_edits(one: list[str], other: list[str]) -> None:
    network = align([one, other])
    differ = sum(
        (one[a] if a is not None else None) != (other[b] if b is not None else None) for a, b in network
    )
    if not one:
        assert differ == len(other)
        return
    counted = jiwer.process_words(" ".join(one), " ".join(other))
    assert differ == counted.substitutions + counted.insertions + counted.deletions


@given(TEXTS)
def test_a_network_keeps_every_word_once_and_in_order(texts: list[list[str]]) -> None:
    network = align(texts)
    for place, text in enumerate(texts):
        assert [slot[place] for slot in network if slot[place] is not None] == list(range(len(text)))
    assert all(any(index is not None for index in slot) for slot in network)


@settings(max_examples=40)
@given(st.lists(WORDS, min_size=2, max_size=3))
def test_the_network_does_not_depend_on_the_order(texts: list[list[str]]) -> None:
    first = align(texts)
    for order in permutations(range(len(texts))):
        moved = align([texts[index] for index in order])
        words = [tuple(texts[i][s] if s is not None else None for i, s in enumerate(slot)) for slot in first]
        back = [tuple(slot[order.index(index)] for index in range(len(texts))) for slot in moved]
        assert words == [
            tuple(texts[i][s] if s is not None else None for i, s in enumerate(slot)) for slot in back
        ]


@given(st.lists(WORDS, min_size=2, max_size=4))
def test_the_pairwise_error_rate_is_jiwers(texts: list[list[str]]) -> None:
    rates = [
        jiwer.wer(" ".join(one), " ".join(other)) if one else float(bool(other))
        for a, one in enumerate(texts)
        for b, other in enumerate(texts)
        if a != b
    ]
    assert pairwise_error_rate(texts) == pytest.approx(sum(rates) / len(rates))


# ------------------------------------------------------------------------------------------------- vote


def test_the_majority_wins_every_slot_with_its_share() -> None:
    found = _vote("the cat sat on mats", "the cat on mats", "the hat sat on the mats")
    assert found.text == "the cat sat on mats"
    assert [word.share for word in found.words] == pytest.approx([1, 2 / 3, 2 / 3, 1, 1])
    assert found.vote_share == pytest.approx(
        (1 + 2 / 3 + 2 / 3 + 1 + 2 / 3 + 1) / 6
    )  # the slot left out counts
    # edits: 1 over 5 and over 4 words, 2 over 5 and over 6, 3 over 4 and over 6
    assert found.pairwise_wer == pytest.approx((1 / 5 + 1 / 4 + 2 / 5 + 2 / 6 + 3 / 4 + 3 / 6) / 6)


def test_confidences_outvote_as_the_formula_says() -> None:
    """yes: alpha * 2/3 + (1 - alpha) * 0.1; no: alpha * 1/3 + (1 - alpha) * 0.9; equal at 0.8 / (0.8 + 1/3)."""
    heard = [_sure("yes", 0.1), _sure("yes", 0.1), _sure("no", 0.9)]
    border = 0.8 / (0.8 + 1 / 3)
    assert vote(heard, confidences=Confidences(alpha=border + 0.01)).text == "yes"
    found = vote(heard, confidences=Confidences(alpha=border - 0.01))
    assert (found.text, found.words[0].share, found.words[0].confidence) == ("no", pytest.approx(1 / 3), 0.9)
    assert vote(heard).text == "yes"


def test_mean_and_largest_confidence_differ() -> None:
    heard = [_sure("yes", 0.9), _sure("yes", 0.1), _sure("no", 0.7), _sure("no", 0.5)]
    assert vote(heard, confidences=Confidences("average", alpha=0.5)).text == "no"
    assert vote(heard, confidences=Confidences("maximum", alpha=0.5)).text == "yes"


@pytest.mark.parametrize(("null", "text"), [(0.2, "so well"), (0.8, "well")])
def test_saying_nothing_has_the_confidence_that_is_set(null: float, text: str) -> None:
    heard = [_sure("so well", 0.5, 0.9), _sure("well", 0.9)]
    assert vote(heard, confidences=Confidences(alpha=0.5, null=null)).text == text


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@given(words=WORDS)
def test_all_that_are_equal_are_the_consensus(alpha: float, words: list[str]) -> None:
    text = " ".join(words)
    found = _vote(text, text, text, confidences=Confidences(alpha=alpha))
    assert (found.text, found.pairwise_wer, found.vote_share) == (text, 0.0, 1.0)
    assert all(word.share == 1.0 for word in found.words)


@given(words=WORDS, other=WORDS)
def test_two_equal_texts_of_three_win(words: list[str], other: list[str]) -> None:
    for texts in permutations([words, words, other]):
        assert _vote(*map(" ".join, texts)).text == " ".join(words)


@given(words=WORDS)
def test_one_text_is_itself_and_agrees_with_nobody(words: list[str]) -> None:
    found = _vote(" ".join(words))
    assert (found.text, found.pairwise_wer, found.vote_share) == (" ".join(words), None, None)


def test_with_nothing_else_to_go_by_the_first_is_believed() -> None:
    assert _vote("yes sir", "no sir").text == "yes sir"
    assert _vote("no sir", "yes sir").text == "no sir"
    three = ["red hat", "read that", "bread at"]
    assert (
        _vote("well red hat", "well read hat", "go red cat").text == "well red hat"
    )  # not a mixture of ties
    assert _vote(*three).text == three[0]


def test_broken_confidences_count_as_none() -> None:
    heard = [_sure("yes", float("nan")), _sure("no", 7.0), _sure("no", None)]
    found = vote(heard, confidences=Confidences())
    assert (found.text, found.words[0].confidence) == ("no", 1.0)


def test_a_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="4001 words in one segment"):
        _vote("a " * 4001, "a")


# ---------------------------------------------------------------------------------- what is written


def test_numbers_meet_their_words_and_are_kept_as_they_were_written() -> None:
    found = _vote("He paid $5, then left.", "he paid five dollars then left", "he paid nine dollars and left")
    assert found.text == "He paid $5, then left."
    assert found.words[2].share == pytest.approx(2 / 3)


def test_an_outvoted_part_of_a_number_is_spelled_out() -> None:
    found = _vote("He paid $5, then left.", "he paid nine dollars then left", "he paid nine dollars and left")
    assert found.text == "He paid nine dollars then left."


def test_who_writes_upper_and_lower_case_is_followed() -> None:
    assert _vote("WELL IT'S MAY", "well it's may", "Well, it's May.").text == "Well, it's May."


def test_chinese_is_voted_by_characters() -> None:
    found = _vote("今天天气很好。", "今天天汽很好", "今天 天气好")
    assert (found.text, found.unit) == ("今天天气很好。", "character")
    assert [word.share for word in found.words] == pytest.approx([1, 1, 1, 2 / 3, 2 / 3, 1])


def test_latin_words_in_chinese_keep_their_spaces() -> None:
    assert _vote("我用 hello world 说", "我用 hello world 说", "我用").text == "我用 hello world 说"


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("- Well-known: Dr. Li — paid $5 on 3/4/2024!", "en"),
        ("...", "en"),
        ("“Quoted,” he's said 21st", "en"),
        ("我有3个 iPhone。好", "zh"),
        ("un 21 été à l'ombre", "fr"),
        ("สวัสดี ครับ 5", "th"),
    ],
)
def test_written_words_cover_the_text_and_its_form(text: str, language: str) -> None:
    words = written_words(text, language)
    forms = [form for word in words for form in word.forms]
    assert forms == choose_form("spoken", language).apply(text).split()
    kept = "".join(" " * word.spaced + word.surface for word in words).split()
    assert kept == (text.split() if forms else [])


@given(st.text("aB1,.$ -'é中", max_size=25))
def test_no_character_is_lost_whatever_the_text(text: str) -> None:
    words = written_words(text, "en")
    assert "".join("".join(word.surface.split()) for word in words) == (
        "".join(text.split()) if words else ""
    )
    assert all(word.forms for word in words)


# ------------------------------------------------------------------------------------------------- step


def _heard(
    text: str, language: str | None = "en", probability: float | None = None, sure: float | None = None
) -> Value:
    words = [{"word": word, "start_s": None, "end_s": None, "confidence": sure} for word in text.split()]
    return {
        "text": text, "language": language, "language_probability": probability, "words": words, "confidence": sure,
    }  # fmt: skip


def _segment(language: str | None = None, **values: Value) -> Segment:
    return Segment(
        "x.wav", 0.0, 1.0, "speech", None, RecordingMetadata(language=language), values, Listener("x.wav")
    )


def test_the_step_votes_over_the_recognizers_that_are_there() -> None:
    step = ConsensusStep(ConsensusConfig(), ["one", "two", "three"])
    assert step.needs == ("one", "two", "three") and step.missing() is None
    value = step.process(
        _segment(one=_heard("a cat", sure=0.5), two=_heard("A cat.", sure=1.0), three=_heard("a hat"))
    )
    assert value == {
        "text": "A cat.",
        "words": [
            {"word": "A", "share": 1.0, "confidence": 0.75},
            {"word": "cat.", "share": 0.6667, "confidence": 0.75},
        ],
        "pairwise_wer": 0.3333,
        "vote_share": 0.8333,
        "unit": "word",
    }


def test_one_recognizer_alone_is_kept_as_it_writes() -> None:
    value = ConsensusStep(ConsensusConfig(), ["one"]).process(_segment(one=_heard("-- A  cat? --")))
    assert (value["text"], value["pairwise_wer"], value["vote_share"]) == ("-- A  cat? --", None, None)


def test_the_step_uses_its_settings() -> None:
    values = {"one": _heard("yes", sure=0.1), "two": _heard("yes", sure=0.1), "three": _heard("no", sure=0.9)}
    texts = [
        ConsensusStep(ConsensusConfig(confidences=chosen), list(values)).process(_segment(**values))["text"]
        for chosen in (None, ConfidencesConfig(alpha=1.0), ConfidencesConfig(alpha=0.5))
    ]
    assert texts == ["yes", "yes", "no"]


def test_nobody_to_vote_is_told() -> None:
    assert "at least one" in (ConsensusStep(ConsensusConfig(), []).missing() or "")
    with pytest.raises(ValueError, match="no recognizer"):
        ConsensusStep(ConsensusConfig(), ["one"]).process(_segment())


def test_the_language_is_the_given_one_or_what_most_are_sure_of() -> None:
    heard = [_heard("x", "en"), _heard("x", "fr", 0.4), _heard("x", "fr", 0.3), _heard("x", None)]
    assert spoken_language("ja", heard) == "ja"
    assert spoken_language(None, heard) == "fr"
    assert spoken_language(None, heard[:2]) == "en"
    assert spoken_language(None, heard[3:]) is None
