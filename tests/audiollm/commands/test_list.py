"""`audiollm list`: every kind has names, and each name that a recipe may give is among them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from audiollm.commands.cli import build_app
from audiollm.errors import ConfigError
from audiollm.recipe.plug_ins import catalog_kinds, load_catalog
from audiollm.rl.objectives.catalog import CATALOG
from audiollm.rl.policy_gradient.catalog import ADVANTAGES


def run(*words: str) -> str:
    result = CliRunner().invoke(build_app("list"), ["list", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_kinds() -> None:
    assert run().split() == catalog_kinds() == json.loads(run("--json"))
    assert {"objectives", "rewards", "advantages", "boards", "annotation_steps", "stages"} <= set(
        catalog_kinds()
    )


@pytest.mark.parametrize("kind", catalog_kinds())
def test_a_kind_has_names_and_says_how_one_is_added(kind: str) -> None:
    catalog = load_catalog(kind)
    assert len(catalog.entries) > 1 and len(catalog.own) > 20
    shown = run(kind)
    assert all(name in shown for name in catalog.entries) and catalog.own in shown
    assert json.loads(run(kind, "--json"))["entries"] == dict(catalog.entries)


def test_the_names_are_those_of_recipes() -> None:
    assert set(load_catalog("objectives").entries) == set(CATALOG)
    assert set(load_catalog("advantages").entries) == set(ADVANTAGES)


def test_another_kind_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="objectives"):
        load_catalog("objective")
