"""The stage `multiple_choice`: samples with answers of few become questions with options."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.errors import StageError
from audiollm.evaluate.listening.answer_parts import read_answer
from audiollm.files.atomic import read_jsonl
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.compose.multiple_choice import MultipleChoiceConfig, run_multiple_choice

SPEAKERS = ("ann", "bob", "cid", "dan", "eve")


def spoken(id: str, speaker: str, **metadata: Any) -> Sample:
    asked = [AudioPart(path=f"{id}.wav"), TextPart(text="Who is speaking?")]
    messages = [
        Message(role="user", content=asked),
        Message(role="assistant", content=[TextPart(text=speaker)]),
    ]
    return Sample(
        id=id, messages=messages, task="who_speaks", metadata={"split": "train", "text": "one", **metadata}
    )


def made(folder: Path, samples: list[Sample], **settings: Any) -> list[Sample]:
    write_samples(folder / "in.jsonl", samples)
    config = MultipleChoiceConfig.model_validate({"samples": str(folder / "in.jsonl"), **settings})
    out = folder / "out"
    out.mkdir(exist_ok=True)
    recipe = Recipe("test", folder, "tiny", 0, folder, (), {})
    figures = run_multiple_choice(config, Context(out, recipe, Console(quiet=True), {}))
    found, _ = read_samples(out / "samples.jsonl")
    assert figures["questions"] == len(found)
    return found


def test_options_are_drawn_among_the_answers_to_the_question(tmp_path: Path) -> None:
    samples = [spoken(f"s{n}", SPEAKERS[n % 5]) for n in range(200)]
    found = made(tmp_path, samples, prompt="ke_omni_r", thought="I hear {text}.")
    again = made(tmp_path, list(reversed(samples)), prompt="ke_omni_r", thought="I hear {text}.")
    assert {each.id: each for each in again} == {each.id: each for each in found}  # not by their order
    for before, after in zip(samples, found, strict=True):
        choices = after.metadata["choices"]
        right = before.texts("assistant")[0]
        assert len(set(choices)) == 4 and right in choices and set(choices) <= set(SPEAKERS)
        assert str(choices) in after.texts("user")[0] and after.audio("user") == before.audio("user")
        reply = read_answer(after.texts("assistant")[0])
        assert (reply.thought, reply.answer, reply.thinks_well) == ("I hear one.", right, True)
    places = Counter(
        each.metadata["choices"].index(read_answer(each.texts("assistant")[0]).answer) for each in found
    )
    assert min(places.values()) > 30  # the right one stands anywhere


def test_what_is_no_question_is_named(tmp_path: Path) -> None:
    alone = spoken("alone", "ann").model_copy(
        update={
            "messages": [
                *spoken("alone", "x").messages[:1],
                Message(role="assistant", content=[TextPart(text="x")]),
            ]
        }
    )
    other = alone.model_copy(
        update={"messages": [Message(role="user", content=[TextPart(text="Why?")]), alone.messages[1]]}
    )
    few = [spoken("a", "ann"), spoken("b", "bob"), other.model_copy(update={"id": "why"})]
    found = made(tmp_path, few, options=4)
    assert [each.id for each in found] == ["a", "b"] and len(found[0].metadata["choices"]) == 2
    assert found[0].texts("assistant") == ["ann"]
    assert [row["id"] for row in read_jsonl(tmp_path / "out" / "set_aside.jsonl")] == ["why"]
    lacking = made(tmp_path, [*few[:2], spoken("c", "bob", text=None)], prompt="ke_omni_r", thought="{text}")
    assert [each.id for each in lacking] == ["a", "b"]
    with pytest.raises(StageError, match="answer of few"):
        made(tmp_path, [other])
    with pytest.raises(ValidationError, match="did you mean 'ke_omni_r'"):
        made(tmp_path, few, prompt="ke_omni")


def test_options_of_the_metadata_stay_in_their_order(tmp_path: Path) -> None:
    choices = ["dan", "ann", "eve"]
    samples = [spoken("a", "ann", choices=choices), spoken("b", "bob", choices=choices)]
    [question] = made(tmp_path, samples, prompt="ke_omni_r", thought="I hear {text}.", options=2)
    assert question.id == "a" and question.metadata["choices"] == choices
    assert str(choices) in question.texts("user")[0]
