"""The command `list`: what can be named in a recipe, kind by kind."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from audiollm.recipe.plug_ins import catalog_kinds, load_catalog


def list_kind(
    kind: Annotated[
        str | None, typer.Argument(help="Kind of things to list.", show_default="the kinds themselves")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List what a recipe can name: objectives, rewards, steps, stages, families, boards.

    The last line says how one of your own is added; docs/extending.md has an example of each.

    Examples:

    audiollm list

    audiollm list rewards

    audiollm list objectives --json
    """
    if kind is None:
        print(json.dumps(catalog_kinds()) if as_json else "\n".join(catalog_kinds()))
        return
    catalog = load_catalog(kind)
    if as_json:
        print(json.dumps({"kind": kind, "entries": dict(catalog.entries), "own": catalog.own}))
        return
    console = Console(highlight=False, soft_wrap=True)
    width = max(map(len, catalog.entries), default=0)
    for name, sentence in catalog.entries.items():
        console.print(Text(f"{name:<{width}}  ", style="bold").append(sentence, style="not bold"))
    console.print(Text(f"\n{catalog.own}", style="dim"))
