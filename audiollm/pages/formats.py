"""Numbers as texts, for tables and pages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HOMES = re.compile(r"/(?:home|Users)/[^/\s'\":,;()]+")


def percent(value: float | None, digits: int = 2, missing: str = "n/a") -> str:
    """A share as `12.34 %`, or `missing` for None."""
    return missing if value is None else f"{100 * value:.{digits}f} %"


def percent_or_dash(value: float | None) -> str:
    """A share as `12.3 %`, or a dash for None."""
    return percent(value, 1, "–")


def with_interval(table: Mapping[str, Any], key: str, digits: int = 1) -> str:
    """A share with its interval: `75.0 % (68.2 to 80.9)`."""
    if table[key] is None:
        return "n/a"
    if table.get("low") is None:
        return percent(table[key], digits)
    return (
        f"{percent(table[key], digits)} ({100 * table['low']:.{digits}f} to {100 * table['high']:.{digits}f})"
    )


def format_number(value: float | None, digits: int = 3) -> str:
    """A number with a fixed number of digits after the point, or `n/a` for None."""
    return "n/a" if value is None else f"{value:.{digits}f}"


def decimals(value: object, digits: int = 2) -> str:
    """A number with a fixed number of digits after the point, or a dash for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.{digits}f}".replace("-", "−") if is_number else "–"


def duration(seconds: float) -> str:
    """Seconds as `4.2 s`, `75 s`, `12.3 min` or `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def megabytes(value: float) -> str:
    """MB of 2**20 bytes, as the runner measures them, as decimal `512 MB` or `1.20 GB`."""
    value *= 2**20 / 1e6
    return f"{value / 1000:.2f} GB" if value >= 1000 else f"{value:.0f} MB"


def without_home(text: str) -> str:
    """`text` with the home folders of people written as `~`."""
    home = str(Path.home())
    if len(home) > 1:
        text = re.sub(re.escape(home) + r"(?=[/\s'\":,;()]|$)", "~", text)
    return _HOMES.sub("~", text)


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings as `outer.inner`, which is how they are written on the command line."""
    pairs: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            pairs += flat_settings(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs
