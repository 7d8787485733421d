"""Bytes at an address: a local path, or a URL that fsspec knows (`s3://`, `gs://`, `memory://`, ...).

Stateless: every read says where it begins, so that what holds an address can go to any process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import fsspec

from audiollm.files.atomic import atomic_path

BLOCK_BYTES = 1 << 22
WAITS_S = (0.2, 1.0)
"""Before the second and the third attempt at a remote read: a store that is busy for a moment loses no sample."""


def is_url(address: str) -> bool:
    """Return whether an address is a URL for fsspec; any address without `://` is a local path."""
    return "://" in address


def join_address(folder: str, name: str) -> str:
    """The address of `name` below `folder`; an absolute path or a URL stays what it is."""
    if is_url(name):
        return name
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else str(Path(folder) / name)


def parent(address: str) -> str:
    """The folder that an address lies in."""
    return address.rpartition("/")[0] if is_url(address) else str(Path(address).parent)


def list_sizes(folder: str) -> dict[str, int] | None:
    """The files directly in `folder` by name, with their sizes in bytes; None where there is no such folder.

    Raises:
        OSError: it cannot be listed.
    """
    if not is_url(folder):
        if not Path(folder).is_dir():
            return None
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    with _remote(folder) as (system, path):
        if not system.isdir(path):
            return None
        rows = system.ls(path, detail=True)
        return {
            row["name"].rpartition("/")[2]: int(row["size"] or 0) for row in rows if row["type"] == "file"
        }


def file_size(address: str) -> int:
    """Bytes of a file.

    Raises:
        OSError: there is none (FileNotFoundError), or it cannot be reached.
    """
    if not is_url(address):
        return Path(address).stat().st_size
    with _remote(address) as (system, path):
        return int(system.size(path))


def read_range(address: str, offset: int, size: int) -> bytes:
    """`size` bytes from `offset` on, fewer where the file ends; a remote read that fails is tried again.

    Raises:
        OSError: it cannot be read.
    """
    if not is_url(address):
        with open(address, "rb", buffering=0) as file:
            return os.pread(file.fileno(), size, offset)
    with _remote(address) as (system, path):
        return _patiently(lambda: system.cat_file(path, start=offset, end=offset + size))


def read_all(address: str) -> bytes:
    """A whole file; a remote read that fails is tried again.

    Raises:
        OSError: it cannot be read.
    """
    if not is_url(address):
        return Path(address).read_bytes()
    with _remote(address) as (system, path):
        return _patiently(lambda: system.cat_file(path))


def read_blocks(address: str, size: int = BLOCK_BYTES) -> Iterator[bytes]:
    """A file from beginning to end in blocks."""
    with open_file(address) as file:
        while block := file.read(size):
            yield block


@contextmanager
def open_file(address: str) -> Iterator[IO[bytes]]:
    """A file to read and seek in."""
    if not is_url(address):
        with open(address, "rb") as file:
            yield file
        return
    with _remote(address) as (system, path):
        remote = system.open(path, "rb")
    with remote:
        yield remote


def write_bytes(address: str, content: bytes) -> None:
    """A file that is whole or absent; object stores put it whole.

    Raises:
        OSError: it cannot be written.
    """
    if not is_url(address):
        with atomic_path(Path(address)) as temporary:
            temporary.write_bytes(content)
        return
    with _remote(address) as (system, path):
        system.pipe_file(path, content)


@contextmanager
def _remote(address: str) -> Iterator[tuple[Any, str]]:
    """fsspec's file system of an address, and the path in it; whatever its packages raise becomes an OSError."""
    if "::" in address:
        raise OSError(f"{address}: a chain of addresses; give one")
    try:
        yield fsspec.core.url_to_fs(address)
    except OSError:
        raise
    except Exception as error:  # no such protocol, a package that is missing, a service that refuses
        raise OSError(f"{address}: {error}") from error


def _patiently(read: Callable[[], bytes]) -> bytes:
    for wait_s in WAITS_S:
        try:
            return read()
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            raise
        except Exception:  # a package has exceptions of its own for a connection that broke
            time.sleep(wait_s)
    return read()


def audio_address(folder: str, path: str) -> str:
    """Resolve the audio path of a manifest in `folder`: relative to the manifest, else to the working directory."""
    beside = join_address(folder, path)
    is_there = is_url(beside) or os.path.isfile(beside)  # noqa: PTH113 (Path's raises at a name that is too long)
    return beside if is_there else path
