"""Answers as published models write them, with keys: `answers_of_models.jsonl`, made from the habits of ten models.

Each row has the habit (`Qwen2-Audio`, `Gemini`, ...), the form of the question (`options`, `open`, `number`, `math`),
its options, the key, the answer, and whether a person calls it right. Nearly half are wrong: denials, two options,
refusals, the right option in the thought alone, answers that are cut off. Rewards, evaluation and selection read them
alike.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from audiollm.data.records.sample import Message, RatedAnswer, Sample, TextPart
from audiollm.evaluate.listening.audio_qa import Question, evaluate_audio_qa
from audiollm.evaluate.listening.choices import read_choice
from audiollm.evaluate.listening.replies import Reply
from audiollm.rl.rewards.batch import SampledAnswer
from audiollm.rl.rewards.settings import AccuracySettings
from audiollm.rl.rewards.texts import accuracy
from pipelines.answers.scorers import ChoiceJudge

ROWS: list[dict[str, Any]] = [
    json.loads(line)
    for line in Path(__file__).with_name("answers_of_models.jsonl").read_text(encoding="utf-8").splitlines()
]
WITH_OPTIONS = [row for row in ROWS if row["form"] == "options"]


def question(row: dict[str, Any]) -> Sample:
    """The row as a sample whose last turn is the key."""
    messages = [
        Message(role="user", content=[TextPart(text="What is it?")]),
        Message(role="assistant", content=[TextPart(text=row["key"])]),
    ]
    return Sample(id="q", messages=messages, task="qa", metadata={"choices": row["choices"]})


def by_reward(row: dict[str, Any]) -> bool:
    settings = AccuracySettings(match="math" if row["form"] == "math" else "auto")
    return accuracy(SampledAnswer(question(row), row["answer"], 1), settings) == 1.0


def read_wrong(rows: list[dict[str, Any]], verdicts: list[bool]) -> list[str]:
    pairs = zip(rows, verdicts, strict=True)
    return [f"{row['key']!r}: {row['answer']!r}" for row, verdict in pairs if verdict is not row["right"]]


def test_the_table_holds_ten_habits_and_nearly_as_many_wrong_answers_as_right_ones() -> None:
    habits = Counter(row["habit"] for row in ROWS)
    assert len(ROWS) >= 200 and len(habits) == 10 and min(habits.values()) >= 20
    assert 0.4 < sum(not row["right"] for row in ROWS) / len(ROWS) < 0.6


def test_the_reward_reads_them_as_a_person_does() -> None:
    assert not read_wrong(ROWS, [by_reward(row) for row in ROWS])


def test_the_evaluation_reads_them_alike() -> None:
    questions = [
        Question(id=str(n), audio_id="a.wav", question="?", choices=row["choices"], answer=row["key"])
        for n, row in enumerate(WITH_OPTIONS)
    ]
    replies = {str(n): Reply(row["answer"]) for n, row in enumerate(WITH_OPTIONS)}
    rows = evaluate_audio_qa(questions, replies, Path()).rows
    assert not read_wrong(WITH_OPTIONS, [bool(row["right"]) for row in rows])


def test_the_selection_reads_them_alike() -> None:
    verdicts = []
    for row in WITH_OPTIONS:
        sample = question(row)
        answers = [RatedAnswer(content=[TextPart(text=row["answer"])])]
        asked = sample.model_copy(
            update={
                "messages": sample.messages[:1],
                "metadata": sample.metadata | {"right": row["key"]},
                "answers": answers,
            }
        )
        verdicts.append(ChoiceJudge([sample]).score(asked, [0])[0].value == 1.0)
    assert not read_wrong(WITH_OPTIONS, verdicts)


def test_every_key_of_the_table_is_right_as_an_answer() -> None:
    keys = [row | {"answer": row["key"], "right": True} for row in ROWS]
    assert not read_wrong(keys, [by_reward(row) for row in keys])


@pytest.mark.parametrize(
    "key", [r"\frac{1}{\sqrt{2}}", "(1,2)", "x=5", r"12\%", r"45^\circ", "twelve", "E4", "?"]
)
@pytest.mark.parametrize("match", ["math", "number", "text", "auto", "exact"])
def test_an_answer_that_is_the_key_is_right_by_every_comparison(key: str, match: Any) -> None:
    row = {"key": key, "choices": []}
    assert accuracy(SampledAnswer(question(row), key, 1), AccuracySettings(match=match)) == 1.0


@pytest.mark.parametrize(
    ("reply", "key", "match"),
    [("True", "1", "math"), ("True", "1", "number"), ("not a dog", "a dog", "auto"), ("E5", "E4", "auto")],
)
def test_an_answer_that_only_looks_like_the_key_is_wrong(reply: str, key: str, match: Any) -> None:
    row = {"key": key, "choices": []}
    assert accuracy(SampledAnswer(question(row), reply, 1), AccuracySettings(match=match)) == 0.0


def test_a_minus_of_unicode_is_a_minus() -> None:
    for match in ("math", "number", "auto"):
        row = {"key": "-5", "choices": []}
        assert accuracy(SampledAnswer(question(row), "\u22125", 1), AccuracySettings(match=match)) == 1.0


@pytest.mark.parametrize(
    "statement",
    ["I doubt not that it is no dog", "It isn't true that it is a dog.", "I don't think it is a dog."],
)
def test_a_statement_behind_a_denial_is_none(statement: str) -> None:
    row = {"key": "a dog", "choices": []}
    assert accuracy(SampledAnswer(question(row), statement, 1), AccuracySettings()) == 0.0


@pytest.mark.parametrize(
    "unit", ["the answer is ", "answer ", "it is ", r"\boxed{", "{", "<think>", "is ", "1", " ", "( ", "B "]
)
def test_long_garbage_is_read_in_time_that_its_length_does_not_square(unit: str) -> None:
    text = unit * (20_000 // len(unit))
    start_s = time.process_time()
    read_choice(text, ["rain", "a dog"])
    accuracy(SampledAnswer(question({"key": "a dog", "choices": []}), text, 1), AccuracySettings())
    assert time.process_time() - start_s < 5.0, "0.5 s as a rule"
