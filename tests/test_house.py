"""The house rules that a linter cannot see."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = sorted((ROOT / "audiollm").rglob("*.py"))


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(ROOT)))
def test_audiollm_reaches_the_others_through_entry_points_only(path: Path) -> None:
    """No import, and no text that could be handed to importlib, names `tokenizer` or `pipelines` modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & {"tokenizer", "pipelines"}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in {"tokenizer", "pipelines"}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = ast.unparse(node.func)
            if re.search(r"import_module|__import__|find_spec", name):
                assert str(node.args[0].value).split(".")[0] not in {"tokenizer", "pipelines"}


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
OWN = re.compile(r"^(AudioTokenizer|HiggsTokenizer|DualFFN|Generator)\.")


def calls_of_transformers() -> list[tuple[str, ast.Call]]:
    found = []
    for top in ("audiollm", "tokenizer", "pipelines"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func)
                    if OPENS_A_FOLDER.match(name) and not OWN.match(name):
                        found.append((f"{path.relative_to(ROOT)}:{node.lineno} {name}", node))
    return found


def test_no_folder_of_transformers_is_opened_with_its_own_code() -> None:
    calls = calls_of_transformers()
    assert len(calls) >= 15
    for place, call in calls:
        named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert named.get(None) == "OFFLINE" or named.get("trust_remote_code") == "False", place
