"""What a release needs, checked on this machine: nothing is uploaded, pushed or tagged.

    make -C benchmarks release       # all of it, with the documentation
    python deploy/release.py check   # the version, the changelog, a clean tree
    python deploy/release.py build   # the last commit as sdist and wheel in dist/, with what they hold

`build` needs the packages `build` and `twine`, and nothing of audiollm's.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("audiollm", "pipelines", "recipes", "tokenizer")
SDIST_FILES = frozenset(
    [
        "CHANGELOG.md",
        "LICENSE",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "constraints.txt",
        "pyproject.toml",
        "setup.cfg",
    ]
)
"""Files of an sdist beside the packages."""
MAX_NAMES = 10
"""Names of files that a message lists."""


def version_problems(root: Path) -> list[str]:
    """What keeps the version from being released: the package's number, the changelog, tags."""
    version = project_version(root)
    problems = []
    if (imported := _imported_version(root / "audiollm" / "__init__.py")) != version:
        problems.append(
            f"pyproject.toml has version {version}, audiollm/__init__.py {imported}: make them equal"
        )
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[([^\]]+)\](?: - (\S+))?$", changelog, re.MULTILINE)
    dates = dict(headings)
    if version not in dates:
        problems.append(
            f"CHANGELOG.md has no section for {version}: write its entries under `## [{version}] - {date.today()}`"
        )
    elif not _is_date(dates[version]):
        problems.append(f"CHANGELOG.md, [{version}]: give it a date, as in `## [{version}] - {date.today()}`")
    if "Unreleased" in dates and _section(changelog, "Unreleased"):
        problems.append(
            f"CHANGELOG.md has entries under [Unreleased]: move them to [{version}], or to the next version"
        )
    if _git(root, "tag", "--list", f"v{version}"):
        problems.append(
            f"the tag v{version} exists: raise the version in pyproject.toml and audiollm/__init__.py"
        )
    return problems


def project_version(root: Path) -> str:
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return str(data["project"]["version"])


def _imported_version(path: Path) -> str:
    """`__version__` as the module assigns it, read without importing it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    return "none"


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _section(changelog: str, name: str) -> str:
    """The text below a heading of a version, up to the next one."""
    match = re.search(rf"^## \[{re.escape(name)}\].*\n((?:(?!^## ).*\n?)*)", changelog, re.MULTILINE)
    return match[1].strip() if match else ""


def tree_problems(root: Path) -> list[str]:
    """Files that the last commit does not have as they are here."""
    changed = _git(root, "status", "--porcelain").splitlines()
    return (
        [f"not committed: {_some(line[3:] for line in changed)}: commit, stash or remove"] if changed else []
    )


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.rstrip()


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - MAX_NAMES} more" if len(listed) > MAX_NAMES else ""
    return ", ".join(listed[:MAX_NAMES]) + more


# ------------------------------------------------------------------------------------- sdist and wheel


def build(root: Path, out: Path) -> list[Path]:
    """Build the sdist of the last commit, and from it the wheel, in environments of their own.

    Raises:
        subprocess.CalledProcessError: `build` or `twine check --strict` fails.
    """
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        archive = Path(folder) / "source.tar"
        subprocess.run(["git", "archive", "--output", str(archive), "HEAD"], cwd=root, check=True)
        with tarfile.open(archive) as members:
            members.extractall(source, filter="data")
        _python("build", "--outdir", str(out.resolve()), str(source))
    built = sorted(out.iterdir())
    _python("twine", "check", "--strict", *map(str, built))
    return built


def _python(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, stdout=subprocess.DEVNULL)


def content_problems(path: Path, tracked: Iterable[str]) -> list[str]:
    """How the files of an sdist or a wheel differ from the tracked files of the packages.

    Args:
        tracked: the repository's files, by their paths in it.
    """
    expected = {name for name in tracked if name.partition("/")[0] in PACKAGES}
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    else:
        with tarfile.open(path) as sdist:
            paths = (member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile())
            names = {name for name in paths if not name.startswith("audiollm.egg-info/")}
        expected |= SDIST_FILES
    problems = []
    if missing := expected - names:
        problems.append(
            f"{path.name} lacks {_some(missing)}: name them in [tool.setuptools.package-data] of pyproject.toml"
        )
    if surplus := names - expected:
        problems.append(f"{path.name} has {_some(surplus)}, which no package of the last commit has")
    return problems


# ------------------------------------------------------------------------------------------- commands


def run_check(root: Path) -> list[str]:
    problems = [*version_problems(root), *tree_problems(root)]
    if not problems:
        print(f"audiollm {project_version(root)}: version, changelog and tree are fit for a release")
    return problems


def run_build(root: Path, out: Path) -> list[str]:
    tracked = _git(root, "ls-tree", "-r", "--name-only", "HEAD").splitlines()
    problems = []
    for path in build(root, out):
        problems += content_problems(path, tracked)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return problems


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=("check", "build"))
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of sdist and wheel")
    options = parser.parse_args(arguments)
    problems = run_check(ROOT) if options.action == "check" else run_build(ROOT, options.out)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
