"""How numbers look on the page."""

from __future__ import annotations


def percent_or_dash(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def megabytes(value: float) -> str:
    """From MB of 2**20 bytes, as the runner measures them."""
    value *= 2**20 / 1e6
    return f"{value / 1000:.2f} GB" if value >= 1000 else f"{value:.0f} MB"
