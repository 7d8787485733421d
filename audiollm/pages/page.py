"""A page: one self-contained HTML file of figures, warnings and sections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from audiollm.files.atomic import write_text
from audiollm.pages.blocks import notice
from audiollm.pages.formats import without_home

MAX_SOUND_BYTES = 16_000_000
"""Bytes of encoded sound after which a page takes no more."""


class Tile(NamedTuple):
    """A figure at the top of a page: its value, its title, and how sure it is or on how much it is."""

    value: str
    title: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a page that its bar links to."""

    name: str
    """Its address on the page, and its name in a registry."""
    title: str
    """Its name in the bar, and above it where it has no `heading`."""
    content: Markup
    """Blocks, joined; see `audiollm.pages.blocks`."""
    heading: str = ""
    tiles: Sequence[Tile] = ()
    """Figures that it gives to the top of the page."""


@dataclass(frozen=True)
class Page:
    """Texts are escaped; `about`, `notes` and sections are made of blocks."""

    kind: str
    """The kind of page, above its name."""
    name: str
    sections: Sequence[Section]
    tiles: Sequence[Tile] = ()
    warnings: Sequence[Mapping[str, Any]] = ()
    """`stage` and `text` of each."""
    about: Markup | None = None
    """Below the name."""
    notes: Markup | None = None
    """Below the tiles."""

    def html(self) -> str:
        """The page as text."""
        import jinja2

        environment = jinja2.Environment(
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            loader=jinja2.FileSystemLoader(Path(__file__).parent),
        )
        return environment.get_template("frame.html").render(page=self).strip() + "\n"

    def write(self, path: Path) -> Path:
        """Write the page; letters that are none in UTF-8 (halves of surrogate pairs) are written as their numbers."""
        write_text(path, self.html().encode("utf-8", "backslashreplace").decode())
        return path


def build_section(
    name: str, build: Callable[[], Section | None], say: Callable[[str], None] = lambda text: None
) -> Section | None:
    """A section, or the reason why it failed: a page with a gap is worth more than none.

    Args:
        name: of the section, or where its function is.
        say: is told of a section that failed.
    """
    try:
        return build()
    except Exception as error:
        problem = without_home(f"{type(error).__name__}: {error}")
        say(f"the report's section {name} could not be made: {problem}")
        short_name = name.rpartition(":")[2]
        title = short_name.replace("_", " ").capitalize()
        return Section(short_name, title, notice(f"This section could not be made: {problem}"))
