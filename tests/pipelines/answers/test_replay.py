"""`replay_samples`: fresh samples with a share of earlier ones, from round to round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Message, RatedAnswer, Sample, TextPart, write_samples
from audiollm.errors import StageError
from audiollm.files.atomic import read_json
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from pipelines.answers.replay import REPLAYED, draw_replayed


def pairs(path: Path, name: str, count: int, held_out: int = 0) -> Path:
    answers = [
        RatedAnswer(content=[TextPart(text="yes")], score=1.0),
        RatedAnswer(content=[TextPart(text="no")], score=0.0),
    ]
    samples = [
        Sample(
            id=f"q{number}",  # rounds answer the same prompts
            messages=[Message(role="user", content=[TextPart(text="is it?")])],
            task="question",
            answers=answers,
            metadata={"from": name, **({"split": "test"} if number >= count else {})},
        )
        for number in range(count + held_out)
    ]
    write_samples(path, samples)
    return path


def replay(folder: Path, times: int = 1, **settings: Any) -> Path:
    stage = {"fresh": "fresh${round}.jsonl", "earlier": "${seen}", "seed": "${round}", **settings}
    block = {
        "times": times,
        "start": {"seen": "first.jsonl"},
        "stages": [{"replay_samples": stage}],
        "next": {"seen": "${replay_samples.seen}"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"name": "any", "stages": [{"repeat": block}]}))
    run_recipe(load_recipe(folder / "recipe.yaml", name="r", runs=folder), Console(quiet=True))
    return folder / "r"


def read(path: Path) -> list[Sample]:
    samples, bad = read_samples(path)
    assert not bad
    return samples


def test_rounds_replay_a_share_of_all_that_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pairs(tmp_path / "first.jsonl", "a", 30, 4)
    pairs(tmp_path / "fresh1.jsonl", "b", 18, 2)
    pairs(tmp_path / "fresh2.jsonl", "c", 27, 3)
    out = replay(tmp_path, times=2)
    for number, (name, fresh, seen) in enumerate((("b", 18, 30), ("c", 27, 48)), 1):
        folder = out / f"replay_samples_{number}"
        samples = read(folder / "samples.jsonl")
        replayed = [sample for sample in samples if sample.metadata.get(REPLAYED)]
        assert len(replayed) == round(fresh / 9)  # a tenth of fresh and replayed
        assert all(sample.metadata["from"] != name for sample in replayed)
        assert [each for each in samples if not each.metadata.get(REPLAYED)] == read(
            tmp_path / f"fresh{number}.jsonl"
        )
        held_out = [each for each in samples if each.metadata.get("split") == "test"]
        assert len(held_out) == number + 1 and all(each.metadata["from"] == name for each in held_out)
        kept = read(folder / "seen.jsonl")
        assert len(kept) == len({each.id for each in kept}) == seen + fresh
        figures = read_json(folder / "stage.json")["figures"]
        assert figures == {
            "fresh": fresh, "replayed": len(replayed), "held_out": number + 1, "seen": seen + fresh, "set_aside": 0,
        }  # fmt: skip
    assert {each.metadata["from"] for each in kept} == {"a", "b", "c"}


def test_draws_are_of_all_earlier_samples_and_hang_on_the_seed() -> None:
    earlier: list[Any] = list(range(100))
    drawn = [draw_replayed(earlier, 90, 0.1, seed) for seed in range(200)]
    assert all(len(set(each)) == 10 and each == sorted(each) for each in drawn)
    assert set(sum(drawn, start=[])) == set(range(100))  # noqa: RUF017
    assert draw_replayed(earlier, 90, 0.1, 7) == drawn[7] != drawn[8]
    assert draw_replayed(earlier[:3], 90, 0.1, 0) == [0, 1, 2]  # no more than there are
    assert draw_replayed(earlier, 90, 0.0, 0) == []


def test_without_a_fresh_sample_it_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pairs(tmp_path / "first.jsonl", "a", 3)
    pairs(tmp_path / "fresh1.jsonl", "b", 0, 2)
    with pytest.raises(StageError, match="no sample of the train split"):
        replay(tmp_path)
    with (tmp_path / "first.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(StageError, match="first.jsonl"):
        replay(tmp_path, strict=True)
