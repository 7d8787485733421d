"""Kinds of things that a recipe names and a user can add to, with their names, for `audiollm list`.

A kind is an entry point of the group `audiollm.catalogs`: a function without arguments that returns a `Catalog`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from audiollm.errors import ConfigError, suggestion

GROUP = "audiollm.catalogs"


@dataclass(frozen=True)
class Catalog:
    """The names of a kind."""

    entries: Mapping[str, str]
    """Each name with a sentence about it; empty where its name says all."""
    own: str
    """How a user adds one: a sentence."""


def catalog_kinds() -> list[str]:
    """The kinds that can be listed, in alphabetical order."""
    return sorted(entry.name for entry in entry_points(group=GROUP))


def load_catalog(kind: str) -> Catalog:
    """Load the catalog of a kind.

    Raises:
        ConfigError: there is no such kind, with the nearest that there is.
    """
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    if kind not in entries:
        raise ConfigError(f"no such kind: {kind!r}", "list", suggestion(kind, entries))
    load: Callable[[], Catalog] = entries[kind].load()
    return load()


def entry_point_catalog(group: str, own: str) -> Catalog:
    """The catalog of a kind that is added by entry points."""
    return Catalog({entry.name: entry.value for entry in sorted(entry_points(group=group))}, own)


def documented(objects: Mapping[str, Any]) -> dict[str, str]:
    """Names with the first sentence of their docstrings."""
    return {name: _first_sentence(documented_object) for name, documented_object in objects.items()}


def _first_sentence(documented_object: Any) -> str:
    paragraph = " ".join((documented_object.__doc__ or "").split("\n\n")[0].split())
    return paragraph.split(". ")[0].removesuffix(".")
