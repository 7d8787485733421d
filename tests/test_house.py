"""The house rules that a linter cannot see."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = sorted((ROOT / "audiollm").rglob("*.py"))
PACKAGES = ("audiollm", "tokenizer", "pipelines")
SHARED_NAMES: dict[str, str] = {}
"""Public names with more than one definition, and the reason why each means the same everywhere."""
FORBIDDEN_IMPORTS = {
    "between packages": ("audiollm/codec.py", "from tokenizer.native import model"),
    "up the layers": ("audiollm/data/packing.py", "from audiollm.models import attention"),
    "in a circle of modules": ("audiollm/files/atomic.py", "from audiollm.files import set_aside"),
    "in a circle of folders": (
        "pipelines/annotate/voice/linking.py",
        "from pipelines.annotate.steps import prosody",
    ),
    "for a type, in a circle": (
        "pipelines/execution/ledger.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pipelines.execution import engine",
    ),
}


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(ROOT)))
def test_audiollm_reaches_the_others_through_entry_points_only(path: Path) -> None:
    """No import, and no text that could be handed to importlib, names `tokenizer` or `pipelines` modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & {"tokenizer", "pipelines"}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in {"tokenizer", "pipelines"}
        elif (
            isinstance(node, ast.Call)
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and str(node.args[0].value).split(".")[0] in {"tokenizer", "pipelines"}
        ):
            assert not re.search(r"import_module|__import__|find_spec", ast.unparse(node.func))


def test_settings_are_read_without_loading_torch() -> None:
    """`plan`, `--help-stage` and every error in a recipe answer at once."""
    code = (
        "import sys; from audiollm.recipe.stages import stage_entry_points as s;"
        "[e.load() for e in s().values()];"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


OPENS_A_FOLDER = re.compile(
    r"^(Auto\w+|\w*(Model|Config|Processor|FeatureExtractor|Tokenizer)|model_class)\.from_pretrained$|^pipeline$"
)
OPENS_A_MODEL = re.compile(r" (AutoModel\w*|\w+Model|model_class)\.from_pretrained$| pipeline$")
OWN = re.compile(r"^(AudioTokenizer|HiggsTokenizer|DualFFN|Generator|SoundModel)\.")


def calls_of_transformers() -> list[tuple[str, ast.Call]]:
    found = []
    for top in ("audiollm", "tokenizer", "pipelines"):
        for path in sorted((ROOT / top).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "from_pretrained" not in text and "pipeline(" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func)
                    if OPENS_A_FOLDER.match(name) and not OWN.match(name):
                        found.append((f"{path.relative_to(ROOT)}:{node.lineno} {name}", node))
    return found


def test_no_folder_of_transformers_is_opened_with_its_own_code() -> None:
    calls = calls_of_transformers()
    assert len(calls) >= 10
    for place, call in calls:
        named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert named.get(None) == "OFFLINE" or named.get("trust_remote_code") == "False", place


def test_models_of_transformers_are_opened_in_one_place() -> None:
    """It decides the dtype: opened elsewhere, a model that is published in half precision refuses its inputs."""
    opener = "audiollm/files/transformers_folders.py"
    opened = [place for place, _ in calls_of_transformers() if OPENS_A_MODEL.search(place)]
    assert {place.partition(":")[0] for place in opened} == {opener}, opened


def contracts(folder: Path) -> subprocess.CompletedProcess[str]:
    """import-linter on the packages below `folder`."""
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as l; l()",
        "--no-cache",
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def copied_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("house")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    assert contracts(folder).returncode == 0
    return folder


@pytest.mark.parametrize("kind", FORBIDDEN_IMPORTS)
def test_a_forbidden_import_breaks_a_contract(copied_packages: Path, kind: str) -> None:
    name, added = FORBIDDEN_IMPORTS[kind]
    path = copied_packages / name
    before = path.read_text(encoding="utf-8")
    path.write_text(f"{before}\n{added}\n", encoding="utf-8")
    try:
        result = contracts(copied_packages)
    finally:
        path.write_text(before, encoding="utf-8")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "BROKEN" in result.stdout


MAX_PARAMETERS = 8
MORE_PARAMETERS = [
    "audiollm/commands/run.py: run has 10",
    "audiollm/families/dual_ffn/policy.py: load has 9",
]
"""Functions with more: a command, an options' list of a model that tests load in many ways, and a step of autograd."""


def modules_by_folder() -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            found[path.parent.relative_to(ROOT).as_posix()] += path.name != "__init__.py"
    return dict(found)


def test_the_design_lists_every_folder() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)` \| (.+?) \| (\d+) \|$", text, flags=re.M)
    assert {folder: int(number) for folder, _, number in rows} == modules_by_folder()
    assert all(len(subject) > 10 for _, subject, _ in rows)


def test_no_two_public_definitions_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                    places[node.name].append(str(path.relative_to(ROOT)))
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert set(shared) == set(SHARED_NAMES), shared


def test_generated_tables_are_those_of_the_catalogues() -> None:
    """Tables between markers in documents; `make docs-tables` writes them. A process of its own knows no part of a
    reader's own that another test registered."""
    command = [sys.executable, "docs/tables.py", "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    check = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (check.returncode, check.stdout) == (0, ""), check.stdout + check.stderr


def test_functions_have_at_most_eight_parameters() -> None:
    """Commands have one for each option, and a step of autograd one for each tensor."""
    longer = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name.endswith(("command.py", "commands.py")):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.FunctionDef):
                    continue
                names = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
                count = len([name for name in names if name not in ("self", "cls", "ctx")])
                if count > MAX_PARAMETERS:
                    longer.append(f"{path.relative_to(ROOT)}: {node.name} has {count}")
    assert longer == MORE_PARAMETERS
