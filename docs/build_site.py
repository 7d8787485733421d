"""The documentation as a site: every document of the repository, and pages of commands, stages and modules.

    make docs        # build/site/index.html; asks no other host, when it is read either

The sources go to `build/site_source`: documents at their places, so that links between them hold; files that they link
to beside them; and under `reference/` what is made of the code. A link that leads nowhere ends the build.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import typer
import yaml
from tables import ROOT, markdown, stage_page

from audiollm.commands.cli import build_app
from audiollm.recipe.stages import stage_entry_points

SOURCE, SITE = ROOT / "build" / "site_source", ROOT / "build" / "site"
LINK = re.compile(r"(?<!\!)\[([^\]\[]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*src=\"([^\"]+)\"")
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.DOTALL | re.MULTILINE)
CODE_WITH_BAR = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
CODE_IN_LINE = re.compile(r"`[^`\n]+`")
NOTEBOOK, SHELL, DOWNLOAD = ".ipynb", "%%bash\n", "download it"
"""Ending of notebooks, first line of a cell that a shell runs, and the label of the link to the file itself."""
ABOUT = "The open training stack for audio LLMs: tokenizers, speech and understanding, annotation, sound, rewards."
API = (
    "audiollm.generation.speaking.speech_generator", "audiollm.generation.speaking.generator", "audiollm.codec",
    "audiollm.models.dual_ffn", "audiollm.models.decoder", "audiollm.data.records.sample",
    "audiollm.data.records.shards", "audiollm.data.chat.template", "audiollm.data.text.forms",
    "audiollm.data.text.pronunciation", "audiollm.families.family", "audiollm.families.registry",
    "audiollm.rl.objectives.catalog", "audiollm.rl.policy_gradient.catalog", "audiollm.rl.rewards.catalog",
    "audiollm.interpret.live.live_session", "audiollm.evaluate.alignment.word_times",
    "audiollm.evaluate.judges.judging",
    "audiollm.recipe.stages", "audiollm.recipe.runner", "tokenizer.native.model", "tokenizer.continuous.model",
    "pipelines.annotate.step", "pipelines.steps.step",
)  # fmt: skip
"""Modules whose public names the site describes."""
FIRST = ("README.md", "docs/site/first_steps.md", "docs/using.md", "docs/glossary.md", "docs/design.md")
GROUPS: Mapping[str, Sequence[str]] = {
    "Start": FIRST,
    "Recipes": ("recipes/",),
    "Guides": ("docs/",),
    "Packages": ("audiollm/", "tokenizer/", "pipelines/"),
    "Measured": ("benchmarks/",),
    "Project": ("CHANGELOG.md", "CONTRIBUTING.md"),
}
"""Title -> documents, by path or by the folder that they are in; each goes to the first that names it."""


def main() -> None:
    pages = write_source()
    (ROOT / "build" / "mkdocs.yml").write_text(
        yaml.safe_dump(settings(pages), sort_keys=False, allow_unicode=True)
    )
    if "--source" in sys.argv[1:]:
        return
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", "build/mkdocs.yml"]
    status = subprocess.call(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    if status == 0:
        shutil.copyfile(SOURCE / "llms.txt", SITE / "llms.txt")
        print(f"{SITE / 'index.html'}: {len(pages)} pages")
    sys.exit(status)


def write_source() -> dict[str, str]:
    """Write the sources of the site.

    Returns:
        The title of each page by its path.
    """
    shutil.rmtree(SOURCE, ignore_errors=True)
    tracked = tracked_files()
    documents = [
        name for name in tracked if name.endswith(".md") and not name.startswith((".github", "tests"))
    ]
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in documents}
    texts |= dict(notebook_pages(tracked))
    texts |= dict(command_pages()) | dict(stage_pages()) | dict(module_pages())
    assets: set[str] = set()
    for name, text in texts.items():
        write_page(name, linked(name, text, texts, set(tracked), assets))
    for asset in assets:
        (SOURCE / asset).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / asset, SOURCE / asset)
    titles = {name: title_of(text, name) for name, text in texts.items()}
    (SOURCE / "llms.txt").write_text(llms_text(texts, titles), encoding="utf-8")
    return titles


def tracked_files() -> list[str]:
    """Files of the repository, those that are to be added included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted(name for name in names if (ROOT / name).is_file())


