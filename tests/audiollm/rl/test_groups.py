"""Pairs, lists, single answers and steps of one record, and the records that do not hold what is asked for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audiollm.data.records.sample import Message, RatedAnswer, Sample, TextPart
from audiollm.errors import BadSample
from audiollm.rl.groups import (
    AnswerPair,
    AnswerSteps,
    JudgedAnswer,
    PairChoice,
    RankedAnswers,
    best_and_worst,
    groups_of,
    with_answer,
)
from audiollm.rl.objectives.catalog import CATALOG, needs_of


def answer(text: str, **judged: Any) -> RatedAnswer:
    return RatedAnswer(content=[TextPart(text=text)], **judged)


def preference(*answers: RatedAnswer, **metadata: Any) -> Sample:
    asked = [Message(role="user", content=[TextPart(text="which?")])]
    return Sample(id="s", messages=asked, task="audio_qa", answers=list(answers), metadata=metadata)


def scored(*scores: float) -> Sample:
    return preference(*(answer(f"a{n}", score=score) for n, score in enumerate(scores)))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("best_worst", [(2, 1, 0.75)]),
        ("best_others", [(2, 0, 0.25), (2, 3, 0.25), (2, 1, 0.75)]),
        ("adjacent", [(2, 0, 0.25), (3, 1, 0.5)]),
        ("all", [(2, 0, 0.25), (2, 3, 0.25), (2, 1, 0.75), (0, 1, 0.5), (3, 1, 0.5)]),
    ],
)
def test_pairs_of_a_list(choice: PairChoice, expected: list[tuple[int, int, float]]) -> None:
    """Answers that were judged equal (0 and 3) make no pair."""
    made = groups_of(scored(0.75, 0.25, 1.0, 0.75), "pairs", pairs=choice)
    assert made == [AnswerPair(*pair) for pair in expected]


def test_what_decides_the_order() -> None:
    ranked = preference(answer("x", rank=2), answer("y", rank=1), margin=0.3)
    assert groups_of(ranked, "pairs") == [AnswerPair(1, 0, 0.3)]
    assert groups_of(ranked, "lists") == [RankedAnswers((1, 0), (-1.0, -2.0))]
    verdicts = preference(answer("x", verdict="undesirable"), answer("y", verdict="desirable"))
    assert groups_of(verdicts, "pairs") == [AnswerPair(1, 0)]
    both = preference(
        answer("x", rank=1, score=5), answer("y", rank=3, score=4), answer("z", rank=2, score=4)
    )
    assert groups_of(both, "lists") == [RankedAnswers((0, 2, 1), (5.0, 4.0, 4.0))], "ranks decide a tie"
    assert best_and_worst(both) == AnswerPair(0, 1, 1.0)
    half_scored = preference(answer("x", rank=1, score=5), answer("y", rank=2))
    assert groups_of(half_scored, "pairs") == [AnswerPair(0, 1)], "all have ranks, so they decide"


def test_single_answers() -> None:
    needs = frozenset({"desirable_N"})
    pair = preference(answer("x", rank=1), answer("y", rank=2))
    assert groups_of(pair, "singles", needs) == [JudgedAnswer(0, True), JudgedAnswer(1, False)]
    thumb = preference(answer("x", verdict="undesirable", score=0.5))
    assert groups_of(thumb, "singles", needs) == [JudgedAnswer(0, False, 0.5)]
    assert groups_of(thumb, "singles", ("score_N",)) == [JudgedAnswer(0, None, 0.5)]
    assert groups_of(preference(answer("x")), "singles") == [JudgedAnswer(0)], (
        "cross entropy needs no verdict"
    )
    several = scored(3, 1, 2)
    assert groups_of(several, "singles") == [JudgedAnswer(0, True, 3.0), JudgedAnswer(1, False, 1.0)]
    assert groups_of(several, "singles", needs, "all") == [
        JudgedAnswer(0, True, 3.0),
        JudgedAnswer(1, False, 1.0),
    ], "answer 2 is chosen in one pair and rejected in another"


def test_labelled_steps() -> None:
    parts = [TextPart(text=text) for text in ("first ", "goes on. ", "second.")]
    sample = preference(RatedAnswer(content=parts, steps=[None, 1, 0.25]))
    assert groups_of(sample, "steps") == [AnswerSteps(0, (1.0, 0.25), (1, 2))]


TWO = (answer("x", score=1), answer("y", score=0))


@pytest.mark.parametrize(
    ("sample", "kind", "fields", "reason", "counted"),
    [
        (preference(), "pairs", (), "has no answers", "no answers"),
        (preference(answer("x")), "pairs", (), "a comparison needs two", "one answer"),
        (preference(answer("x", score=1)), "lists", (), "a comparison needs two", "one answer"),
        (preference(answer("x", rank=1), answer(" x\n", rank=2)), "pairs", (), "0 and 1 are equal", "equal answers"),
        (scored(1, 1), "pairs", (), "judged equal", "no preference"),
        (preference(answer("x"), answer("y")), "lists", (), "answers 0, 1 have neither", "no judgement"),
        (preference(answer("x", score=1), answer("y")), "pairs", (), "none of answers 1", "no scores"),
        (preference(answer("x", score=0, rank=1), answer("y", score=1, rank=2)), "pairs", (),
         "ranked before answer 1 and has a lower score", "rank against score"),
        (preference(answer("x")), "singles", ("desirable_N",), "whether it is desirable", "no verdict"),
        (preference(answer("x", verdict="desirable"), answer("y")), "singles", ("desirable_N",),
         "answer 1 has no verdict", "no verdict"),
        (preference(answer("x")), "singles", ("score_N",), "scores are needed", "no scores"),
        (preference(*TWO), "steps", (), "none of answers 0, 1", "no scores of steps"),
        (preference(answer("x", steps=[2])), "steps", (), "steps.0: a label is from 0", "wrong scores of steps"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(
    sample: Sample, kind: Any, fields: tuple[str, ...], reason: str, counted: str
) -> None:
    with pytest.raises(BadSample) as caught:
        groups_of(sample, kind, fields, place="p.jsonl:3")
    assert reason in caught.value.reason
    assert (caught.value.place, caught.value.id, caught.value.kind) == ("p.jsonl:3", "s", counted)


def test_an_ordinary_sample_is_one_answer() -> None:
    chat = [
        Message(role="user", content=[TextPart(text="q")]),
        Message(role="assistant", content=[TextPart(text="a")]),
    ]
    plain = Sample(id="s", messages=chat, task="text", metadata={"kto_tag": False, "x": 1})
    turned = with_answer(plain)
    assert turned.messages == chat[:1] and turned.metadata == {"x": 1}
    assert groups_of(turned, "singles", {"desirable_N"}) == [JudgedAnswer(0, False)]
    assert turned.answered(0).messages == chat and with_answer(turned) is turned
    for messages in (chat[:1], chat[1:]):
        with pytest.raises(BadSample, match="has no answer"):
            with_answer(plain.model_copy(update={"messages": messages}), "p")
    with pytest.raises(BadSample, match="true or false, not 'yes'"):
        with_answer(plain.model_copy(update={"metadata": {"kto_tag": "yes"}}), "p")


def test_every_objective_gets_its_groups() -> None:
    """One record that holds everything serves the whole catalogue."""
    answers = [answer(f"a{n}", score=n / 4, rank=5 - n, steps=[n / 4]) for n in range(1, 5)]
    for name, entry in CATALOG.items():
        needs = needs_of(name, entry.settings())
        for kind in needs.groups:
            made = groups_of(preference(*answers), kind, needs.fields)
            assert made, name
            if kind == "singles":
                assert all(isinstance(group, JudgedAnswer) for group in made)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6, unique=True))
def test_every_choice_of_pairs_agrees_with_the_ranking(scores: list[float]) -> None:
    sample = scored(*scores)
    (ranking,) = groups_of(sample, "lists")
    assert isinstance(ranking, RankedAnswers)
    assert list(ranking.scores) == sorted(scores, reverse=True)
    for choice, count in (
        ("best_worst", 1),
        ("best_others", len(scores) - 1),
        ("adjacent", len(scores) - 1),
        ("all", len(scores) * (len(scores) - 1) // 2),
    ):
        made = groups_of(sample, "pairs", pairs=choice)  # type: ignore[arg-type]
        assert len(made) == count
        for pair in made:
            assert isinstance(pair, AnswerPair) and pair.margin is not None and pair.margin > 0
