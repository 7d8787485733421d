"""Answers that a model gives: sampled, scored, selected, by recipes."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import (
    AudioPart,
    Message,
    RatedAnswer,
    Sample,
    TextPart,
    write_samples,
)
from audiollm.errors import ConfigError, StageError
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from pipelines.answers.samplers import FolderSampler
from pipelines.answers.select import rejection_sample
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import tone


@pytest.fixture
def place(tmp_path: Path) -> Path:
    save_tiny("qwen2_audio", tmp_path / "model")
    samples = []
    for n in range(4):
        tone(tmp_path / f"{n}.wav", 200.0 + 100 * n)
        asked = Message(role="user", content=[AudioPart(path=f"{n}.wav"), TextPart(text="High or low?")])
        right = Message(role="assistant", content=[TextPart(text=("high", "low")[n % 2])])
        split = {"split": "test"} if n == 3 else {"split": "train"}
        samples.append(Sample(id=f"t{n}", messages=[asked, right], task="question", metadata=split))
    write_samples(tmp_path / "samples.jsonl", samples)
    return tmp_path


def run(place: Path, kind: str, name: str, **settings: Any) -> tuple[dict[str, Any], list[Sample]]:
    recipe = place / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump({"name": name, "stages": [{kind: settings}]}))
    loaded = load_recipe(recipe, runs=place / "runs")
    run_recipe(loaded, Console(quiet=True))
    folder = loaded.folder / kind
    found, bad = read_samples(folder / "samples.jsonl")
    assert not bad
    return json.loads((folder / "stage.json").read_text())["figures"], found


def sampled(place: Path, name: str, **settings: Any) -> tuple[dict[str, Any], list[Sample]]:
    given = {"samples": str(place / "samples.jsonl"), "model": str(place / "model"), "max_answer_tokens": 5}
    return run(place, "sample_answers", name, **{**given, **settings})


def words(answer: RatedAnswer) -> str:
    return "".join(part.text for part in answer.content if isinstance(part, TextPart))


def test_answers_are_sampled_scored_and_counted(place: Path) -> None:
    figures, found = sampled(place, "a", group_size=3, score={"choice": 1.0, "exact": 2.0})
    assert figures["samples"] == 4 and figures["answers"] == 12 and figures["set_aside"] == 0
    for sample in found:
        assert sample.messages[-1].role == "user" and sample.metadata["right"] in ("high", "low")
        (right,) = [answer for answer in sample.answers if answer.origin == "right answer"]
        assert right.score == 3.0 and right.metadata["scores"] == {"choice": 1.0, "exact": 1.0}
        own = [answer for answer in sample.answers if answer.origin == "model"]
        assert sum(answer.metadata["times"] for answer in own) == 3
        assert all(answer.score == 0.0 for answer in own)


def test_a_right_answer_that_would_not_be_right_is_set_aside_before_it_is_answered(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, _ = read_samples(place / "samples.jsonl")
    unread = [*samples[1].messages[:-1], Message(role="assistant", content=[TextPart(text="?")])]
    metadata = samples[1].metadata | {"choices": ["?", "high"]}
    samples[1] = samples[1].model_copy(update={"messages": unread, "metadata": metadata})
    write_samples(place / "samples.jsonl", samples)
    answered: list[str] = []
    original = FolderSampler.sample

    def sample(self: FolderSampler, sample: Sample, *settings: Any) -> list[str]:
        answered.append(sample.id)
        return original(self, sample, *settings)

    monkeypatch.setattr(FolderSampler, "sample", sample)
    figures, rated = sampled(place, "a", group_size=1, score={"choice": 1.0})
    assert figures["set_aside"] == 1 and {sample.id for sample in rated} == {"t0", "t2", "t3"} == set(
        answered
    )
    (row,) = map(json.loads, next(place.rglob("set_aside.jsonl")).read_text().splitlines())
    assert "'?' is not read as itself" in json.dumps(row)


def test_an_answer_depends_on_its_own_number_alone(place: Path) -> None:
    """Of four answers the first two are those of two; and a run that is begun again asks for nothing twice."""
    few, many = (sampled(place, f"n{n}", group_size=n)[1] for n in (2, 4))
    for one, other in zip(few, many, strict=True):
        assert {words(answer) for answer in one.answers} <= {words(answer) for answer in other.answers}
    assert any(len(one.answers) < len(other.answers) for one, other in zip(few, many, strict=True))


def test_a_killed_stage_asks_for_what_is_missing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    original = FolderSampler.sample

    def sample(self: FolderSampler, sample: Sample, *given: Any) -> list[str]:
        asked.append(sample.id)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return original(self, sample, *given)

    monkeypatch.setattr(FolderSampler, "sample", sample)
    with pytest.raises(KeyboardInterrupt):
        sampled(place, "killed", group_size=2)
    _, found = sampled(place, "killed", group_size=2)
    assert asked == ["t3", "t0", "t1", "t1", "t2"] and len(found) == 4
    monkeypatch.undo()
    assert sampled(place, "whole", group_size=2)[1] == found


def test_another_recording_in_the_same_file_is_asked_about_anew(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def sample(self: FolderSampler, sample: Sample, numbers: Any, *_: Any) -> list[str]:
        asked.append(sample.id)
        return ["high"] * len(numbers)

    monkeypatch.setattr(FolderSampler, "sample", sample)
    sampled(place, "again", group_size=2)
    tone(place / "1.wav", 900.0)
    samples, _ = read_samples(place / "samples.jsonl")
    write_samples(place / "samples.jsonl", samples)  # the stage before has run again, into the same files
    sampled(place, "again", group_size=2, score={"exact": 1.0})
    assert asked == ["t3", "t0", "t1", "t2", "t1"]


def test_bad_prompts_are_set_aside(place: Path) -> None:
    rows = [json.loads(line) for line in (place / "samples.jsonl").open()]
    rows[0]["messages"][0]["content"][0]["path"] = "absent.wav"
    rows[1]["messages"] = rows[1]["messages"][:1]
    (place / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    figures, found = sampled(place, "bad", score={"exact": 1.0})
    assert figures["set_aside"] == 2 and [sample.id for sample in found] == ["t3", "t2"]
    kinds = [json.loads(line)["kind"] for line in (place / "runs/bad/sample_answers/set_aside.jsonl").open()]
    assert sorted(kinds) == ["no right answer", "unreadable file"]
    with pytest.raises(ConfigError, match="no sample has a right answer"):
        rows = [{**row, "messages": row["messages"][:1]} for row in rows]
        (place / "unlabelled.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
        sampled(place, "unlabelled", samples=str(place / "unlabelled.jsonl"))
    with pytest.raises(StageError, match="t0"):
        sampled(place, "strict", score={"exact": 1.0}, strict=True)
    with pytest.raises(ConfigError, match="go together"):
        sampled(place, "no-reward", score={"reward_model": 1.0})


def rated(*pairs: tuple[str, float]) -> list[RatedAnswer]:
    return [RatedAnswer(content=[TextPart(text=text)], score=score) for text, score in pairs]


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    asked = [Message(role="user", content=[TextPart(text="?")])]
    samples = [
        Sample(
            id="a", messages=asked, task="q", answers=rated(("yes", 1), ("no", 0), ("a very long one", -1))
        ),
        Sample(id="b", messages=asked, task="q", answers=rated(("x", 0.5), ("y", 0.5))),
        Sample(
            id="c", messages=asked, task="q", answers=rated(("longer answer", 1), ("good", 1), ("bad", 0.2))
        ),
    ]
    write_samples(tmp_path / "scored.jsonl", samples)
    return tmp_path


def selected(scored: Path, name: str, **settings: Any) -> tuple[dict[str, Any], list[tuple[str, list[str]]]]:
    figures, found = run(scored, "select_answers", name, samples=str(scored / "scored.jsonl"), **settings)
    return figures, [(sample.id, [words(answer) for answer in sample.answers]) for sample in found]


def test_pairs_by_margin_and_length(scored: Path) -> None:
    figures, found = selected(scored, "best")
    assert found == [("a", ["yes", "a very long one"]), ("c", ["longer answer", "bad"])]
    assert figures["without a pair with such a margin and lengths"] == 1
    _, even = selected(scored, "even", max_length_ratio=1.5)  # "yes" and "no": 1.5; "good" and "bad": 1.33
    assert even == [("a", ["yes", "no"]), ("c", ["good", "bad"])]
    _, wide = selected(scored, "wide", select="all_pairs", min_margin=0.9)
    assert wide == [
        ("a#0", ["yes", "a very long one"]),
        ("a#1", ["yes", "no"]),
        ("a#2", ["no", "a very long one"]),
    ]


def test_disjoint_pairs_use_each_answer_once(tmp_path: Path) -> None:
    asked = [Message(role="user", content=[TextPart(text="?")])]
    answers = rated(("a", 3), ("bbbb", 1), ("c", 2), ("d", 0), ("eeee", 0), ("f", 1))
    write_samples(tmp_path / "scored.jsonl", [Sample(id="x", messages=asked, task="q", answers=answers)])
    _, found = selected(tmp_path, "every", select="disjoint")
    assert found == [("x#0", ["a", "eeee"]), ("x#1", ["c", "d"])], "bbbb and f are equally good"
    _, even = selected(tmp_path, "even", select="disjoint", max_length_ratio=1)
    assert even == [("x#0", ["a", "d"]), ("x#1", ["c", "f"]), ("x#2", ["bbbb", "eeee"])]
    _, wide = selected(tmp_path, "wide", select="disjoint", min_margin=3)
    assert wide == [("x#0", ["a", "eeee"])]


def test_right_answers_become_conversations(scored: Path) -> None:
    _, found = run(
        scored, "select_answers", "rft", samples=str(scored / "scored.jsonl"), select="right", most=1
    )
    assert [(sample.id, sample.texts("assistant")) for sample in found] == [
        ("a#0", ["yes"]),
        ("c#0", ["good"]),
    ]
    with pytest.raises(StageError, match="nothing is left"):
        selected(scored, "none", select="right", right_score=2.0)
    rows = [json.loads(line) for line in (scored / "scored.jsonl").open()]
    rows[0]["answers"][0]["metadata"] = {"times": 0}  # the given answer, which the model never gave
    (scored / "scored.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    _, own = run(
        scored, "select_answers", "own", samples=str(scored / "scored.jsonl"), select="right", most=1
    )
    assert [sample.id for sample in own] == ["c#0"]
    with pytest.raises(ConfigError, match="does not read it"):
        selected(scored, "unread", select="right", beta=0.1)


def test_rejection_sampling_has_the_distribution_of_its_algorithm() -> None:
    """One draw of two answers: the better one is taken when it comes first, or by the chance that the other is refused.

    In a pass over (best, other), the best is always taken. Over (other, best), the other is taken with probability
    p = exp(-1 / beta), and then it is the only one.
    """
    dice, beta = random.Random(0), 0.7
    first = Counter(rejection_sample([0.0, 1.0], 1, beta, dice.random)[0] for _ in range(20_000))
    assert first[0] / 20_000 == pytest.approx(math.exp(-1 / beta), abs=0.01)
    assert all(rejection_sample([1.0, 0.0], 1, beta, dice.random) == [0] for _ in range(100))
    assert sorted(rejection_sample([0.0, 5.0, 2.0], 3, 0.1, dice.random)) == [0, 1, 2]


def spoken(name: str, seconds: float, score: float) -> RatedAnswer:
    return RatedAnswer(content=[AudioPart(path=f"{name}.wav", end_s=seconds)], score=score)


def test_the_better_answer_is_not_the_longer_one(tmp_path: Path) -> None:
    """Words by characters, speech by seconds: told by the sampling, by spans, or by files."""
    asked = [Message(role="user", content=[TextPart(text="?")])]
    tone(tmp_path / "file.wav", 300.0, seconds=2.0)
    told = RatedAnswer(content=[AudioPart(path="told.flac")], score=0.5, metadata={"seconds": 0.9})
    file = RatedAnswer(content=[AudioPart(path="file.wav")], score=0.0)
    written = RatedAnswer(content=[TextPart(text="so")], score=-1.0)
    lost = RatedAnswer(content=[AudioPart(path="lost.wav")], score=0.0)
    lists = {
        "words": rated(("much longer", 1), ("fair", 0.8), ("wrong", 0)),
        "speech": [spoken("best", 1.2, 1.0), told, file, written],
        "lost": [spoken("one", 1.2, 1.0), lost],
    }
    samples = [Sample(id=id, messages=asked, task="q", answers=answers) for id, answers in lists.items()]
    write_samples(tmp_path / "scored.jsonl", samples)

    def paired(name: str, **settings: Any) -> list[list[float | None]]:
        given = {"samples": str(tmp_path / "scored.jsonl"), **settings}
        figures, found = run(tmp_path, "select_answers", name, **given)
        assert figures["set_aside"] == ("chosen_not_longer" in settings or "max_length_ratio" in settings)
        return [[answer.score for answer in sample.answers] for sample in found]

    assert paired("any") == [[1.0, 0.0], [1.0, -1.0], [1.0, 0.0]]
    assert paired("even", max_length_ratio=1.5) == [[0.8, 0.0], [1.0, 0.5]]
    assert paired("shorter", chosen_not_longer=True) == [[0.8, 0.0], [1.0, 0.0]]
    assert paired("nearly", chosen_not_longer=True, max_length_ratio=2.5) == [[1.0, 0.0], [1.0, 0.0]]
    with pytest.raises(StageError, match="lost"):
        paired("strict", chosen_not_longer=True, strict=True)
