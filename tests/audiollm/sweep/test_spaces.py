"""Spaces on the command line: what they are, and what is refused before any work."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from audiollm.errors import ConfigError
from audiollm.recipe.stages import load_recipe
from audiollm.sweep.command import sweep
from audiollm.sweep.spaces import parse_space, split_overrides


@pytest.mark.parametrize(
    ("text", "probes"),
    [
        ("log(1e-4,3e-3)", (1e-4, 3e-3)),
        ("uniform(0, 0.3)", (0.0, 0.3)),
        ("uniform(-1,1)", (-1.0, 1.0)),
        ("int(4,32)", (4, 32)),
        ("[true,false]", ("true", "false")),
        ("[null, a, 3]", ("null", "a", "3")),
        ("[{a: 1}, {a: 2}]", ("{a: 1}", "{a: 2}")),
        ("[1e-4, 1e-3]", ("0.0001", "0.001")),
    ],
)
def test_a_space_has_its_values(text: str, probes: tuple[object, ...]) -> None:
    space = parse_space("train.x", text)
    assert space is not None and space.probes() == probes


@pytest.mark.parametrize("text", ["3", "0.1", "text", "null", "{a: [1, 2]}", "'\"log(1,2)\"'"])
def test_a_plain_value_is_none(text: str) -> None:
    assert parse_space("train.x", text) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("log(1e-4)", "takes two numbers"),
        ("log(1e-4,1e-3", "takes two numbers"),
        ("log(a,b)", "takes two numbers"),
        ("uniform(0,inf)", "takes two numbers"),
        ("log(0,1)", "above 0"),
        ("uniform(1,0)", "smaller than the second"),
        ("int(1,2.5)", "whole numbers"),
        ("[a,", "list in YAML"),
        ("[]", "list in YAML"),
        ("[1,1]", "twice"),
        ("logg(1,2)", "did you mean 'log'"),
    ],
)
def test_a_malformed_space_is_refused_with_its_key(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.rate: ") as caught:
        parse_space("train.rate", text)
    assert reason in str(caught.value)


def test_numbers_reach_the_recipe_as_numbers(toy: Path) -> None:
    """YAML takes `1e-05` for a text."""
    space = parse_space("fit.learning_rate", "log(1e-6,1e-3)")
    assert space is not None and space.override(1e-05) == "fit.learning_rate=1.0e-05"
    recipe = load_recipe(Path("toy.yaml"), [space.override(1.2345678901234567e-05)])
    assert recipe.stages[1].settings()["learning_rate"] == 1.2345678901234567e-05


def test_a_single_choice_is_a_fixed_value() -> None:
    spaces, fixed = split_overrides(["report.sections=[[all, mine]]", "fit.width=3", "fit.bias=[true,false]"])
    assert [space.key for space in spaces] == ["fit.bias"]
    assert fixed == ["report.sections=[all, mine]", "fit.width=3"]


LOSS = ["--minimize", "fit.loss"]
RATE = "fit.learning_rate=log(1e-5,1e-1)"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([*LOSS], "no space to search"),
        ([RATE], "no figure to choose by"),
        ([*LOSS, "fit.lerning_rate=log(1e-5,1e-1)"], "lerning_rate"),
        ([*LOSS, "fitt.width=int(1,4)"], "fitt.width"),
        ([*LOSS, "fit.width=int(0,4)"], "width"),
        ([*LOSS, "fit.width=[4,wide]"], "fit.width=wide"),
        ([*LOSS, RATE, RATE], "given twice"),
        ([*LOSS, "score.split=[a,b]"], "score.split: changes no stage"),
        (["--minimize", "fitt.loss", RATE], "did you mean 'fit'"),
        (["--minimize", "loss", RATE], "STAGE.NAME"),
        (["--minimize", "data.size", RATE], "changes no stage that the figures depend on"),
        ([*LOSS, "--maximize", "data.size", RATE], "no space changes the stage data"),
        ([*LOSS, RATE, "--sampler", "grid"], "fit.learning_rate: a grid has no values"),
        ([*LOSS, "fit.width=int(1,1000000)", "--sampler", "grid"], "1,000,000 combinations"),
        ([*LOSS, RATE, "--sampler", "tpee"], "did you mean 'tpe'"),
        ([*LOSS, RATE, "--final", "fit"], "every trial runs it"),
        ([*LOSS, RATE, "--final", "score_tets"], "did you mean 'score_test'"),
        ([*LOSS, RATE, "--final-override", "score.splitt=test"], "splitt"),
        ([*LOSS, "--maximize", "score.quality", RATE, "--confirm", "2"], "--pick"),
        ([*LOSS, "--maximize", "score.quality", RATE, "--prune", "median"], "several figures"),
        (["--maximize", "score.quality", "score.split=[a,b]", "--confirm", "2"], "has a seed"),
        ([*LOSS, RATE, "--sweep-name", "fit"], "--sweep-name"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_any_work(
    toy: Path, stage_starts: Callable[[], Counter[str]], arguments: list[str], reason: str
) -> None:
    app = typer.Typer()
    app.command()(sweep)
    result = CliRunner().invoke(app, ["toy.yaml", *arguments])
    assert isinstance(result.exception, ConfigError), result.output
    assert reason in str(result.exception)
    assert not stage_starts() and not (toy / "runs").exists()


def test_a_machine_without_optuna_is_told_what_to_install(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    app = typer.Typer()
    app.command()(sweep)
    result = CliRunner().invoke(app, ["toy.yaml", *LOSS, RATE])
    assert "pip install 'audiollm[sweep]'" in str(result.exception)
