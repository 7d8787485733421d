"""Files that are whole or absent: atomic writes of text, JSON and JSON lines, checked reads, and digests."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from audiollm.errors import ConfigError
from audiollm.files.spelled_paths import as_spelled

Kinds = type | tuple[type, ...]
NO_KEYS: Mapping[str, Kinds] = {}
NUMBER = (int, float)


class DamagedFile(ValueError):
    """A file that does not hold what was written to it: says which, what is wrong with it, and what to do."""

    def __init__(self, path: Path, reason: str, remedy: str = "restore it, or write it again") -> None:
        self.path, self.reason, self.remedy = path, reason, remedy
        super().__init__(f"{path} is damaged: {reason}\n  {remedy}")


class JsonLines(NamedTuple):
    """The whole rows of a file of JSON lines, and the numbers (from 1) of its broken lines."""

    rows: list[dict[str, Any]]
    broken: list[int]


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


def check_writable(path: Path, option: str) -> None:
    """Refuse a place for a file before the work for it begins. Its folders are made when there is something to write.

    Args:
        option: that names the file, for the error.

    Raises:
        ConfigError: no file can be written there.
    """
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        problem = f"{path}: cannot write in {folder} ({error.strerror})"
        raise ConfigError(problem, option, "give the name of a file in another folder") from None


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        DamagedFile: it is not JSON in UTF-8.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, f"not JSON ({error})") from None


def read_record(path: Path, remedy: str = "restore it, or write it again") -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        DamagedFile: it is not JSON, or something else than an object.
    """
    try:
        value = read_json(path)
    except DamagedFile as error:
        raise DamagedFile(path, error.reason, remedy) from None
    if not isinstance(value, dict):
        raise DamagedFile(path, "it holds no JSON object", remedy)
    return value


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_jsonl(
    path: Path, remedy: str = "mend or remove that line", keys: Mapping[str, Kinds] = NO_KEYS
) -> list[dict[str, Any]]:
    """All rows of a file of JSON lines.

    Args:
        keys: what every row must have, and of which types.

    Raises:
        DamagedFile: a line is no such row; the error gives its number and `remedy`.
    """
    parsed = read_whole_lines(path, keys)
    if parsed.broken:
        expectation = f"no JSON object with {', '.join(keys)}" if keys else "no JSON object"
        raise DamagedFile(path, f"{line_numbers(parsed.broken)}: {expectation}", remedy)
    return parsed.rows


def read_whole_lines(path: Path, keys: Mapping[str, Kinds] = NO_KEYS) -> JsonLines:
    """The rows of a file of JSON lines as far as they are whole: a kill or a full disk may have cut any of them.

    Args:
        keys: what every row must have, and of which types.
    """
    rows: list[dict[str, Any]] = []
    broken = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and all(isinstance(row.get(key), kinds) for key, kinds in keys.items()):
            rows.append(row)
        else:
            broken.append(number)
    return JsonLines(rows, broken)


def line_numbers(numbers: Sequence[int]) -> str:
    """`line 7`, or `lines 3, 7, 9 and 12 more`."""
    some = ", ".join(map(str, numbers[:3])) + (f" and {len(numbers) - 3} more" if len(numbers) > 3 else "")
    return f"line{'s' * (len(numbers) > 1)} {some}"


def safe_name(text: str) -> str:
    """A file's name that says `text`: no folder and nothing odd in it; two texts never get the same one."""
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in text)[:80]
    plain = plain.strip(".")
    if plain == text:
        return plain
    return f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def is_unicode(text: str) -> bool:
    """Return whether a text can be written as UTF-8: a file name or a badly read text may hold lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content. OpenSSL computes it by the CPU's own instructions, faster than BLAKE2."""
    digest = hashlib.sha256()
    with as_spelled(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def folder_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of the files in a folder, hidden ones and folders left out."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    text = "\n".join(f"{path.name} {file_digest(path)}" for path in files)
    return hashlib.sha256(text.encode()).hexdigest()
