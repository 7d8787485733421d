"""Commands, recipes and settings in READMEs, docs, recipe headers and help texts run after `make setup`."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from packaging.requirements import Requirement
from typer.testing import CliRunner

from audiollm.audio import save
from audiollm.commands.cli import build_app
from audiollm.commands.machine_speed import MachineSpeed
from audiollm.commands.run import stage_plans
from audiollm.errors import ConfigError
from audiollm.hub_models import folders
from audiollm.recipe.plug_ins import is_import_path
from audiollm.recipe.stages import load_recipe, stage_entry_points
from tests.documented import (
    ROOT,
    Snippet,
    blocks,
    command_line,
    commands,
    documents,
    inline_codes,
    notebook_modules,
    project,
)

COMMANDS = list(commands())
ELLIPSES = ("...", "…")
"""Words that stand for the settings of the line before, or for a path."""
EXTRA_OF = {
    r"faster_whisper": "whisper",
    r"--from microphone|--to speaker\b": "live",
    r"\bpesq\b": "metrics",
    r"audiollm studio --": "studio",
    r"audiollm serve ": "serve",
    r"--engine ray": "ray",
    r"attention=flash": "flash",
}
"""What of a command needs an extra, and its name."""


def ids(snippet: Snippet) -> str:
    return str(snippet)


# ---- what `make setup` installs


@cache
def installed_by_setup() -> frozenset[str]:
    """Distributions of a clean `make setup`: the dependencies with theirs, and those that the Makefile adds."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (setup,) = re.findall(r"^\$\(READY\): .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    added = re.findall(r"--no-deps (.+)", setup)
    extras = [text for names in re.findall(r"-e '\.\[([\w,]+)\]'", setup) for text in names.split(",")]
    requirements = [*project()["dependencies"]]
    for extra in extras:
        requirements += project()["optional-dependencies"][extra]
    result = {canonical(Requirement(text).name) for line in added for text in line.split()}
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonical(requirement.name)
        if name in result or (
            requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        result.add(name)
        try:
            texts = importlib.metadata.requires(requirement.name) or []
        except importlib.metadata.PackageNotFoundError:  # for another system than this one
            continue
        waiting += [Requirement(text) for text in texts if "extra ==" not in text]
    return frozenset(result)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


owners_of_packages = cache(importlib.metadata.packages_distributions)


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that were installed by hand are not found."""
    owners = owners_of_packages()
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        distributions = {canonical(owner) for owner in owners.get(name.partition(".")[0], ())}
        by_hand = distributions and not distributions & installed_by_setup() and distributions != {"audiollm"}
        return None if by_hand else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.fixture
def readers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the modules that documents name as the reader's, and without YAMNet."""
    (tmp_path / "my_rewards.py").write_text("def brevity(batch):\n    return [0.0 for answer in batch]\n")
    guide = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    parts = re.findall(r"```python\n(.*?)```", guide, flags=re.S)
    (tmp_path / "my_parts.py").write_text("\n".join(parts))
    write_notebook_modules(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "tests" / "toy_families")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def write_notebook_modules(folder: Path) -> None:
    """Write what notebooks write for their reader, behind what is there."""
    for name, text in notebook_modules():
        with (folder / name).open("a") as file:
            file.write(f"\n\n{text}")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No model is in the hub's cache or fetched: names stand for folders that are not there."""
    monkeypatch.setattr(folders, "cached_snapshot", lambda *_: None)
    monkeypatch.setattr(folders, "download_model", lambda name, *_: Path(name.repository))
    monkeypatch.setattr(folders, "download_config", lambda name: Path(name.repository))
    with folders.hub_access(download=False, may_lack=True):
        yield


# ---- commands


UsageError = typer.BadParameter.__mro__[1]
"""The error of an unknown command or option, of click or of the copy of it that typer brings."""


def command_of(words: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that `audiollm WORDS` runs, or the group that it names, and the words behind its name."""
    is_own = len(words) > 1 and is_import_path(words[1])
    command = typer.main.get_command(build_app(words[0], words[1])) if is_own else command_line()
    rest = list(words)
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"no command {rest[0]!r}"
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def words_of(snippet: Snippet) -> list[str]:
    """The words behind the program's name, up to a pipe."""
    words = shlex.split(snippet.text)
    return words[1 : words.index("|")] if "|" in words else words[1:]


def parameters_of(words: Sequence[str]) -> dict[str, Any]:
    """The parameters of `audiollm WORDS` as its command would get them.

    Raises:
        UsageError: an unknown option, a missing or a wrong value.
    """
    command, rest = command_of([word for word in words if word not in ELLIPSES])
    if hasattr(command, "commands"):
        return {}
    parameters: dict[str, Any] = command.make_context(command.name, rest).params
    return parameters


def is_placeholder(word: str) -> bool:
    """Whether a word stands for another: KIND, N, VIDEO|AUDIO."""
    return bool(re.fullmatch(r"[A-Z][A-Z|]*", word))


AUDIOLLM = [snippet for snippet in COMMANDS if snippet.text.startswith("audiollm ")]


@pytest.mark.parametrize("snippet", AUDIOLLM, ids=ids)
@pytest.mark.usefixtures("readers_folder")
def test_a_command_and_its_options_exist(snippet: Snippet) -> None:
    words = words_of(snippet)
    if is_placeholder(words[0]):
        return
    try:
        parameters_of(words)
    except UsageError as error:
        incomplete = type(error).__name__ in ("MissingParameter", "BadOptionUsage")
        is_mention = incomplete or any(is_placeholder(word) or "|" in word for word in words)
        assert snippet.inline and is_mention, error.format_message()
        command, rest = command_of(words)
        known = {
            name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in rest if word.startswith("-")} <= known


@pytest.mark.parametrize("snippet", AUDIOLLM, ids=ids)
def test_what_setup_does_not_install_is_named_in_the_line(snippet: Snippet) -> None:
    extras = project()["optional-dependencies"]
    for pattern, extra in EXTRA_OF.items():
        if re.search(pattern, snippet.line):
            names = {canonical(Requirement(text).name) for text in extras[extra]}
            assert names <= installed_by_setup() or f"audiollm[{extra}]" in snippet.line, extra


RUNS = [
    snippet
    for snippet in {snippet.text: snippet for snippet in AUDIOLLM}.values()
    if snippet.text.split()[1] in ("run", "plan")
    and "--help-stage" not in snippet.text
    and ".yaml" in snippet.text
]


@pytest.mark.usefixtures("readers_folder")
@pytest.mark.parametrize("snippet", RUNS, ids=ids)
def test_a_recipe_takes_the_settings_that_it_is_given(snippet: Snippet) -> None:
    words = words_of(snippet)
    parameters = parameters_of(words)
    path, overrides = ROOT / parameters["recipe"], list(parameters["overrides"] or ())
    set_keys = {text.partition("=")[0] for text in overrides}
    needed = [key for key in required(path) if key not in set_keys]
    assert not needed or snippet.text.split()[1] == "plan" or set(words) & set(ELLIPSES), (
        f"it asks for {needed}"
    )
    filled = [
        *(f"{key}=/not/there/{key}" for key in needed),
        *(text.replace("…", "...") for text in overrides),
    ]
    recipe = load_recipe(path, filled, absent=[])
    try:
        stage_plans(recipe, 1, MachineSpeed(400))
    except ConfigError as error:
        assert "docs/models.md" in str(error) and "docs/models.md" in snippet.line, error


def required(path: Path) -> list[str]:
    """The keys of a recipe, and of the one that it inherits from, whose value is `???`."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    base = yaml.safe_load((path.parent / data["base"]).read_text(encoding="utf-8")) if "base" in data else {}
    return [key for key, value in {**base, **data}.items() if value == "???"]


PIPELINES = [s for s in AUDIOLLM if s.text.split()[1] in ("annotate", "audiocot") and " -o " in s.text]


@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize("snippet", PIPELINES, ids=ids)
def test_a_pipeline_lacks_nothing_that_its_line_does_not_name(
    snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for home in ("HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(home, str(tmp_path))
    write_notebook_modules(tmp_path)
    fillers = {"endpoint=...": "endpoint=model@http://localhost", "transformers=...": "transformers=folder"}
    words = [fillers.get(word, word) for word in words_of(snippet)]
    named = f"{snippet.line} {shlex.join(words)}"
    for reason in reasons_to_stop(words):
        package = re.search(r"pip install (?:--no-deps )?'?([\w.\[\]-]+)", reason)
        remedies = (
            [package[1]]
            if package
            else re.findall(r"[\w-]*[/.][\w./-]*\w|\bfolder\b", reason.partition(": ")[2])
        )
        follows = "which lacks its model" in reason
        assert follows or any(remedy in named for remedy in remedies), f"{reason}\nin: {snippet.line}"


def reasons_to_stop(words: list[str]) -> list[str]:
    """What the dry run of `audiollm WORDS` misses; recordings, texts and folders of models that it names
    are made up."""
    recordings = Path("recordings")
    recordings.mkdir()
    save(recordings / "tone.wav", torch.zeros(1, 16_000), 16_000)
    inputs = parameters_of(words)["inputs"]
    words = [str(recordings) if word in inputs else word for word in words]
    for _ in range(5):
        result = CliRunner().invoke(build_app(words[0]), [*words, "--dry-run"])
        problem = str(result.exception) if isinstance(result.exception, ConfigError) else ""
        absent = re.search(r"no such file or folder: (\S+)", problem)
        if not absent:
            break
        if absent[1].endswith(".txt"):
            Path(absent[1]).write_text("A sentence to speak.\n")
        else:
            Path(absent[1]).mkdir(parents=True)
    if result.exit_code == 0:
        return []
    _, sentence, reasons = problem.partition("needs what is not here: ")
    assert sentence, result.output + problem
    return re.split(r"; (?=[\w.]+: )", reasons.splitlines()[0])


# ---- settings and blocks


@cache
def stage_names() -> dict[str, str]:
    """Name of a stage in any recipe -> its kind; kinds stand for themselves."""
    names = {kind: kind for kind in stage_entry_points()}
    for path in documents("recipes/*.yaml"):
        for stage in yaml.safe_load(path.read_text(encoding="utf-8")).get("stages") or ():
            kinds = [kind for kind in stage if kind in names]
            names |= dict.fromkeys([stage["name"]] if kinds and "name" in stage else [], *kinds[:1])
    return names


SETTINGS = [code for code in inline_codes() if re.match(r"^[a-z_]\w*\.[a-z_.]+=\S", code.text)]


@pytest.mark.parametrize("snippet", SETTINGS, ids=ids)
def test_a_setting_of_a_stage_exists(snippet: Snippet) -> None:
    for text in shlex.split(snippet.text):
        stage, _, key = text.partition("=")[0].partition(".")
        if stage in stage_names():
            fields = stage_entry_points()[stage_names()[stage]].load().config.model_fields
            assert key.split(".")[0] in fields, f"{stage} has no {key}"


@pytest.mark.usefixtures("readers_folder")
@pytest.mark.parametrize("block", blocks("yaml"), ids=ids)
def test_a_block_of_yaml_is_a_recipe(block: Snippet, tmp_path: Path) -> None:
    data = yaml.safe_load(block.text)
    if isinstance(data, list):
        data = {"stages": data}
    if not isinstance(data, dict) or "stages" not in data:
        return
    keys = {*data, *(key for stage in data["stages"] for key in [*stage, stage.get("name")])}
    for reference in re.findall(r"\$\{([\w]+)[.}]", block.text):
        if reference not in keys:  # made further up in the document
            data[reference] = f"/not/there/{reference}"
    recipe = tmp_path / "documented.yaml"
    text = re.sub(
        r"\$\{(\w+)\.\w+\}",
        lambda match: match[0] if match[1] in keys else f"${{{match[1]}}}",
        yaml.safe_dump(data),
    )
    recipe.write_text(text, encoding="utf-8")
    load_recipe(recipe, absent=[])


@pytest.mark.parametrize("block", blocks("python"), ids=ids)
def test_a_block_of_python_compiles_and_imports_what_there_is(block: Snippet) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "audiollm",
            "tokenizer",
            "pipelines",
        ):
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


# ---- the other programs


@pytest.mark.parametrize("snippet", [s for s in COMMANDS if s.text.startswith("make ")], ids=ids)
def test_a_target_of_make_exists(snippet: Snippet) -> None:
    words = shlex.split(snippet.text)[1:]
    folder, words = (words[1], words[2:]) if words[0] == "-C" else (".", words)
    makefile = (ROOT / folder / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, equals, _ = word.partition("=")
        assert f"$({name})" in makefile if equals else re.search(rf"^{name}:", makefile, re.MULTILINE), word


@pytest.mark.parametrize(
    "snippet", [s for s in COMMANDS if re.match(r"(\.venv/bin/)?(python|pytest)", s.text)], ids=ids
)
def test_a_script_or_a_test_exists(snippet: Snippet) -> None:
    for word in shlex.split(snippet.text):
        if word.endswith(".py"):
            assert (ROOT / word.partition("::")[0]).is_file(), word


def test_every_extra_that_is_named_exists() -> None:
    named = {
        f"{path.relative_to(ROOT)}: {extra}": extra
        for path in documents("*.md", "*.py", "*.yaml", "Makefile", "*/Makefile", "*.html", "*.js")
        for extra in re.findall(r"audiollm\[([\w,-]+)\]", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert [place for place, extra in named.items() if extra not in project()["optional-dependencies"]] == []


def test_the_collector_sees_every_kind_of_document() -> None:
    kinds = {(snippet.path.suffix, snippet.text.split()[0]) for snippet in COMMANDS}
    assert {
        (".md", "audiollm"),
        (".md", "make"),
        (".md", "pip"),
        (".yaml", "audiollm"),
        (".py", "audiollm"),
    } <= kinds
    assert len(RUNS) > 80 and len(PIPELINES) > 10 and len(SETTINGS) > 10
