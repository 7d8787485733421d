"""The stage `correct_answers`: own mistakes, corrected over an endpoint or by the right answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import AudioPart, Message, RatedAnswer, Sample, TextPart, write_samples
from audiollm.errors import ConfigError, StageError
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from tests.audiollm.rl.preference.records import tone
from tests.pipelines.answers.test_judge_scores import Judge, judge

_ = judge  # the fixture


def rated(text: str, score: float | None, times: int) -> RatedAnswer:
    answer = [TextPart(text=text)]
    return RatedAnswer(content=answer, score=score, origin="own", metadata={"times": times})


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """Samples with mistakes, without one, with a mistake that has no score, and without a right answer."""
    tone(tmp_path / "a.wav", 300.0)
    asked = Message(role="user", content=[AudioPart(path="a.wav"), TextPart(text="High or low?")])
    right = {"right": "high", "split": "test"}

    def made(name: str, metadata: dict[str, Any], *answers: RatedAnswer) -> Sample:
        return Sample(id=name, messages=[asked], task="question", metadata=metadata, answers=list(answers))

    every = [
        made("wrong", right, rated("It is mid", 0.0, 1), rated("It is low", 0.0, 2), rated("high", 1.0, 1)),
        made("right", right, rated("high", 1.0, 4), rated("low", 0.0, 0)),  # which the model never gave
        made("unscored", right, rated("low", None, 4)),
        made("untold", {}, rated("low", 0.0, 4)),
    ]
    write_samples(tmp_path / "samples.jsonl", every)
    return tmp_path


def run(place: Path, **settings: Any) -> tuple[dict[str, Any], Path]:
    stage = {"samples": str(place / "samples.jsonl"), **settings}
    (place / "recipe.yaml").write_text(
        yaml.safe_dump({"name": "any", "stages": [{"correct_answers": stage}]})
    )
    loaded = load_recipe(place / "recipe.yaml", runs=place / "runs")
    run_recipe(loaded, Console(quiet=True))
    folder = loaded.folder / "correct_answers"
    return json.loads((folder / "stage.json").read_text())["figures"], folder


def said(sample: Sample) -> list[str]:
    contents = [each.content for each in (sample.answers or sample.messages[1:])]
    return [part.text for content in contents for part in content if isinstance(part, TextPart)]


def test_the_right_answer_stands_for_the_correction(samples: Path) -> None:
    figures, folder = run(samples)
    assert figures == {"samples": 4, "corrected": 1, "answered": 3, "set_aside": 1}
    (pair,), _ = read_samples(folder / "samples.jsonl")
    assert pair.id == "wrong" and said(pair) == ["high", "It is low"] and pair.metadata["split"] == "test"
    assert [answer.rank for answer in pair.answers] == [1, 2]
    answered, _ = read_samples(folder / "answered.jsonl")
    assert [(each.id, said(each)) for each in answered] == [
        ("wrong#right", ["high"]), ("right#right", ["high"]), ("unscored#right", ["high"])
    ]  # fmt: skip
    with pytest.raises(StageError, match="no right answer"):
        run(samples, strict=True)


def test_an_endpoint_corrects_once(samples: Path, judge: Judge) -> None:
    corrector = {"url": judge.url, "model": "m", "key_variable": "NO_KEY", "attempts": 1}
    figures, folder = run(samples, corrector=corrector)
    (pair,), _ = read_samples(folder / "samples.jsonl")
    assert said(pair) == ["Good. Score: 1", "It is low"]  # as the server of this test replies
    assert pair.answers[0].origin == "correction" and pair.answers[1].origin == "own"
    answered, _ = read_samples(folder / "answered.jsonl")
    assert [each.id for each in answered][-1] == "wrong#correction" and figures["answered"] == 4
    content = judge.seen[0]["messages"][-1]["content"]
    text = content[-1]["text"]
    assert "<reference>high</reference>" in text and "<response>It is low</response>" in text
    assert any(part["type"] != "text" for part in content)  # it hears the recording
    run(samples, corrector=corrector, strict=False, right_score=0.9)
    assert len(judge.seen) == 1
    judge.status = 500
    with pytest.raises(StageError, match="none of 4 samples"):
        run(samples, corrector=corrector, prompt="Correct {answer} by {right}.")
    rows = [json.loads(line) for line in (folder / "set_aside.jsonl").open()]
    assert {row["kind"] for row in rows} == {"no right answer", "no correction"}


def test_settings_that_nothing_reads_are_refused(samples: Path) -> None:
    with pytest.raises(ConfigError, match="max_answer_tokens is set, but there is no corrector"):
        run(samples, max_answer_tokens=5)
    with pytest.raises(ConfigError, match="the prompt must hold"):
        run(samples, prompt="Correct {answer}", corrector={"url": "http://127.0.0.1:1/v1", "model": "m"})
