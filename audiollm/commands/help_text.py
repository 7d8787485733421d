"""Help texts of commands from their docstrings; an example stays a command that can be copied at any width."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

EXAMPLE_WIDTH = 76
"""Characters of a line of an example: help is set in 78 columns and indented by 2."""
VERBATIM = "\b"
"""The mark of a paragraph that click does not wrap."""
_HEADING = re.compile(r"Examples?:\s*")
_WORD = re.compile(r"#.*|(?:'[^']*'|\"[^\"]*\"|\S)+")


def help_text(docstring: str) -> str:
    """The docstring with its examples set apart; lines that are too long go on after a backslash.

    Args:
        docstring: paragraphs; examples follow `Example:` or `Examples:`, each a paragraph that begins with `audiollm`.
    """
    paragraphs: list[str] = []
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        heading = _HEADING.match(paragraph)
        if heading:
            paragraphs.append(heading[0].strip())
            paragraph = paragraph[heading.end() :]
        if paragraph.startswith("audiollm "):
            paragraphs.append("\n".join((VERBATIM, *command_lines(paragraph))))
        elif paragraph:
            paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


def command_lines(command: str, width: int = EXAMPLE_WIDTH) -> Sequence[str]:
    """The lines of a shell command, each but the last with a backslash at its end; a comment stands above them."""
    words = _WORD.findall(re.sub(r"\\?\n", " ", command))
    comments = [word for word in words if word.startswith("#")]
    words = [word for word in words if not word.startswith("#")]
    lines = [words[0]]
    for word, following in zip(words[1:], [*words[2:], ""], strict=True):
        is_option_with_value = word.startswith("-") and following and not following.startswith("-")
        needed = f"{word} {following}" if is_option_with_value else word
        if len(lines[-1]) + len(needed) + len(" ") + len(" \\") <= width:
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(f"    {word}")
    return [*comments, *lines]
