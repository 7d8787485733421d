"""Notebooks run from top to bottom, carry no outputs, and name only what exists.

That their commands exist, with the settings that they are given, is tested with those of all documents
(`documented.commands`).
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from pathlib import Path

import nbformat
import pytest

from tests.documented import ROOT, commands, notebook_cells, notebook_modules

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def ids(path: Path) -> str:
    return path.stem


def python_cells(path: Path) -> list[str]:
    return [text for kind, text in notebook_cells(path) if kind == "code" and not text.startswith("%%")]


def test_there_is_a_notebook_for_each_of_the_three_jobs() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["annotation", "reasoner", "voice"]
    text = (ROOT / "docs/site/first_steps.md").read_text()
    assert all(f"(../notebooks/{path.name})" in text for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_a_notebook_is_valid_and_carries_nothing_of_a_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None, "clear all outputs"
        assert not set(cell.metadata), cell.metadata
    text = path.read_text(encoding="utf-8")
    assert "/home/" not in text and "/root/" not in text and "/tmp/" not in text
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds[0] == "markdown" and kinds.count("markdown") > 5, "prose that teaches"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_imports_of_a_notebook_exist(path: Path) -> None:
    texts = [*python_cells(path), *(text for _, text in notebook_modules())]
    trees = [ast.parse(text) for text in texts]
    imported = 0
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")
            imported += 1
        elif isinstance(node, ast.Import):
            assert all(importlib.import_module(alias.name) for alias in node.names)
    assert imported


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_commands_of_a_notebook_are_among_those_that_are_tested(path: Path) -> None:
    """A line of a shell's cell is a command of ours, or goes on with one: nothing escapes the tests of commands."""
    for kind, text in notebook_cells(path):
        if kind == "code" and text.startswith("%%"):
            first, *lines = text.splitlines()
            assert first == "%%bash", "a failure of `!command` does not end the notebook"
            starts = [
                line
                for number, line in enumerate(lines)
                if number == 0 or not lines[number - 1].endswith("\\")
            ]
            assert starts and all(line.startswith("audiollm ") for line in starts)
    assert [snippet for snippet in commands() if snippet.path == path and not snippet.inline]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_a_notebook_runs_from_top_to_bottom(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbclient import NotebookClient

    programs = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=1500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    kinds = {
        kind
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        for kind in output.get("data", ())
    }
    assert "image/png" in kinds, "a picture"
    html = [
        str(output.get("data", {}).get("text/html", ""))
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    ]
    assert any("<audio" in text for text in html), "a player"
