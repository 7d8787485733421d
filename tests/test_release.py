"""What `make -C benchmarks release` refuses: versions that disagree, open entries, a tree that is not committed,
packages that lack a file or have one too many."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.documented import ROOT

GOOD_CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n\n- a line\n\n## [1.1.0] - 2025-01-01\n"
)


@pytest.fixture(scope="module")
def release() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "deploy"))
    try:
        yield importlib.import_module("release")
    finally:
        sys.path.remove(str(ROOT / "deploy"))


def git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository that is fit for the release of 1.2.0."""
    (tmp_path / "audiollm").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "audiollm" / "__init__.py").write_text('import os\n\n__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(GOOD_CHANGELOG)
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "all")
    return tmp_path


def test_a_version_that_everything_agrees_on_is_fit(release: Any, root: Path) -> None:
    assert release.version_problems(root) == [] and release.tree_problems(root) == []


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("audiollm/__init__.py", '__version__ = "1.1.9"\n', "audiollm/__init__.py 1.1.9: make them equal"),
        ("CHANGELOG.md", "## [1.1.0] - 2025-01-01\n", "CHANGELOG.md has no section for 1.2.0"),
        ("CHANGELOG.md", "## [1.2.0]\n", "give it a date"),
        ("CHANGELOG.md", "## [1.2.0] - soon\n", "give it a date"),
        ("CHANGELOG.md", GOOD_CHANGELOG.replace("released]\n", "released]\n\n- x\n"), "entries under [Unreleased]"),
    ],
)  # fmt: skip
def test_what_disagrees_is_named(release: Any, root: Path, name: str, text: str, problem: str) -> None:
    (root / name).write_text(text)
    (message,) = release.version_problems(root)
    assert problem in message
    (message,) = release.tree_problems(root)
    assert f"not committed: {name}" in message


def test_a_version_is_released_once(release: Any, root: Path) -> None:
    git(root, "tag", "v1.2.0")
    (message,) = release.version_problems(root)
    assert "the tag v1.2.0 exists" in message


def test_new_files_are_not_committed_either(release: Any, root: Path) -> None:
    (root / "audiollm" / "draft.py").touch()
    (message,) = release.tree_problems(root)
    assert "not committed: audiollm/draft.py" in message


TRACKED = (
    "audiollm/__init__.py",
    "audiollm/README.md",
    "recipes/a/tiny.yaml",
    "tests/test_a.py",
    "README.md",
    "Makefile",
)


def wheel(path: Path, names: Sequence[str]) -> Path:
    with zipfile.ZipFile(path / "audiollm-1.2.0-py3-none-any.whl", "w") as file:
        for name in (*names, "audiollm-1.2.0.dist-info/METADATA"):
            file.writestr(name, "")
    return path / "audiollm-1.2.0-py3-none-any.whl"


def sdist(path: Path, names: Sequence[str]) -> Path:
    with tarfile.open(path / "audiollm-1.2.0.tar.gz", "w:gz") as file:
        for name in (*names, "audiollm.egg-info/PKG-INFO"):
            file.addfile(tarfile.TarInfo(f"audiollm-1.2.0/{name}"), io.BytesIO())
    return path / "audiollm-1.2.0.tar.gz"


def test_packages_hold_the_tracked_files_and_nothing_else(release: Any, tmp_path: Path) -> None:
    right = [name for name in TRACKED if name.startswith(("audiollm/", "recipes/"))]
    assert release.content_problems(wheel(tmp_path, right), TRACKED) == []
    assert release.content_problems(sdist(tmp_path, [*right, *release.SDIST_FILES]), TRACKED) == []
    (message,) = release.content_problems(wheel(tmp_path, right[:-1]), TRACKED)
    assert "lacks recipes/a/tiny.yaml" in message
    (message,) = release.content_problems(wheel(tmp_path, [*right, "audiollm/cache.json"]), TRACKED)
    assert "has audiollm/cache.json, which" in message
    (message,) = release.content_problems(
        sdist(tmp_path, [*right, *release.SDIST_FILES, "tests/test_a.py"]), TRACKED
    )
    assert "has tests/test_a.py" in message
    (message,) = release.content_problems(
        sdist(tmp_path, [*right, *sorted(release.SDIST_FILES)[1:]]), TRACKED
    )
    assert "lacks CHANGELOG.md" in message


def test_every_tracked_file_of_the_packages_is_packed(release: Any) -> None:
    """As setuptools reads the patterns: those of a package for its folder, those of `*` for the folders of all."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = data["package-data"]
    assert {name.rstrip("*") for name in data["packages"]["find"]["include"]} == set(release.PACKAGES)
    listing = subprocess.run(
        ["git", "ls-files", *release.PACKAGES], cwd=ROOT, capture_output=True, text=True
    ).stdout
    lacking = []
    for name in (name for name in listing.splitlines() if not name.endswith(".py")):
        path = Path(name)
        folders = [folder for folder in path.parents if (ROOT / folder / "__init__.py").is_file()]
        owners = [
            (folder.as_posix().replace("/", "."), path.relative_to(folder).as_posix()) for folder in folders
        ]
        is_packed = any(
            fnmatch(place, pattern) and place.count("/") == pattern.count("/")
            for package, place in owners
            for pattern in (*patterns["*"], *patterns.get(package, ()))
        )
        lacking += [] if is_packed else [name]
    assert not lacking, "name them in [tool.setuptools.package-data]"


def test_the_workflow_tries_wheel_and_sdist_with_every_python() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["package"]
    assert job["strategy"]["matrix"]["python-version"] == ["3.11", "3.12", "3.13"]
    assert "make -C benchmarks package" in [step.get("run") for step in job["steps"]]
    makefile = (ROOT / "benchmarks" / "Makefile").read_text()
    recipe = makefile.partition("\npackage:")[2].partition("\n\n")[0]
    assert "dist/*.whl" in recipe and "dist/*.tar.gz" in recipe and "deploy/try_package.py" in recipe
