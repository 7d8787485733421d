"""Parts of the sections on training: facts, charts from `metrics.jsonl`, alarms, and an even choice of a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from pipelines.report.figures import Series, curve_chart, series_of
from pipelines.report.material import Row, Trace


def facts_of(figures: Row, *fact_formats: tuple[str, str, Callable[[Any], str]]) -> list[tuple[str, str]]:
    """Title and text of each known figure (key, title, format) that is present and of the expected type."""
    facts = []
    for key, title, show in fact_formats:
        if figures.get(key) is not None:
            with suppress(TypeError, ValueError):
                facts.append((title, show(figures[key])))
    return facts


def chart_of(rows: Sequence[Row], title: str, y_label: str, key: str) -> Row:
    """The training values of `key` and, where there are any, those on held-out data."""
    series = [series_of(rows, key, "training"), series_of(rows, f"evaluation/{key}", "held out", dotted=True)]
    return draw_chart(title, y_label, series)


def draw_chart(title: str, y_label: str, series: Sequence[Series], legend_title: str = "") -> Row:
    """A chart with its title; without a point its `svg` is None."""
    svg = curve_chart(series, y_label, f"{title} over the training steps", legend_title)
    return {"title": title, "svg": svg}


def alarms_of(stage: Trace) -> list[tuple[int, str, str]]:
    """Step, kind and text of each alarm of the training."""
    rows = stage.rows("alarms.jsonl")
    complete_rows = [row for row in rows if isinstance(row.get("step"), int)]
    return [(row["step"], str(row.get("kind")), str(row.get("text"))) for row in complete_rows]


def spread_places(count: int, max_places: int) -> list[int]:
    """At most `max_places` indices of a list of `count`: the first, the last, and evenly between."""
    num_places = min(count, max_places)
    return [round(number * (count - 1) / max(1, num_places - 1)) for number in range(num_places)]
