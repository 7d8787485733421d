"""`benchmarks/learn_interpret.py`: its recipe is typed, and its bars are met where they should be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from audiollm.data.records.sample import Sample
from audiollm.recipe.stages import load_recipe

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import learn_interpret as bench


@pytest.mark.parametrize("sizes", [{}, bench.SMOKE], ids=["whole", "smoke"])
def test_every_stage_of_the_recipe_is_typed(tmp_path: Path, sizes: dict[str, Any]) -> None:
    for name in ("segments.jsonl", "clips.jsonl", "phrases.jsonl", "numbers.jsonl"):
        (tmp_path / name).write_text("")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(bench.recipe_of("learn", (1, 2), sizes), sort_keys=False))
    recipe = load_recipe(path, runs=tmp_path)
    names = [stage.name for stage in recipe.stages]
    for seed in (1, 2):
        assert {name.format(seed=seed) for name in bench._cases().values()} <= set(names)
    # the model may listen for ever, as `interpret_long.py` lets it
    configs = {stage.name: stage.config.model_dump() for stage in recipe.stages}
    assert configs["digits"]["shape"]["sliding_window"] is not None
    starts = {configs[f"{name}_{seed}"]["start"] for name in ("sft", "sft_punctual") for seed in (1, 2)}
    assert starts == {
        next(stage for stage in recipe.stages if stage.name == "hearing").artifacts["checkpoint"]
    }
    # the two stages, and what they are compared with, have as many updates
    steps = {stage.name: stage.config.model_dump().get("steps") for stage in recipe.stages}
    totals = {sum(steps[f"{each}_1"] for each in stages) for stages in bench.VARIANTS.values()}
    whole = bench.FIRST_UPDATES + bench.SECOND_UPDATES
    assert totals == {2 * sizes["updates"] if "updates" in sizes else whole}


def test_phrases_are_numbers_as_they_are_written() -> None:
    words = {row["text"]: row["target"] for row in bench.number_phrases()}
    assert len(words) == 100 and words["two one"] == "einundzwanzig" and words["two"] == "zwei"
    assert "zero one" not in words
    samples = [Sample.model_validate(row) for row in bench.number_texts()]
    assert len({sample.id for sample in samples}) == 100
    assert samples[21].texts("assistant") == ["einundzwanzig"] and "two one" in samples[21].texts("user")[0]


def test_the_curve_is_read_between_its_points() -> None:
    points = [(1.0, 50.0), (2.0, 90.0), (3.0, 80.0)]
    assert [bench.at(points, x) for x in (0.5, 1.5, 2.25, 4.0)] == [50, 70, 87.5, 80]


@pytest.mark.parametrize(("latency", "quality", "kl", "expected"), [
    (1.2, 95.5, 1.1, [True, True, True, True, True]),
    (1.4, 95.5, 1.1, [False, True, True, True, True]),
    (1.2, 60.0, 1.4, [False, False, False, False, False]),
])  # fmt: skip
def test_the_bars(latency: float, quality: float, kl: float, expected: list[bool]) -> None:
    def rows(seconds: float, chrf: float) -> list[dict[str, float]]:
        return [
            {"AL": seconds + 0.01 * n, "LAAL": seconds, "chrF": chrf + 0.1 * n, "right": 0.9}
            for n in range(3)
        ]

    own = {f"{variant}, greedy": rows(1.6, 95.0) for variant in bench.VARIANTS}
    own |= {"start, greedy": rows(1.7, 96.0), "two stages, greedy": rows(latency, quality)}
    curve = [rows(1.0, 60.0), rows(1.3, 80.0), rows(2.0, 96.0)]
    shares = [{"stage_1": kl, "stage_2": kl}] * 3
    found = bench.bars(own, curve, shares)
    assert [line["met"] for line in found if "met" in line] == expected
    assert json.dumps(found)
