"""Families that are installed for a test, as a package of somebody's own would be."""

from __future__ import annotations

from pathlib import Path

import pytest

TOYS = Path(__file__).parents[2] / "toy_families"


def install(folder: Path, name: str, target: str) -> None:
    """Write the metadata of a package with one entry point: what `pip install` does with a line of `pyproject.toml`."""
    package = folder / f"{name}-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[audiollm.families]\n{name} = {target}\n")


@pytest.fixture(scope="session")
def talker_installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the toy talker's metadata; it and `TOYS` belong on the path."""
    folder: Path = tmp_path_factory.mktemp("installed")
    install(folder, "toy_talker", "toy_talker.family:FAMILY")
    return folder
