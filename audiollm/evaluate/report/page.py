"""Pages as self-contained HTML: templates, filled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_SOUND_BYTES = 16_000_000
"""Bytes of encoded sound after which a page takes no more."""
Filters = Mapping[str, Callable[..., Any]]
_NO_FILTERS: Filters = {}


def render_template(
    template: str, *, folders: Sequence[Path] = (), filters: Filters = _NO_FILTERS, **values: Any
) -> str:
    """A template, filled; texts are escaped.

    Args:
        folders: where templates are looked for before those of this package.
        filters: functions that the template applies to values, by name.
    """
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FileSystemLoader([*folders, Path(__file__).parent]),
    )
    environment.filters |= filters
    return environment.get_template(template).render(**values).strip() + "\n"
