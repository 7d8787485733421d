"""The page of a pipeline of steps: sections from the files of its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from audiollm.pages.clips import Gallery, PageClip
from audiollm.pages.formats import without_home
from audiollm.pages.page import Page, Section, build_section
from pipelines.steps.page.folder import Folder, Row, named
from pipelines.steps.page.funnel import headline_figures


def write_step_page(
    folder: Path,
    kind: str,
    builders: Mapping[str, Callable[[], Section]],
    figures: tuple[Row, Row, str],
    warnings: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write `report.html` into the folder of a run; a section that fails leaves a gap that says so.

    Args:
        kind: of the run: `annotation`.
        figures: counts, timings and the unit of the figures at the top.
    """
    sections = [build_section(name, build) for name, build in builders.items()]
    try:
        tiles = headline_figures(*figures)
    except Exception:  # a damaged file: its section says so
        tiles = []
    name = named(folder.resolve().name) or kind
    shown = [section for section in sections if section is not None]
    return Page(f"audiollm {kind}", name, shown, tiles, warnings).write(folder / "report.html")


def file_clip(path: str, name: str, start_s: float, end_s: float | None, gallery: Gallery) -> PageClip:
    """A sound, read from a plain file only: reading a device or a pipe might never end."""
    try:
        if not path or not Path(path).is_file():
            return PageClip(problem=f"{name}: no such file" if path else "the row has no path")
        return gallery.clip(Path(path), max(0.0, start_s), end_s)
    except Exception as error:  # whatever a decoder does with a damaged file, the other clips are shown
        return PageClip(problem=named(without_home(f"{name}: {type(error).__name__}: {error}")))


def read_timings(folder: Folder) -> Row:
    """The content of `timings.json`; empty where there is none."""
    timings = folder.json("timings.json")
    return timings if isinstance(timings, dict) else {}
