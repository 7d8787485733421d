"""AudioSet's tree of sound classes: the classes of which a class is a kind (`audioset_tree.txt`, CC BY-SA 4.0)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

_TREE = Path(__file__).with_name("audioset_tree.txt")
_ABSTRACT = "*"


@cache
def broader_classes(label: str) -> frozenset[str]:
    """All classes of which a class is a kind: of "Bark" these are "Dog", "Domestic animals, pets" and "Animal".

    A class may be a kind of several; none where the label is no class of AudioSet, or one of its seven roots.
    """
    parents = classes_above(label)
    return parents.union(*(broader_classes(parent) for parent in parents))


def classes_above(label: str) -> frozenset[str]:
    """The classes of which a class is a kind at once: of "Bark" this is "Dog"."""
    return _parents().get(label, frozenset())


@cache
def branch_of(label: str) -> frozenset[str]:
    """A class and all its kinds."""
    return frozenset([label, *(name for name in _parents() if label in broader_classes(name))])


@cache
def class_depth(label: str) -> int:
    """Steps from a root to a class on the longest way; 0 for a root and for a label that is no class."""
    return max((1 + class_depth(parent) for parent in classes_above(label)), default=0)


@cache
def abstract_classes() -> frozenset[str]:
    """The classes that only hold others, as "Respiratory sounds" does: no recording is labelled with them."""
    return frozenset(name.removesuffix(_ABSTRACT) for name, _ in _read_kinds() if name.endswith(_ABSTRACT))


@cache
def _parents() -> Mapping[str, frozenset[str]]:
    """The classes right above each class that has any."""
    parents: dict[str, set[str]] = {}
    for name, kinds in _read_kinds():
        for kind in kinds:
            parents.setdefault(kind, set()).add(name.removesuffix(_ABSTRACT))
    return {name: frozenset(names) for name, names in parents.items()}


@cache
def _read_kinds() -> tuple[tuple[str, tuple[str, ...]], ...]:
    lines = _TREE.read_text(encoding="utf-8").splitlines()
    pairs = [line.split(": ", 1) for line in lines if not line.startswith("#")]
    return tuple((name, tuple(kinds.split(" | "))) for name, kinds in pairs)
