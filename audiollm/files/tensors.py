"""Safetensors files, opened so that a damaged one is named: safetensors' own error does not say which file it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from audiollm.files.atomic import DamagedFile


@contextmanager
def open_tensors(
    path: Path, framework: Literal["pt", "numpy"] = "pt", remedy: str = "restore it, or write it again"
) -> Iterator[Any]:
    """`safe_open`; what is read within the block is covered, too.

    Raises:
        DamagedFile: the file is no safetensors file, or is cut short.
    """
    try:
        with safe_open(str(path), framework=framework) as file:
            yield file
    except SafetensorError as error:
        raise DamagedFile(path, f"not whole ({error})", remedy) from None


def load_tensors(path: Path, remedy: str = "restore it, or write it again") -> dict[str, Any]:
    """All torch tensors of a file.

    Raises:
        DamagedFile: as `open_tensors`.
    """
    with open_tensors(path, remedy=remedy) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  a method, not a mapping


def check_tensors(folder: Path) -> None:
    """See that every safetensors file of a folder can be opened, before a library reads them that names none.

    Raises:
        DamagedFile: as `open_tensors`.
    """
    for path in sorted(folder.glob("*.safetensors")):
        with open_tensors(path, remedy="download or write it again"):
            pass