def write_page(name: str, text: str) -> None:
    path = SOURCE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def linked(name: str, text: str, pages: Mapping[str, str], tracked: set[str], assets: set[str]) -> str:
    """The text with its links to folders and files as the site has them; the files go to `assets`."""

    def resolve(target: str) -> str:
        parts: list[str] = []
        for part in (PurePosixPath(name).parent / target).parts:
            parts = parts[:-1] if part == ".." else [*parts, part] if part != "." else parts
        return "/".join(parts)

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = resolve(target)
        if path in pages:
            return match[0]
        if path.endswith(NOTEBOOK) and path.replace(NOTEBOOK, ".md") in pages and label != DOWNLOAD:
            return f"[{label}]({target.replace(NOTEBOOK, '.md')}{anchor})"
        if f"{path}/README.md" in pages:
            return f"[{label}]({target.rstrip('/')}/README.md{anchor})"
        if path in tracked:
            assets.add(path)
            return match[0]
        if any(other.startswith(f"{path}/") for other in tracked):
            return label  # a folder of files
        sys.exit(f"{name}: the link to {target} leads nowhere")

    for found in IMAGE.finditer(text):
        image = resolve(found[1] or found[2])
        if image in tracked:
            assets.add(image)
    pieces = (piece if is_code else LINK.sub(link, piece) for is_code, piece in split_code(text))
    return "".join(
        CODE_WITH_BAR.sub(_code_with_bar, line) if line.startswith("|") else line
        for line in "".join(pieces).splitlines(keepends=True)
    )


def _code_with_bar(code: re.Match[str]) -> str:
    """A bar within code in a table, as MkDocs reads it: GitHub takes `\\|`."""
    return f"<code>{html.escape(code[1].replace(chr(92) + '|', '|')).replace('|', '&#124;')}</code>"


def split_code(text: str) -> Iterator[tuple[bool, str]]:
    """Pieces of a document in their order, and whether each is code."""
    place = 0
    for pattern_match in sorted([*FENCE.finditer(text)], key=lambda match: match.start()):
        yield from _split_lines(text[place : pattern_match.start()])
        yield True, pattern_match[0]
        place = pattern_match.end()
    yield from _split_lines(text[place:])


def _split_lines(text: str) -> Iterator[tuple[bool, str]]:
    place = 0
    for match in CODE_IN_LINE.finditer(text):
        if text[max(0, match.start() - 1) : match.start()] == "[":  # the label of a link
            continue
        yield False, text[place : match.start()]
        yield True, match[0]
        place = match.end()
    yield False, text[place:]


def title_of(text: str, name: str) -> str:
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    return heading[1].replace("`", "").strip() if heading else PurePosixPath(name).stem


