"""The evaluation suites: subcommands of `audiollm evaluate`."""

from __future__ import annotations

from importlib.metadata import entry_points

from audiollm.recipe.plug_ins import Catalog, documented

PREFIX = "evaluate."


def suite_catalog() -> Catalog:
    """Suites by the names of their commands."""
    commands = [entry for entry in entry_points(group="audiollm.commands") if entry.name.startswith(PREFIX)]
    suites = {
        entry.name.removeprefix(PREFIX): entry.load() for entry in sorted(commands, key=lambda e: e.name)
    }
    own = (
        "Your own: behind `audiollm evaluate`, package.module:function of a function with Typer's options; or the "
        "name `evaluate.NAME` by an entry point of audiollm.commands."
    )
    return Catalog(documented(suites), own)
