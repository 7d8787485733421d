"""`benchmarks/learn_interpret.py`: its chain has what it reports, and its bars are met where they should be."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from audiollm.data.records.sample import Sample

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import learn_interpret as bench
import proof


@pytest.mark.parametrize("chain", [bench.NAME, f"{bench.NAME}_smoke"])
def test_the_chain_has_all_that_the_report_reads(tmp_path: Path, chain: str) -> None:
    run = proof.Proof(tmp_path / chain, (1, 2), (), [chain])
    recipe = run.load(chain, absent=[])
    configs = {stage.name: stage.config.model_dump() for stage in recipe.stages}
    assert set(run.stages(*bench.cases().values())) <= configs.keys()
    # the model may listen for ever, as `interpret_long.py` lets it
    assert configs["digits"]["shape"]["sliding_window"] is not None
    starts = {configs[f"{name}_{seed}"]["start"] for name in ("sft", "sft_punctual") for seed in (1, 2)}
    assert starts == {
        next(stage for stage in recipe.stages if stage.name == "hearing").artifacts["checkpoint"]
    }
    # the two stages, and what they are compared with, have as many updates
    totals = {sum(configs[f"{name}_1"]["steps"] for name in stages) for stages in bench.VARIANTS.values()}
    assert totals == {20 if chain.endswith("smoke") else 140}
    for stage, target in bench.TARGET_KL.items():
        assert configs[f"{stage}_1"]["kl"]["controller"]["target"] == target


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
