"""The content of prompts and answers, which sampled answers and their scores are kept by."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from audiollm.data.records.sample import ContentPart, Message, TextPart, VideoPart
from audiollm.errors import BadSample
from audiollm.files.atomic import file_digest

FILE = "scores.jsonl"


def content_of(parts: Sequence[ContentPart], sample_id: str) -> list[Any]:
    """Texts, and digest and span of each recording: equal for equal content, wherever its files lie.

    Raises:
        BadSample: a recording that cannot be read.
    """
    try:
        return [
            content_part.text
            if isinstance(content_part, TextPart)
            else [
                _digest_of_path(content_part.path),
                content_part.start_s,
                content_part.end_s,
                *(["video"] * isinstance(content_part, VideoPart)),
            ]
            for content_part in parts
        ]
    except OSError as error:
        raise BadSample("", sample_id, f"cannot be read: {error}", "unreadable file") from error


def conversation_content(messages: Sequence[Message], sample_id: str) -> list[Any]:
    """`content_of` each message, with its role.

    Raises:
        BadSample: a recording that cannot be read.
    """
    return [[message.role, content_of(message.content, sample_id)] for message in messages]


def _digest_of_path(path: str) -> str:
    stat = Path(path).stat()
    return _digest_of_file_version(path, stat.st_size, stat.st_mtime_ns)


@cache
def _digest_of_file_version(path: str, size: int, mtime_ns: int) -> str:
    return file_digest(Path(path))
