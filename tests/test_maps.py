"""READMEs and docs are maps: every file, folder, module, name and option that they cite is where they say.

Paths are relative to the document's own folder or to the root of the repository. A bare name of a file is also
looked up in the folder of the path that its line, or the line that introduces its table, cites before it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from audiollm.recipe.stages import stage_entry_points
from tests.documented import ROOT, Snippet, blocks, command_line, documents, inline_codes, project

PACKAGES = ("audiollm", "tokenizer", "pipelines")
ENTRY_POINT_GROUPS = frozenset(project()["entry-points"])
TOP_FOLDERS = (*PACKAGES, "recipes", "benchmarks", "tests", "docs")
READERS_FILES = re.compile(r"^my_\w+\.py$|^(runs|build)/")
"""Files that a document asks its reader to write, and folders of what commands write."""
FOREIGN_NAMES = frozenset(
    {
        "run_wer.py",
        "prepare_aqa.py",
        "convert_higgs_audio_v2_tokenizer_to_hf.py",
        "--computation-aware",
        "compare.md",
        "utils.py",
        "FRAMES_A_SECOND",
    }
)
"""Scripts and options of other projects, files that a run writes, and names that CONTRIBUTING.md advises against."""
DATA_SUFFIXES = frozenset(
    ["json", "jsonl", "html", "css", "js", "yaml", "csv", "tsv", "txt", "safetensors", "model", "wav"]
)
_LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")
_SOURCE_PATH = re.compile(r"^[\w./-]*\w\.(?:py|md|lark)$")
_TOP_PATH = re.compile(rf"^(?:{'|'.join(TOP_FOLDERS)})/[\w./-]*$")
_DOTTED = re.compile(r"^(\w+(?:\.\w+)+)(?:\(.*\))?$")
_CALL = re.compile(r"^(\w+)\([^)]*\)$")
_CLASS = re.compile(r"^[A-Z]+[a-z0-9]+(?:[A-Z]+[a-z0-9]*)+$")
_CONSTANT = re.compile(r"^[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+$")
_OPTION = re.compile(r"^(--[a-z][a-z-]+)(?: .*|=.*)?$")


def bases(document: Path) -> tuple[Path, Path]:
    """The folders that paths of a document are relative to."""
    return document.parent, ROOT


def exists(snippet: Snippet) -> bool:
    if any((base / snippet.text).exists() for base in bases(snippet.path)):
        return True
    return "/" not in snippet.text and any(
        (folder / snippet.text).is_file() for folder in folders_before(snippet)
    )


def folders_before(snippet: Snippet) -> Iterator[Path]:
    """Folders of the paths that a line cites, and of those in the line that introduces its table."""
    lines = snippet.path.read_text(encoding="utf-8").splitlines()
    start = min(snippet.number, len(lines)) - 1
    while start > 0 and lines[start].startswith("|"):
        start -= 1
    heading = next((line for line in reversed(lines[: start + 1]) if line.strip()), "")
    introduction = heading if lines[snippet.number - 1].startswith("|") else ""
    for name in re.findall(r"`([\w/]+/)(?:[\w.]+)?`", f"{introduction} {snippet.line}"):
        yield from (base / name for base in bases(snippet.path))


# ---- Python names, read without importing


@cache
def module_file(dotted: str, base: Path) -> Path | None:
    """The file of a module or package named by dots below `base`."""
    path = base.joinpath(*dotted.split("."))
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    return path / "__init__.py" if path.is_dir() and any(path.glob("*.py")) else None


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names that a module defines, imports or assigns at its top, and the attributes of its classes."""
    if not path.is_file():
        return frozenset()
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return frozenset(names)


@cache
def words_of_sources() -> frozenset[str]:
    """Every identifier of the repository's Python, and the words of its Makefiles."""
    words: set[str] = set()
    for path in documents("*.py", "Makefile", "*/Makefile"):
        if path != Path(__file__):
            words.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return frozenset(words)


