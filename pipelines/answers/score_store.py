"""Scores of answers, kept by content: what scores, the prompt, and the answer itself. None is asked for twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from audiollm.data.records.sample import Message, Part, TextPart
from audiollm.errors import BadSample
from audiollm.evaluate.report.store import Row, RowStore, key_of
from audiollm.files.atomic import file_digest, read_whole_lines

FILE = "scores.jsonl"


class ScoreStore:
    """Scores in a file of the stage; those that other stages of the run have written are read as well.

    Args:
        path: the file that new scores are added to.
        others: files of the same form, which are only read: those of earlier rounds.
    """

    def __init__(self, path: Path, others: Iterable[Path] = ()) -> None:
        self._own = RowStore(path)
        self._others: dict[str, Row] = {}
        for other in others:
            self._others |= {row["key"]: row for row in read_whole_lines(other, {"key": str}).rows}

    def get(self, *depends_on: Any) -> Row | None:
        """The score with exactly these inputs (plain data); None if there is none."""
        return self._own.get(*depends_on) or self._others.get(key_of(*depends_on))

    def add(self, row: Row, *depends_on: Any) -> None:
        """Store a score under its inputs."""
        self._own.add(row, *depends_on)


def content_of(parts: Sequence[Part], sample_id: str) -> list[Any]:
    """Texts, and digest and span of each recording: equal for equal content, wherever its files lie.

    Raises:
        BadSample: a recording that cannot be read.
    """
    try:
        return [
            part.text if isinstance(part, TextPart) else [_digest_of(part.path), part.start_s, part.end_s]
            for part in parts
        ]
    except OSError as error:
        raise BadSample("", sample_id, f"cannot be read: {error}", "unreadable file") from error


def conversation_content(messages: Sequence[Message], sample_id: str) -> list[Any]:
    """`content_of` each message, with its role.

    Raises:
        BadSample: a recording that cannot be read.
    """
    return [[message.role, content_of(message.content, sample_id)] for message in messages]


def _digest_of(path: str) -> str:
    stat = Path(path).stat()
    return _digest(path, stat.st_size, stat.st_mtime_ns)


@cache
def _digest(path: str, size: int, mtime_ns: int) -> str:
    return file_digest(Path(path))
