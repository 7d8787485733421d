"""The objects of a JSON list, or of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from audiollm.data.convert.request import bad_row
from audiollm.errors import BadSample, ConfigError


def read_objects(path: Path) -> list[tuple[str, dict[str, Any] | BadSample]]:
    """The objects of a JSON list, or of JSON lines, with their place in the file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot be read ({error.strerror})", str(path), "give a .json or .jsonl"
        ) from error
    if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        lines = enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
        return [(f":{number}", _record(path, number, line)) for number, line in lines if line.strip()]
    try:
        rows = json.loads(content.decode("utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"wrong JSON: {error}", str(path), "mend it, or give one object a line (.jsonl)"
        ) from None
    return [
        (f"[{n}]", row if isinstance(row, dict) else bad_row(f"{path}[{n}]", "", "no object"))
        for n, row in enumerate(rows)
    ]


def _record(path: Path, number: int, line: bytes) -> dict[str, Any] | BadSample:
    place = f"{path}:{number}"
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadSample(place, "", f"is not UTF-8 ({error})", "text encoding")
    except (json.JSONDecodeError, RecursionError) as error:
        return BadSample(place, "", f"wrong JSON: {error}", "wrong JSON")
    return record if isinstance(record, dict) else bad_row(place, "", "no object")
