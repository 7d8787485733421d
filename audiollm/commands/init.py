"""The command `init`: a project of one's own, with a recipe, a stage and a reward to change."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer
import yaml
from rich.console import Console

from audiollm.errors import ConfigError, suggestion

_SUFFIXES = {".yaml", ".csv", ".md", ".py"}
_OTHER_FILE = re.compile(r"^base:\s*(\S+)|\$\{here\}/([\w./-]+)", re.MULTILINE)
"""What a recipe reads beside itself: the recipe that it is based on, and files by their place."""
_LINK = re.compile(r"(?<!\!)\[([^\]\[]*)\]\(((?!https?:)[^)\s]+)\)")
_SIZES = ("tiny", "small", "full")


def init(
    folder: Annotated[Path, typer.Argument(help="The new folder.", show_default=False)],
    recipe: Annotated[
        str, typer.Option(help="The recipe to begin from, by its folder: voice, audio_reasoner, ...")
    ] = "audio_reasoner",
) -> None:
    """Begin a project of your own: a recipe with all that it reads, and a stage and a reward to change.

    Examples:

    audiollm init mine --recipe voice

    audiollm init questions
    """
    root = Path(str(files("recipes")))
    names = sorted(path.name for path in root.iterdir() if any(path.glob("*.yaml")))
    if recipe not in names:
        raise ConfigError(f"no such recipe: {recipe!r}", "--recipe", suggestion(recipe, names))
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", "", "name a new folder")
    copied = sorted(copy_recipe(root, recipe, folder / "recipes"))
    parts = Path(str(files("audiollm.commands.project")))
    shutil.copyfile(parts / "my_parts.py", folder / "my_parts.py")
    first = _first_recipe(folder, recipe)
    keys = required_keys(folder / first)
    arguments = " ".join([first, *(f"{key}=..." for key in keys)])
    text = (
        (parts / "README.template")
        .read_text(encoding="utf-8")
        .format(
            name=folder.resolve().name, recipe=recipe, first=first, arguments=arguments, keys=_key_lines(keys)
        )
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{folder}: my_parts.py, README.md and {len(copied)} files of recipes")
    for key, meaning in keys.items():
        console.print(f"the recipe asks for {key}: {meaning}", markup=False)
    console.print(f"cd {folder} && audiollm plan {arguments}", markup=False)


def copy_recipe(root: Path, name: str, out: Path) -> set[str]:
    """Copy a recipe's folder, and what its files read of other folders, at the same places below `out`.

    Returns:
        The copied files, from `root`.
    """
    beside = [path for path in sorted((root / name).iterdir()) if path.suffix in _SUFFIXES]
    waiting = [path.relative_to(root).as_posix() for path in beside]
    copied: set[str] = set()
    while waiting:
        place = waiting.pop()
        if place in copied or not (root / place).is_file():
            continue
        copied.add(place)
        target = out / place
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (root / place).read_text(encoding="utf-8")
        if place.endswith(".yaml"):
            waiting += read_places(place, text)
        target.write_text(
            _without_links(text, place, name) if place.endswith(".md") else text, encoding="utf-8"
        )
    return copied


def read_places(place: str, text: str) -> Iterator[str]:
    """Yield the files that a recipe reads beside itself, from the folder of all recipes."""
    for match in _OTHER_FILE.finditer(text):
        parts: list[str] = []
        for part in (PurePosixPath(place).parent / (match[1] or match[2])).parts:
            parts = parts[:-1] if part == ".." else [*parts, part]
        yield "/".join(parts)


def required_keys(path: Path) -> dict[str, str]:
    """The keys that a recipe leaves to its user (`???`), those of its base included, each with its remark."""
    text = path.read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    keys = required_keys(path.parent / data["base"]) if "base" in data else {}
    remarks = dict(re.findall(r"^(\w+):.*?\s#\s*(.+)$", text, re.MULTILINE))
    keys = {key: remarks.get(key, remark) for key, remark in keys.items() if data.get(key, "???") == "???"}
    return keys | {key: remarks.get(key, "") for key, value in data.items() if value == "???"}


def _key_lines(keys: Mapping[str, str]) -> str:
    """What the recipe asks for, as lines of the README; nothing where it asks for nothing."""
    lines = [f"- `{key}`: {meaning}" for key, meaning in keys.items()]
    return "\n".join(["The recipe asks for:", "", *lines, "", ""]) if lines else ""


def _without_links(text: str, place: str, name: str) -> str:
    """A README without links to what is not copied: their words stay."""

    def link(match: re.Match[str]) -> str:
        is_near = not match[2].startswith("..")
        return match[0] if is_near else match[1]

    return _LINK.sub(link, text)


def _first_recipe(folder: Path, recipe: str) -> str:
    """The smallest size of the recipe, from the project's folder."""
    sizes = [f"recipes/{recipe}/{size}.yaml" for size in _SIZES]
    all_recipes = [
        path.relative_to(folder).as_posix() for path in sorted((folder / "recipes" / recipe).glob("*.yaml"))
    ]
    return next((name for name in sizes if (folder / name).exists()), all_recipes[0])
