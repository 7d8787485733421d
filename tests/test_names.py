"""Names are nouns and verbs of the field: few pronoun-like words, and one meaning for a private function's name."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("audiollm", "pipelines", "tokenizer", "benchmarks")
WORDS = frozenset(
    [
        "found",
        "own",
        "made",
        "told",
        "given",
        "each",
        "one",
        "other",
        "others",
        "shown",
        "kept",
        "left",
        "taken",
        "said",
        "heard",
        "asked",
        "wanted",
        "chosen",
        "meant",
        "known",
        "seen",
        "spoken",
        "written",
        "drawn",
        "rest",
        "whole",
        "part",
        "thing",
        "way",
        "much",
        "many",
        "least",
        "most",
        "far",
        "so",
        "such",
    ]
)
"""Words that tell a reader nothing without the line above."""
MOST_SHARE = 0.005


@cache
def modules(package: str) -> tuple[tuple[str, ast.Module], ...]:
    paths = sorted((ROOT / package).rglob("*.py"))
    return tuple((str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))) for path in paths)


def names_bound(node: ast.AST) -> Iterator[str]:
    """The names that a node binds: of a function with its arguments, of a class, a variable or an attribute."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr


@pytest.mark.parametrize("package", PACKAGES)
def test_few_names_are_pronouns(package: str) -> None:
    names = Counter(
        name for _, tree in modules(package) for node in ast.walk(tree) for name in names_bound(node)
    )
    pronouns = Counter({name: count for name, count in names.items() if name.strip("_").lower() in WORDS})
    share = pronouns.total() / names.total()
    assert share <= MOST_SHARE, f"{share:.2%} of the names in {package}: {pronouns.most_common(12)}"


def test_a_private_functions_name_has_one_meaning() -> None:
    """Two functions of modules that share a name have the same arguments and the same result."""
    places: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for package in PACKAGES[:3]:
        for path, tree in modules(package):
            for node in tree.body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("_"):
                    annotations = [argument.annotation for argument in node.args.args + node.args.kwonlyargs]
                    signature = [
                        ast.unparse(annotation) if annotation is not None else ""
                        for annotation in (*annotations, node.returns)
                    ]
                    places[node.name][", ".join(signature)].append(f"{path}:{node.lineno}")
    several = {name: list(signatures.values()) for name, signatures in places.items() if len(signatures) > 1}
    assert several == {}
