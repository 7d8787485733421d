"""The survey of samples with answers to choose among: every answer is measured, bad samples are named and counted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import pytest

from audiollm.audio import save
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import (
    AudioPart,
    Message,
    Part,
    RatedAnswer,
    Sample,
    TextPart,
    write_samples,
)
from audiollm.data.records.shards import ShardWriter
from audiollm.data.records.source import Source
from audiollm.errors import BadSample
from audiollm.files.set_aside import SetAside
from audiollm.rl.groups import groups_of
from audiollm.supervised.corpus.survey import AnswersUsed, load_survey, save_survey, survey_sources, texts_of
from tests.audiollm.supervised.heard_samples import SHAPE, sound
from tests.audiollm.supervised.train_samples import SAMPLE, small_template

TEMPLATE = small_template()


def used_by(kind: str, **settings: str) -> AnswersUsed:
    """All answers that the groups of this kind name."""

    def used(sample: Sample, place: str) -> Collection[int]:
        groups = groups_of(sample, kind, place=place, **settings)  # type: ignore[arg-type]
        named: set[int] = set()
        for group in groups:
            named |= set(getattr(group, "answers", ())) | {
                value for key, value in vars(group).items() if key in ("chosen", "rejected", "answer")
            }
        return named

    return used


def spoken(path: str, **judged: float) -> RatedAnswer:
    return RatedAnswer(content=[TextPart(text="seven"), AudioPart(path=path)], **judged)


def preference(id: str, *answers: RatedAnswer, heard: int = 1, **metadata: str) -> Sample:
    content: list[Part] = [AudioPart(path=f"h{n}.wav") for n in range(heard)]
    asked = [Message(role="user", content=[*content, TextPart(text="seven")])]
    return Sample(id=id, messages=asked, task="tts", answers=list(answers), metadata=metadata)


def codes(*frames: int) -> list[list[np.ndarray]]:
    return [[np.full((4, count), count % 32) for count in frames]]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    writer = ShardWriter(tmp_path / "shards", 3)
    three = [spoken("a.wav", score=0.5), spoken("b.wav", score=1.0), spoken("c.wav", score=0.0)]
    writer.write(0, preference("three", *three, speaker="ann"), codes(9, 4, 5, 6))
    writer.write(1, preference("two", *three[:2], heard=2, split="test"), codes(3, 4, 5, 2))
    writer.write(2, preference("long", *three[:2]), codes(3, 4, 90))
    writer.write(3, preference("equal", three[0], spoken("a.wav", score=0.9)), codes(3, 4, 4))
    writer.write(4, preference("one", three[0]), codes(3, 4))
    writer.write(5, SAMPLE.model_copy(update={"id": "plain"}), codes(3))
    writer.close({"codec": {"num_codebooks": 4, "codebook_size": 32}})
    return open_source(tmp_path / "shards")


def test_every_answer_that_is_used_is_measured(tmp_path: Path, source: Source) -> None:
    aside = SetAside(tmp_path / "set_aside.jsonl", "train_preference")
    found = survey_sources([source], TEMPLATE, 60, "cut", aside, lambda: None, answers_used=used_by("pairs"))
    assert aside.counts == {"too long": 1, "equal answers": 1, "one answer": 1, "no answers": 1}
    assert [row["id"] for row in aside.rows] == ["long", "equal", "one", "plain"]
    assert "longer than 60 positions, and answers are never cut" in aside.rows[0]["reason"]
    assert found.counts() == {"bad": 3, "whole": 2, "refused": 1}
    expected = np.zeros((6, 3), np.int64)
    for index, answers in ((0, (1, 2)), (1, (0, 1))):
        for answer in answers:
            answered = source[index].answered(answer)
            assert len(answered.audio) == len(answered.encodings[0])
            expected[index, answer] = len(TEMPLATE.compile(answered.sample.messages, answered.encodings[0]))
    assert np.array_equal(found.answer_rows[0], expected), "the middle one of three is in no pair"
    assert np.array_equal(found.rows[0], expected.sum(axis=1)) and found.speakers == ("ann",)
    assert found.used(0, held_out=True).tolist() == [1]
    save_survey(tmp_path / "survey.safetensors", found)
    assert np.array_equal(load_survey(tmp_path / "survey.safetensors").answer_rows[0], expected)
    lists = survey_sources([source], TEMPLATE, 60, "cut", aside, lambda: None, answers_used=used_by("lists"))
    assert lists.answer_rows[0][0].all() and lists.rows[0][0] > found.rows[0][0]
    with pytest.raises(BadSample, match="longer than 60"):
        strict = SetAside(tmp_path / "b.jsonl", "train_preference", strict=True)
        survey_sources([source], TEMPLATE, 60, "cut", strict, lambda: None, answers_used=used_by("pairs"))


def test_a_training_on_conversations_sets_them_aside(tmp_path: Path, source: Source) -> None:
    aside = SetAside(tmp_path / "set_aside.jsonl", "train")
    found = survey_sources([source], TEMPLATE, 60, "cut", aside, lambda: None)
    assert aside.counts == {"answers to choose among": 5} and found.counts() == {"bad": 5, "whole": 1}
    assert "holds 3 answers" in aside.rows[0]["reason"] and not found.answer_rows
    save_survey(tmp_path / "survey.safetensors", found)
    assert load_survey(tmp_path / "survey.safetensors").answer_rows == []


def test_a_vocabulary_is_learned_from_answers_too(tmp_path: Path) -> None:
    answers = [RatedAnswer(content=[TextPart(text="yes")]), RatedAnswer(content=[TextPart(text="no")])]
    write_samples(tmp_path / "s.jsonl", [preference("p", *answers, heard=0)])
    aside = SetAside(tmp_path / "set_aside.jsonl", "train")
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    texts = list(texts_of([open_source(tmp_path / "s.jsonl")], aside, nothing))
    assert texts == ["seven", "user", "yes", "assistant", "no", "assistant"]


def test_recordings_that_are_broken_or_not_there_are_named(tmp_path: Path) -> None:
    """A pair whose question is heard as features: its answers need no codes, unless they are spoken."""
    save(tmp_path / "h0.wav", sound(0.5), 16_000)
    (tmp_path / "broken.wav").write_bytes(b"RIFF no sound")
    answers = [
        RatedAnswer(content=[TextPart(text=text)], rank=n) for n, text in enumerate(("yes", "no"), start=1)
    ]

    def heard(id: str, path: str, *own: RatedAnswer) -> Sample:
        asked = preference(id, *(own or answers))
        return asked.with_parts(
            lambda part: (
                part.model_copy(update={"path": path}) if getattr(part, "path", "") == "h0.wav" else part
            )
        )

    samples = [
        heard("good", "h0.wav"),
        heard("broken", "broken.wav"),
        heard("gone", "gone.wav"),
        heard("spoken", "h0.wav", spoken("a.wav", rank=1), answers[1]),
    ]
    write_samples(tmp_path / "s.jsonl", samples)
    aside = SetAside(tmp_path / "set_aside.jsonl", "train_preference")
    sources = [open_source(tmp_path / "s.jsonl")]
    found = survey_sources(sources, TEMPLATE, 99, "cut", aside, lambda: None, SHAPE, used_by("pairs"))
    kinds = {row["id"]: row["kind"] for row in aside.rows}
    assert kinds == {"broken": "undecodable audio", "gone": "undecodable audio", "spoken": "missing codes"}
    assert found.counts() == {"bad": 3, "whole": 1} and found.answer_rows[0][0].min() > 13
    assert all("tokenize" in row["reason"] for row in aside.rows if row["id"] == "spoken")


def test_codes_of_another_codec_are_named(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "shards", 3)
    writer.write(0, preference("p", spoken("a.wav", rank=1), spoken("b.wav", rank=2)), codes(3, 4, 5))
    wrong = [[np.full((4, 3), 1), np.full((4, 3), 40), np.full((4, 3), 1)]]
    writer.write(1, preference("q", spoken("a.wav", rank=1), spoken("b.wav", rank=2)), wrong)
    writer.close({})
    aside = SetAside(tmp_path / "set_aside.jsonl", "train_preference")
    source = open_source(tmp_path / "shards")
    found = survey_sources([source], TEMPLATE, 60, "cut", aside, lambda: None, answers_used=used_by("pairs"))
    assert found.counts() == {"whole": 1, "bad": 1} and "codes must be 0..31" in aside.rows[0]["reason"]
