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


def required_keys(recipe: Path) -> list[str]:
    keys = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    of_base = required_keys(recipe.parent / keys["base"]) if "base" in keys else []
    return [*of_base, *(key for key, value in keys.items() if value == "???")]


def test_new_voices_have_to_be_understood_and_to_be_themselves(tmp_path: Path) -> None:
    figures = {
        "new_voice_generated_word_error_rate": 0.2,
        "new_voice_generated_accuracy": 0.7,
        "new_voice_generated_interval": [0.6, 0.8],
    }
    write_json(tmp_path / "evaluate" / "stage.json", {"figures": figures})
    words, likeness = learn_small.CASES["voices"].proofs
    assert words.is_met(words.measure(tmp_path))
    assert not likeness.is_met(likeness.measure(tmp_path)) and likeness.measure(tmp_path).high == 0.8


@pytest.mark.parametrize("name", learn_small.CASES)
def test_proofs_read_stages_of_their_recipe(name: str) -> None:
    case = learn_small.CASES[name]
    path = learn_small.RECIPES / case.recipe
    overrides = [f"{key}=/not/there" for key in required_keys(path)]
    stages = {stage.name for stage in load_recipe(path, overrides, absent=[]).stages}
    assert {stage for proof in case.proofs for stage in proof.stages} <= stages
