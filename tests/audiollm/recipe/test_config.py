"""Recipes and their errors: each names file, line, key and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from audiollm.errors import ConfigError
from audiollm.recipe.config import BUDGETS
from audiollm.recipe.stages import Recipe, load_recipe

GOOD = """\
name: demo
audio: null
stages:
  - annotate: {input: "${audio}"}
  - compose: {segments: "${annotate.segments}", tasks: {tts: 1.0}}
  - name: second
    compose: {segments: "${annotate.segments}", tasks: {tts: 1.0}, min_seconds: 5}
"""


def write(folder: Path, text: str, name: str = "demo.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def error_of(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(folder, text), overrides)
    return str(caught.value)


def settings(recipe: Recipe, name: str) -> dict[str, object]:
    return next(stage for stage in recipe.stages if stage.name == name).settings()


def test_references_overrides_and_names(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GOOD), ["second.min_seconds=7", "compose.split=file"], runs=tmp_path)
    assert [stage.name for stage in recipe.stages] == ["annotate", "compose", "second"]
    assert settings(recipe, "second")["min_seconds"] == 7
    assert settings(recipe, "compose")["split"] == "file"
    assert settings(recipe, "compose")["segments"] == str(tmp_path / "demo" / "annotate" / "segments.jsonl")
    assert recipe.stages[2].upstream == ("annotate",)


def test_a_budget_on_the_command_line_takes_the_place_of_the_recipes(tmp_path: Path) -> None:
    recipe = """\
name: budgets
size: tiny
seed: 0
steps: 20
any: ???
stages:
  - train: {samples: "${any}", steps: "${steps}"}