@cache
def options() -> frozenset[str]:
    """Options of all commands, of benchmarks and of the tools that documents call."""
    names: set[str] = set()
    waiting = [command_line()]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        for parameter in command.params:
            names.update((*parameter.opts, *parameter.secondary_opts))
    for path in documents("benchmarks/*.py", "tests/*.py", "tests/*/*.py", "Makefile", "*/Makefile"):
        names.update(re.findall(r"--[a-z][a-z-]+", path.read_text(encoding="utf-8")))
    return frozenset(names | {"--help", "--install-completion", "--show-completion"})


# ---- citations


def citations() -> Iterator[Snippet]:
    """Inline code of all documents, and the paths of modules in blocks that draw a flow."""
    yield from inline_codes()
    for block in blocks(""):
        for name in re.findall(r"[\w./]+\.py\b", block.text):
            yield Snippet(block.path, block.number, name, block.line)


def complaint(snippet: Snippet) -> str:
    """What is wrong with a citation, or an empty text."""
    text, document = snippet.text, snippet.path
    if READERS_FILES.match(text) or text.split(" ")[0] in FOREIGN_NAMES or text == "__init__.py":
        return ""
    if _SOURCE_PATH.match(text) or _TOP_PATH.match(text):
        return "" if exists(snippet) else "no such file or folder"
    if re.match(r"^[a-z_/]+/$", text) and any(
        (base / text.split("/")[0]).is_dir() for base in bases(document)
    ):
        return "" if exists(snippet) else "no such folder"
    if option := _OPTION.match(text):
        return "" if option[1] in options() else "no command has this option"
    if call := _CALL.match(text):
        return "" if call[1] in words_of_sources() else "no such function"
    if _CLASS.match(text):
        return "" if text in words_of_sources() else "no such class"
    if _CONSTANT.match(text):
        return "" if text in words_of_sources() else "no such constant"
    if dotted := _DOTTED.match(text):
        return complaint_of_dotted(document, dotted[1])
    return ""


def complaint_of_dotted(document: Path, dotted: str) -> str:
    """A dotted name begins with a package of ours or a module beside the document, and every part exists."""
    parts = dotted.split(".")
    if parts[-1] in DATA_SUFFIXES or dotted in ENTRY_POINT_GROUPS:
        return ""
    stage = stage_entry_points().get(parts[0])
    if stage is not None and parts[1] in stage.load().config.model_fields:
        return ""
    for base in bases(document):
        if base == ROOT and parts[0] not in PACKAGES:
            continue
        for count in range(len(parts), 0, -1):
            path = module_file(".".join(parts[:count]), base)
            if path is not None:
                defined = names_in(path)
                absent = [part for part in parts[count:] if part not in defined]
                return f"{path.relative_to(ROOT)} has no {absent}" if absent else ""
    return ""


@cache
def all_complaints() -> tuple[str, ...]:
    texts = [f"{snippet}: {problem}" for snippet in citations() if (problem := complaint(snippet))]
    return tuple(sorted(set(texts)))


