"""The sections of the page of a run: each stands beside its stage and is found by its name, or at an import path."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import chain

from audiollm.pages.clips import Gallery
from audiollm.pages.page import Section
from audiollm.pages.run_record import RunRecord, StageRecord
from audiollm.recipe.plug_ins import Catalog, documented, import_named

GROUP = "audiollm.sections"
ALL = "all"
"""Stands for all sections in the list of a recipe."""
ORDER = (
    "recordings", "tokenizer", "training", "preferences", "rewards", "policies", "interpretations", "thoughts",
    "answers", "samples", "sounds", "scores",
)  # fmt: skip
"""Our sections in their order."""
REMEDY = "give a function from a ReportContext to a Section: see docs/extending.md"


@dataclass(frozen=True)
class ReportContext:
    """The run that a section shows, and the clips of the page."""

    run: RunRecord
    gallery: Gallery
    samples: int = 24
    """Generated samples shown, over all stages."""

    def stages(self, *kinds: str) -> list[StageRecord]:
        """All stages of these kinds, in the order of the recipe."""
        return self.run.stages(*kinds)


SectionBuilder = Callable[[ReportContext], Section | None]
"""A section; None where the run has no stage that it is about."""


def section_names() -> list[str]:
    """Names of the sections that installed packages have: ours in the order of the page, then others."""
    names = {entry.name for entry in entry_points(group=GROUP)}
    return [*(name for name in ORDER if name in names), *sorted(names - set(ORDER))]


def load_sections(names: Iterable[str]) -> dict[str, SectionBuilder]:
    """The functions at names of sections, `all` among them, or at `package.module:name`.

    Raises:
        ConfigError: a function of a user's own cannot be imported.
    """
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    listed = chain.from_iterable(section_names() if name == ALL else [name] for name in names)
    return {name: entries[name].load() if name in entries else import_named(name, REMEDY) for name in listed}


def section_catalog() -> Catalog:
    """Sections of the page of a run."""
    own = "Your own: `sections: [all, package.module:name]` of the stage `report`, or entry point audiollm.sections."
    return Catalog(documented(load_sections([ALL])), own)
