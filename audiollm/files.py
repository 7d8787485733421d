"""Files that are whole or absent: atomic writes of text, JSON and JSON lines, reading them back, and digests."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` (same extension), renamed to it when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def safe_name(text: str) -> str:
    """A file's name that says `text`: no folder and nothing odd in it; two texts never get the same one."""
    kept = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in text)[:80].strip(".")
    if kept == text:
        return kept
    return f"{kept}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def folder_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of the files in a folder, hidden ones and folders left out."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    text = "\n".join(f"{path.name} {file_digest(path)}" for path in files)
    return hashlib.sha256(text.encode()).hexdigest()