@pytest.mark.parametrize("document", documents("*.md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_cites_exists(document: Path) -> None:
    place = f"{document.relative_to(ROOT)}:"
    assert [text for text in all_complaints() if text.startswith(place)] == []


# ---- rows of tables: modules, and the names that they make public


def rows_of_modules() -> Iterator[tuple[Path, int, list[str], list[str]]]:
    """Rows of tables with a column `public`: document, line, the modules of the row, its public names."""
    for document in documents("*.md"):
        public = -1
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if not cells:
                public = -1
            elif "public" in cells:
                public = cells.index("public")
            elif public >= 0:
                modules = re.findall(r"`([\w/]+(?:\.py|/))`", cells[0])
                names = re.findall(r"`\.?([\w.]+)(?:\([^`]*\))?`", cells[public])
                if modules:
                    yield document, number, modules, names


def files_of(document: Path, number: int, modules: list[str]) -> list[Path]:
    """The files of a row's modules."""
    line = document.read_text(encoding="utf-8").splitlines()[number - 1]
    folders = [*bases(document), *folders_before(Snippet(document, number, modules[0], line))]
    paths = [folder / module for module in modules for folder in folders]
    return [file for path in paths for file in (path.glob("*.py") if path.is_dir() else [path])]


def test_a_row_names_what_its_modules_define() -> None:
    problems = []
    for document, number, modules, names in rows_of_modules():
        files = files_of(document, number, modules)
        defined = {name for path in files for name in names_in(path)}
        absent = [
            name for name in names if not set(name.split(".")) <= defined and not name.startswith("audiollm")
        ]
        if absent:
            problems.append(f"{document.relative_to(ROOT)}:{number} {modules}: {absent}")
    assert problems == []


@pytest.mark.parametrize(
    "readme",
    [path for path in documents("*.md") if path.name == "README.md" and path.parent != ROOT],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_readme_names_every_folder_below_it(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    folders = [path.parent.name for path in readme.parent.glob("*/__init__.py")]
    if readme.parent.relative_to(ROOT).parts[0] in PACKAGES:
        assert [name for name in folders if not re.search(rf"[`(/]{name}[`/]|^{name}/", text, re.M)] == []


def test_a_target_in_the_table_of_results_exists() -> None:
    """A command of one word is a target of `benchmarks/Makefile`."""
    rows = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8").splitlines()
    commands = [re.split(r"(?<!\\)\|", row)[4] for row in rows if row.startswith("| ") and "---" not in row]
    targets = {name for cell in commands for name in re.findall(r"`([a-z-]+)`", cell)}
    makefile = (ROOT / "benchmarks" / "Makefile").read_text(encoding="utf-8")
    assert len(targets) > 20
    assert [name for name in targets if not re.search(rf"^{name}:.*## ", makefile, re.M)] == []


@pytest.mark.parametrize(
    "document",
    [path for path in documents("*.md") if path.name in ("README.md", "RESULTS.md")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_map_is_short(document: Path) -> None:
    lines = len(document.read_text(encoding="utf-8").splitlines())
    assert lines <= (130 if document.parent == ROOT else 150)


@pytest.mark.parametrize("makefile", ["Makefile", "benchmarks/Makefile"])
def test_scripts_that_a_makefile_runs_exist(makefile: str) -> None:
    text = (ROOT / makefile).read_text(encoding="utf-8")
    scripts = set(re.findall(r"(?:benchmarks|tests|docs|recipes)/[\w/]+\.(?:py|yaml)", text))
    assert scripts and [name for name in scripts if not (ROOT / name).is_file()] == []


# ---- stages and commands, links


def test_stages_that_documents_name_exist() -> None:
    unknown = []
    commands = set(command_line().commands)
    for document in documents("*.md"):
        text = document.read_text(encoding="utf-8")
        for kind, names in re.findall(r"\b(stage|command)s? ((?:`\w+`(?:, (?:and )?| and | or )?)+)", text):
            kinds = set(stage_entry_points()) if kind == "stage" else commands
            for name in re.findall(r"`(\w+)`", names):
                if name not in kinds:
                    unknown.append(f"{document.relative_to(ROOT)}: {kind} {name}")
    assert unknown == []


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
    return frozenset(re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings)


def test_links_lead_somewhere() -> None:
    broken = []
    for document in (
        *documents("*.md"),
        ROOT / "CHANGELOG.md",
        *(ROOT / "benchmarks" / "history").glob("*.md"),
    ):
        for target in _LINK.findall(document.read_text(encoding="utf-8")):
            if re.match(r"^(https?|mailto):", target):
                continue
            name, _, anchor = target.partition("#")
            path = (document.parent / name) if name else document
            is_anchor = not anchor or (path.suffix == ".md" and path.is_file() and anchor in anchors(path))
            if not path.exists() or not is_anchor:
                broken.append(f"{document.relative_to(ROOT)}: {target}")
    assert broken == []