"""
    (tmp_path / "any.jsonl").touch()

    def budgets(*overrides: str) -> dict[str, Any]:
        config = (
            load_recipe(write(tmp_path, recipe), [f"any={tmp_path / 'any.jsonl'}", *overrides], runs=tmp_path)
            .stages[0]
            .config
        )
        return {name: getattr(config, name) for name in BUDGETS if getattr(config, name) is not None}

    assert budgets() == {"steps": 20} and budgets("steps=30") == {"steps": 30}
    assert budgets("train.minutes=2") == {"minutes": 2} and budgets("train.passes=3") == {"passes": 3}
    with pytest.raises(ConfigError, match="give one budget, not minutes and cpu_minutes"):
        budgets("train.minutes=2", "train.cpu_minutes=3")


def test_an_override_may_replace_the_setting_that_refers_to_a_key(tmp_path: Path) -> None:
    """The recipe is right as it stands: what nothing refers to is refused where the recipe or the person wrote it."""
    text = GOOD.replace("audio: null", "audio: null\nshortest: 5").replace(
        "min_seconds: 5", 'min_seconds: "${shortest}"'
    )
    recipe = load_recipe(write(tmp_path, text), ["second.min_seconds=7"])
    assert settings(recipe, "second")["min_seconds"] == 7
    with pytest.raises(ConfigError, match="shortest: nothing in this recipe refers to it"):
        load_recipe(write(tmp_path, text), ["second.min_seconds=7", "shortest=9"])


def test_base_is_merged_by_stage_name(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "base.yaml")
    child = (
        "base: base.yaml\nname: child\nseed: 5\nstages:\n  - name: second\n    compose: {min_seconds: 9}\n"
    )
    recipe = load_recipe(write(tmp_path, child, "child.yaml"))
    assert (recipe.name, recipe.seed) == ("child", 5)
    assert settings(recipe, "second")["min_seconds"] == 9
    assert len(recipe.stages) == 3


def test_size_and_seed_reach_the_stages(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GOOD), ["compose.seed=3"])
    assert settings(recipe, "compose")["seed"] == 3
    assert settings(load_recipe(write(tmp_path, "seed: 4\n" + GOOD)), "compose")["seed"] == 4


def test_a_literal_dollar_brace(tmp_path: Path) -> None:
    text = GOOD.replace("audio: null", "audio: null\ntranscripts: '$${x}'").replace(
        'input: "${audio}"', 'input: "${audio}", transcripts: "${transcripts}"'
    )
    message = error_of(tmp_path, text)  # `${x}` is a pattern without {text}
    assert "transcripts" in message and "refers to nothing" not in message


@pytest.mark.parametrize(
    ("change", "to", "expected"),
    [
        (
            "min_seconds: 5",
            "min_secnds: 5",
            ["demo.yaml:7", "compose.min_secnds", "did you mean 'min_seconds'?"],
        ),
        ("min_seconds: 5", "min_seconds: many", ["demo.yaml:7", "min_seconds", "valid number", "'many'"]),
        (
            "- annotate",
            "- anotate",
            ["demo.yaml:4", "stages[0]", "no such stage", "did you mean 'annotate'?"],
        ),
        (
            "audio: null",
            "audio: nowhere/at/all",
            ["no such file or folder: nowhere/at/all", "annotate.input"],
        ),
        ("${annotate.segments}", "${annotate.segment}", ["makes no 'segment'", "did you mean 'segments'?"]),
        ("${annotate.segments}", "${anotate.segments}", ["refers to nothing", "annotate.segments"]),
        ("audio: null", "audio: ???", ["demo.yaml:2", "audio: required", "give it: audio="]),
        ("audio: null", "audio: null\nsede: 3", ["demo.yaml:3", "sede", "did you mean 'seed'?"]),
        ("audio: null", "audio: null\naudio: x", ["demo.yaml:3", "given twice"]),
        ("audio: null", "audio: null\nsize: huge", ["size: no such size", "tiny"]),
        ("audio: null", "audio: null\nseed: -1", ["seed: must be a whole number"]),
        ("name: second\n    compose", "compose", ["a second stage named 'compose'", "name:"]),
        ("name: demo", "name: ../demo", ["name:", "not a folder name"]),
        ("name: second", "name: ..", ["cannot be a stage's name"]),
        ("stages:", "stages: [", ["demo.yaml", "not valid YAML"]),
        ("audio: null", "audio: '${audio}'", ["refers to itself"]),
    ],
)
def test_errors_name_place_key_and_remedy(tmp_path: Path, change: str, to: str, expected: list[str]) -> None:
    message = error_of(tmp_path, GOOD.replace(change, to))
    for part in expected:
        assert part in message, message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("compose.min_secnds=3", ["command line", "did you mean 'min_seconds'?"]),
        ("compse.min_seconds=3", ["command line", "no such key", "did you mean 'compose.'?"]),
        ("audoi=x", ["command line", "did you mean 'audio'?"]),
        ("audio", ["not key=value"]),
        ("audio={a: 1, b: {c: 2, c: 3}}", ["command line", "audio.b.c: given twice", "keep one of them"]),
    ],
)
def test_errors_in_overrides(tmp_path: Path, override: str, expected: list[str]) -> None:
    message = error_of(tmp_path, GOOD, override)
    for part in expected:
        assert part in message, message


def test_missing_recipe_and_missing_or_circular_base(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(ConfigError, match="did you mean 'demo.yaml'"):
        load_recipe(tmp_path / "demos.yaml")
    assert "no such file" in error_of(tmp_path, "base: other.yaml\n" + GOOD)
    assert "its own ancestor" in error_of(tmp_path, "base: demo.yaml\n" + GOOD)


def test_the_quickstart_is_a_good_recipe() -> None:
    recipe = load_recipe(Path(__file__).parents[3] / "recipes" / "quickstart.yaml")
    assert [stage.name for stage in recipe.stages] == [
        "annotate", "compose", "train_tokenizer", "tokenize", "train", "generate", "evaluate", "report",
    ]  # fmt: skip


def test_references_inside_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "speech" / "speech").mkdir(parents=True)
    text = GOOD.replace("audio: null", f"part: speech\naudio: '{tmp_path}/${{part}}/${{part}}'")
    recipe = load_recipe(write(tmp_path, text), runs=tmp_path)
    assert str(settings(recipe, "annotate")["input"]) == str(tmp_path / "speech" / "speech")