def notebook_pages(tracked: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A page for each notebook, with its text, its code, and the notebook itself to download."""
    for name in tracked:
        if not name.endswith(NOTEBOOK):
            continue
        blocks = []
        for cell in json.loads((ROOT / name).read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "code":
                language = "bash" if text.startswith(SHELL) else "python"
                text = f"```{language}\n{text.removeprefix(SHELL)}\n```"
            blocks.append(text)
        file = PurePosixPath(name).name
        blocks.insert(1, f"This page is a notebook: [{DOWNLOAD}]({file}), and run it with Jupyter.")
        yield name.replace(NOTEBOOK, ".md"), "\n\n".join(blocks) + "\n"


# ------------------------------------------------------------------------------------- pages of the code


def command_pages() -> Iterator[tuple[str, str]]:
    """A page for each command, from its help."""
    group: Any = typer.main.get_command(build_app())
    rows = []
    for path, command in _commands(group, ("audiollm",)):
        name = "_".join(path[1:])
        rows.append(
            (f"[`{' '.join(path)}`]({name}.md)", (command.get_short_help_str(limit=120) or "").rstrip("."))
        )
        yield f"reference/commands/{name}.md", _command_page(path, command)
    yield "reference/commands/index.md", f"# Commands\n\n{markdown(('command', 'what it does'), rows)}"


def _commands(group: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


def _command_page(path: Sequence[str], command: Any) -> str:
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        names = (
            ", ".join(f"`{option}`" for option in parameter.opts)
            if parameter.param_type_name == "option"
            else f"`{parameter.metavar or parameter.name}`"
        )
        default = getattr(parameter, "show_default", None)
        value = default if isinstance(default, str) else parameter.default
        text = "" if value in (None, False, (), []) or callable(value) else f"`{value}`"
        rows.append((names, getattr(parameter, "help", "") or "", "required" if parameter.required else text))
    help_text = re.sub(
        r"^(audiollm .*(?:\n[ ]+.*)*)$",
        r"```console\n$ \1\n```",
        (command.help or "").replace("\b", ""),
        flags=re.M,
    )
    return f"# {' '.join(path)}\n\n{help_text}\n\n{markdown(('option', 'meaning', 'default'), rows)}"


def stage_pages() -> Iterator[tuple[str, str]]:
    """A page for each stage, from its settings."""
    rows = []
    for kind, entry in sorted(stage_entry_points().items()):
        stage = entry.load()
        rows.append((f"[`{kind}`]({kind}.md)", stage.help))
        yield f"reference/stages/{kind}.md", stage_page(kind, stage).replace("### ", "# ", 1)
    yield "reference/stages/index.md", f"# Stages\n\n{markdown(('stage', 'what it does'), rows)}"


def module_pages() -> Iterator[tuple[str, str]]:
    """A page for each module of `API`, by its docstrings."""
    rows = []
    for module in API:
        rows.append((f"[`{module}`]({module}.md)",))
        yield f"reference/modules/{module}.md", f"# {module}\n\n::: {module}\n"
    yield "reference/modules/index.md", f"# Modules\n\n{markdown(('module',), rows)}"


# ---------------------------------------------------------------------------------------------- settings


def settings(pages: Mapping[str, str]) -> dict[str, Any]:
    """Settings of MkDocs: nothing is fetched from elsewhere, when the site is built or read."""
    return {
        "site_name": "audiollm", "site_description": ABOUT, "docs_dir": str(SOURCE), "site_dir": str(SITE),
        "use_directory_urls": False,
        "theme": {
            "name": "material", "font": False,
            "features": ["navigation.indexes", "navigation.top", "content.code.copy"],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default", "primary": "teal"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "primary": "teal"},
            ],
        },
        "extra": {"generator": False},
        "plugins": [
            "search",
            {"mkdocstrings": {"handlers": {"python": {
                "paths": [str(ROOT)], "inventories": [],
                "options": {"show_source": False, "show_root_heading": False, "heading_level": 2,
                            "show_if_no_docstring": False, "docstring_style": "google", "filters": ["!^_"],
                            "members_order": "source", "docstring_options": {"warnings": False}},
            }}}},
        ],
        "markdown_extensions": [
            "tables", "attr_list", "md_in_html", "toc", "pymdownx.superfences", "pymdownx.highlight",
            "pymdownx.inlinehilite",
        ],
        "validation": {"links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "ignore"}},
        "nav": navigation(pages),
    }  # fmt: skip


def navigation(pages: Mapping[str, str]) -> list[dict[str, Any]]:
    """Pages by group: named ones in their order, folders by path."""
    remaining = [name for name in pages if not name.startswith("reference/")]
    entries: list[dict[str, Any]] = []
    for group, places in GROUPS.items():
        members: list[str] = []
        for place in places:
            members += [
                name
                for name in remaining
                if name == place or (place.endswith("/") and name.startswith(place))
            ]
        remaining = [name for name in remaining if name not in members]
        entries.append({group: [{pages[name]: name} for name in members]})
    for title in ("commands", "stages", "modules"):
        folder = f"reference/{title}/"
        below = [name for name in pages if name.startswith(folder) and not name.endswith("index.md")]
        entries.append(
            {title.capitalize(): [f"{folder}index.md", *({pages[name]: name} for name in sorted(below))]}
        )
    if remaining:
        sys.exit(f"in no group of the site: {', '.join(remaining)}")
    return entries


def llms_text(texts: Mapping[str, str], titles: Mapping[str, str]) -> str:
    """`llms.txt` (llmstxt.org): what the project is, and every page with a line of its text."""
    lines = ["# audiollm", "", f"> {ABOUT}", "", "## Documents", ""]
    for name, text in texts.items():
        lines.append(
            f"- [{titles[name]}]({name.removesuffix('.md').replace('README', 'index')}.html): {_first_line(text)}"
        )
    return "\n".join(lines) + "\n"


def _first_line(text: str) -> str:
    prose = re.sub(r"```.*?```|<[^>]+>|!\[[^\]]*\]\([^)]*\)", "", text, flags=re.DOTALL)
    paragraphs = [
        line.strip()
        for line in prose.split("\n\n")
        if line.strip() and not line.lstrip().startswith(("#", "|"))
    ]
    words = " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraphs[0] if paragraphs else "").split())
    return words if len(words) <= 160 else f"{words[:157]}..."


if __name__ == "__main__":
    main()
