"""The commands, recipes and settings that READMEs, docs, notebooks, recipe headers and help texts name, each with its
line."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import typer

from audiollm.commands.cli import build_app

ROOT = Path(__file__).parents[1]
HISTORY = ("CHANGELOG.md", "benchmarks/history/")
"""Documents about past versions, whose commands are of their day."""
_FENCE = re.compile(r"^ *```(\w*)")
_INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_PROGRAMS = r"(?:audiollm|make|pip|python|\.venv/bin/\w[\w-]*|pytest|tensorboard|apt-get)"
_COMMAND = re.compile(rf"^{_PROGRAMS}(?: |$)")
_MAYBE_COMMAND = re.compile(rf"`{_PROGRAMS}\s|^\W*(?:Example: )?audiollm ", re.MULTILINE)
"""In each file of Python whose docstrings or texts have a command."""


@dataclass(frozen=True)
class Snippet:
    """A piece of a document.

    Args:
        text: a command without its prompt and with its continuation lines joined, or the content of a block.
        line: the full text of the lines that hold it, remarks included.
        language: of a block; empty for a command.
        inline: whether it stands between backticks in prose, which may name a command without its arguments.
    """

    path: Path
    number: int
    text: str
    line: str
    language: str = ""
    inline: bool = False

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.number} {self.text.splitlines()[0][:60]}"


@cache
def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    result: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return result


@cache
def command_line() -> Any:
    """The command `audiollm` with all its subcommands."""
    return typer.main.get_command(build_app())


@cache
def documents(*patterns: str) -> tuple[Path, ...]:
    """Files of the repository that match, without those of the past."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return tuple(ROOT / name for name in listing if not name.startswith(HISTORY) and (ROOT / name).is_file())


def commands() -> Iterator[Snippet]:
    """All commands of all documents."""
    for path in documents("*.md"):
        text = path.read_text(encoding="utf-8")
        for block in _blocks(path, text):
            if block.language in ("console", "bash", "sh"):
                yield from _console(block)
        yield from _inline_commands(path, _without_blocks(text))
    for path in documents("*.ipynb"):
        yield from _notebook_commands(path)
    for path in documents("*.yaml", "*.yml"):
        yield from _comment_commands(path)
    for path in documents(
        "audiollm/*.py", "tokenizer/*.py", "pipelines/*.py", "benchmarks/*.py", "recipes/*.py"
    ):
        yield from _docstring_commands(path)


def blocks(language: str) -> Iterator[Snippet]:
    """The fenced blocks of one language in all documents."""
    for path in documents("*.md"):
        for block in _blocks(path, path.read_text(encoding="utf-8")):
            if block.language == language:
                yield block


def inline_codes() -> Iterator[Snippet]:
    """Everything between single backticks in all documents."""
    for path in documents("*.md"):
        yield from _inline(path, _without_blocks(path.read_text(encoding="utf-8")))


def _blocks(path: Path, text: str) -> Iterator[Snippet]:
    lines, start, language = text.splitlines(), None, ""
    for number, line in enumerate(lines, 1):
        if fence := _FENCE.match(line):
            if start is None:
                start, language = number, fence[1]
            else:
                content = "\n".join(lines[start : number - 1])
                yield Snippet(path, start + 1, content, content, language)
                start = None


def _without_blocks(text: str) -> str:
    """The text with the lines of fenced blocks emptied, so that numbers of lines stay."""
    inside, result = False, []
    for line in text.splitlines():
        fence = bool(_FENCE.match(line))
        result.append("" if inside or fence else line)
        inside ^= fence
    return "\n".join(result)


def _console(block: Snippet) -> Iterator[Snippet]:
    lines = block.text.splitlines()
    for place, line in enumerate(lines):
        if line.startswith("$ "):
            yield _joined(block.path, block.number + place, [line[2:], *lines[place + 1 :]])


def _joined(path: Path, number: int, lines: list[str]) -> Snippet:
    """A command with its continuation lines; a remark after `#` is part of the line, and not of the command."""
    taken = [lines[0]]
    while taken[-1].rstrip().endswith("\\") and len(taken) < len(lines):
        taken.append(lines[len(taken)])
    line = " ".join(part.rstrip().removesuffix("\\").strip() for part in taken)
    return Snippet(path, number, re.sub(r"\s+#\s.*$", "", line), line)


def notebook_cells(path: Path) -> Iterator[tuple[str, str]]:
    """The kind of each cell, `markdown` or `code`, and its text."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        yield cell["cell_type"], "".join(cell["source"])


def notebook_modules() -> Iterator[tuple[str, str]]:
    """The modules that notebooks write for their reader: name of the file, and its text."""
    for path in documents("*.ipynb"):
        cells = (text for kind, text in notebook_cells(path) if kind == "code" and ".py" in text)
        for node in (node for text in cells for node in ast.walk(ast.parse(text))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".py').write_text"):
                assert isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call)
                yield ast.literal_eval(node.func.value.args[0]), ast.literal_eval(node.args[0])


def _notebook_commands(path: Path) -> Iterator[Snippet]:
    """Commands of cells that a shell runs, and those that the text shows; their number is that of the cell."""
    for number, (kind, text) in enumerate(notebook_cells(path), 1):
        lines = text.splitlines()
        if kind == "code" and lines[:1] == ["%%bash"]:
            for place, line in enumerate(lines):
                if _COMMAND.match(line):
                    snippet = _joined(path, place, lines[place:])
                    yield replace(snippet, number=number)
        elif kind == "markdown":
            for block in _blocks(path, text):
                yield from (replace(snippet, number=number) for snippet in _console(block))
            yield from (
                replace(snippet, number=number) for snippet in _inline_commands(path, _without_blocks(text))
            )


def _inline(path: Path, text: str) -> Iterator[Snippet]:
    for code in _INLINE.finditer(text):
        start, end = text.rfind("\n", 0, code.start()) + 1, text.find("\n", code.end())
        line = text[start : None if end < 0 else end]
        yield Snippet(
            path, text.count("\n", 0, code.start()) + 1, " ".join(code[1].split()), line, inline=True
        )


def _inline_commands(path: Path, text: str) -> Iterator[Snippet]:
    for code in _inline(path, text):
        if _COMMAND.match(code.text) and " " in code.text:
            yield code


def _comment_commands(path: Path) -> Iterator[Snippet]:
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.lstrip("# ") if line.startswith("#") else "" for line in lines]
    for place, line in enumerate(comments):
        if _COMMAND.match(line):
            yield _joined(path, place + 1, comments[place:])


def _docstring_commands(path: Path) -> Iterator[Snippet]:
    """Commands of docstrings, a line each, and those between backticks in any text."""
    text = path.read_text(encoding="utf-8")
    if not _MAYBE_COMMAND.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines = [line.strip().removeprefix("Example: ") for line in node.value.value.splitlines()]
            for place, line in enumerate(lines):
                if line.startswith("audiollm "):
                    yield _joined(path, node.lineno + place, lines[place:])
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for code in _inline_commands(path, node.value):
                yield replace(code, number=node.lineno + code.number - 1)
