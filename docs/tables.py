"""Writes the tables of objectives, rewards, steps and stages into the documents, from the catalogues of the code.

    make docs-tables

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`, the text of a module between
`<!-- module: PATH -->` and `<!-- end of module -->`; what is between them is replaced.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from audiollm.commands.run import type_name, yaml_text
from audiollm.recipe.other_names import NOT_NEEDED, OUR_NAMES
from audiollm.recipe.stages import Stage, stage_entry_points
from audiollm.rl.objectives.catalog import CATALOG as OBJECTIVES
from audiollm.rl.policy_gradient.catalog import ADVANTAGES, KL_CONTROLLERS, POLICY_OBJECTIVES
from audiollm.rl.rewards.catalog import CATALOG as REWARDS
from pipelines.annotate.execution.chain import STEPS
from pipelines.soundscapes.questions import KINDS

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
MODULE = re.compile(r"(<!-- module: (\S+) -->\n).*?(<!-- end of module -->)", re.DOTALL)
MAX_DEFAULT_LENGTH = 40
"""Longer defaults are left to `audiollm run --help-stage`."""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; bars within cells are escaped."""
    lines = [list(header), ["---"] * len(header)]
    lines += [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def first_sentence(documented: Any) -> str:
    """The first sentence of a docstring, without its point."""
    paragraph = " ".join((documented.__doc__ or "").split("\n\n")[0].split())
    return re.split(r"\.(?: (?=[A-Z])|$)", paragraph)[0]


def settings_of(model: type[BaseModel], without: Iterable[str] = ()) -> str:
    """`name` = default of each setting; a required one has no default."""
    cells = []
    for name, field in model.model_fields.items():
        if name in without:
            continue
        default = field.get_default(call_default_factory=True)
        text = "" if default is PydanticUndefined else yaml_text(default)
        is_long = len(text) > MAX_DEFAULT_LENGTH
        cells.append(f"`{name}`" if field.is_required() or is_long else f"`{name}: {text}`")
    return ", ".join(cells)


def objectives() -> str:
    """Preference objectives and losses of reward models."""
    functions = import_module("audiollm.rl.objectives.registry").OBJECTIVES
    shared = ("ld_alpha", "ld_reference", "policy_weighting", "f_divergence", "f_alpha")
    rows = []
    for name, entry in OBJECTIVES.items():
        reads = {"log_probs": "", "scores": "scores", "step_scores": "scores of steps"}[entry.reads]
        needs = [*([reads] if reads else ["reference"] if entry.needs_reference else [])]
        needs += [f"`{field}`" for field in (*entry.fields, *entry.figures)]
        rows.append(
            (
                f"`{name}`",
                first_sentence(functions[name]),
                ", ".join(entry.groups),
                ", ".join(needs),
                settings_of(entry.settings, without=shared),
            )
        )
    return markdown(("name", "loss per item", "takes", "needs", "settings"), rows)


def rewards() -> str:
    """Built-in rewards."""
    rows = []
    for name, entry in REWARDS.items():
        scored = "speech" if entry.speech else "text" if entry.words else "text and speech"
        needs = ["the right answer"] if entry.key else []
        needs += [f"`{entry.folder}`"] if entry.folder else []
        rows.append((f"`{name}`", scored, ", ".join(needs), settings_of(entry.settings)))
    return markdown(("reward", "scores", "needs", "settings"), rows)


def advantages() -> str:
    rows = [
        (f"`{name}`", ", ".join(f"`{field}`" for field in entry.reads), settings_of(entry.settings))
        for name, entry in ADVANTAGES.items()
    ]
    return markdown(("advantage", "reads", "settings"), rows)


def named_settings(title: str, catalog: Mapping[str, type[BaseModel]]) -> str:
    rows = [(f"`{name}`", settings_of(settings)) for name, settings in catalog.items()]
    return markdown((title, "settings"), rows)


def annotation_steps() -> str:
    """Steps of `annotate` in their order."""
    rows = []
    for name in STEPS.built_in:
        step_class = STEPS.step_class(name)
        rows.append((f"`{name}`", first_sentence(step_class), settings_of(step_class.settings)))
    return markdown(("step", "subject", "settings"), rows)


def question_kinds() -> str:
    """Kinds of questions of `compose_soundscapes`."""
    rows = [(f"`{name}`", kind.domain, kind.question, kind.options) for name, kind in KINDS.items()]
    return markdown(("kind", "domain", "question", "options"), rows)


def stages() -> str:
    """All stages with their settings."""
    kinds = stage_entry_points()
    return "\n" + "\n".join(stage_page(kind, kinds[kind].load()) for kind in sorted(kinds)) + "\n"


def stage_page(kind: str, stage: Stage) -> str:
    """A stage with its settings."""
    rows = []
    for name, field in stage.config.model_fields.items():
        default = field.get_default(call_default_factory=True)
        text = "required" if field.is_required() else f"`{yaml_text(default)}`"
        default_text = text if len(text) <= 2 * MAX_DEFAULT_LENGTH else "see `--help-stage`"
        description = (field.description or "").split("\n\n")[0]
        rows.append((f"`{name}`", f"`{type_name(field.annotation)}`", default_text, description))
    makes = ", ".join(f"`{name}`" for name in stage.artifacts)
    heading = f"### {kind}\n\n{stage.help}. Artifacts: {makes or 'none'}.\n\n"
    return heading + markdown(("setting", "type", "default", "meaning"), rows)


def other_names() -> str:
    """Settings of other projects with ours."""
    rows = [
        (f"`{name}`", " or ".join(f"`{ours}`" for ours in names) or NOT_NEEDED.get(name, ""))
        for name, names in OUR_NAMES.items()
    ]
    return markdown(("there", "here"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "objectives": objectives,
    "rewards": rewards,
    "advantages": advantages,
    "policy objectives": lambda: named_settings("objective", POLICY_OBJECTIVES),
    "KL controllers": lambda: named_settings("controller", KL_CONTROLLERS),
    "annotation steps": annotation_steps,
    "question kinds": question_kinds,
    "stages": stages,
    "other names": other_names,
}


def with_tables(text: str) -> str:
    """The document with its tables as the catalogues have them now, and with the modules that it shows."""
    text = MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)
    return MODULE.sub(lambda match: f"{match[1]}```python\n{module_text(match[2])}```\n{match[3]}", text)


def module_text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def marked_documents() -> list[Path]:
    """Documents of the repository that hold a generated table or a module's text."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    paths = [ROOT / name for name in names if (ROOT / name).is_file()]
    return [
        path
        for path in paths
        if any(marks.search(path.read_text(encoding="utf-8")) for marks in (MARKED, MODULE))
    ]


def main() -> None:
    """Write the tables; `--check` says which are stale, and fails where there are any."""
    only_checks = "--check" in sys.argv[1:]
    texts = {path: path.read_text(encoding="utf-8") for path in marked_documents()}
    stale = [path for path, text in texts.items() if with_tables(text) != text]
    for path in stale:
        if not only_checks:
            path.write_text(with_tables(texts[path]), encoding="utf-8")
        print(f"{'stale: run make docs-tables' if only_checks else 'written'}: {path.relative_to(ROOT)}")
    used = {name for text in texts.values() for _, name in re.findall(r"(<!-- table: ([\w ]+) -->)", text)}
    if unused := sorted(TABLES.keys() - used):
        sys.exit(f"in no document: the tables {', '.join(unused)}")
    sys.exit(1 if stale and only_checks else 0)


if __name__ == "__main__":
    main()
