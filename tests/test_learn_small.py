"""`benchmarks/learn_small.py`: figures of finished runs against their bars, and the settings of cases."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from audiollm.files.atomic import write_json, write_jsonl
from audiollm.recipe.stages import load_recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import learn_small


def write_answers(stage: Path, right: list[bool], chance: float = 0.5) -> None:
    rows = [{"id": f"q{number}", "right": is_right} for number, is_right in enumerate(right)]
    write_jsonl(stage / "audio-qa" / "rows.jsonl", rows)
    accuracy = sum(right) / len(right)
    scores = {"accuracy": accuracy, "low": accuracy - 0.05, "high": accuracy + 0.05, "chance": chance}
    write_json(stage / "results.json", scores)


def test_a_gain_needs_its_points_and_an_interval_above_zero(tmp_path: Path) -> None:
    write_answers(tmp_path / "before", [True, False] * 50)
    write_answers(tmp_path / "after", [True, True, True, False] * 25)
    proof = learn_small.gain("GRPO", "before", "after", at_least=0.1)
    figure = proof.measure(tmp_path)
    assert (figure.before, figure.after, figure.value) == (0.5, 0.75, 0.25) and proof.is_met(figure)
    write_answers(tmp_path / "after", [True, False] * 49 + [True, True])
    assert not proof.is_met(proof.measure(tmp_path))


def test_a_control_is_at_chance_where_its_interval_reaches_it(tmp_path: Path) -> None:
    proof = learn_small.no_better_than_chance("without the recording", "control")
    write_answers(tmp_path / "control", [True, False, True, False, True] * 20, chance=0.55)
    assert proof.is_met(proof.measure(tmp_path))
    write_answers(tmp_path / "control", [True] * 9 + [False])
    assert not proof.is_met(proof.measure(tmp_path))


@pytest.mark.parametrize("name", learn_small.CASES)
def test_proofs_read_stages_of_their_recipe(name: str) -> None:
    case = learn_small.CASES[name]
    path = learn_small.RECIPES / case.recipe
    keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    overrides = [f"{key}=/not/there" for key, value in keys.items() if value == "???"]
    stages = {stage.name for stage in load_recipe(path, overrides, absent=[]).stages}
    assert {stage for proof in case.proofs for stage in proof.stages} <= stages
