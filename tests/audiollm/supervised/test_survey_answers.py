"""The survey of samples with answers to choose among: every answer is measured, bad samples are named and counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import (
    AudioPart,
    ContentPart,
    Message,
    RatedAnswer,
    Sample,
    TextPart,
    write_samples,
)
from audiollm.data.records.shards import ShardWriter
from audiollm.data.records.source import Source
from audiollm.files.set_aside import SetAside
from audiollm.supervised.corpus.survey import survey_sources, texts_of
from tests.audiollm.supervised.train_samples import SAMPLE, small_template

TEMPLATE = small_template()


def spoken(path: str, **judged: float) -> RatedAnswer:
    return RatedAnswer(content=[TextPart(text="seven"), AudioPart(path=path)], **judged)


def preference(id: str, *answers: RatedAnswer, heard: int = 1, **metadata: str) -> Sample:
    content: list[ContentPart] = [AudioPart(path=f"h{n}.wav") for n in range(heard)]
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


def test_a_training_on_conversations_sets_them_aside(tmp_path: Path, source: Source) -> None:
    aside = SetAside(tmp_path / "set_aside.jsonl", "train")
    found = survey_sources([source], TEMPLATE, 60, "cut", aside, lambda: None)
    assert aside.counts == {"answers to choose among": 5} and found.counts() == {"bad": 5, "whole": 1}
    assert "holds 3 answers" in aside.rows[0]["reason"]


def test_a_vocabulary_is_learned_from_answers_too(tmp_path: Path) -> None:
    answers = [RatedAnswer(content=[TextPart(text="yes")]), RatedAnswer(content=[TextPart(text="no")])]
    write_samples(tmp_path / "s.jsonl", [preference("p", *answers, heard=0)])
    aside = SetAside(tmp_path / "set_aside.jsonl", "train")
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    texts = list(texts_of([open_source(tmp_path / "s.jsonl")], aside, nothing))
    assert texts == ["seven", "user", "yes", "assistant", "no", "assistant"]
