"""Tables of the corpus: languages, speakers, sound events, formats, and measures put into words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from audiollm.pages.blocks import (
    Content,
    bold,
    details,
    element,
    heading,
    isolated,
    join,
    note,
    notice,
    share_bar,
    small,
    table,
)
from audiollm.pages.formats import duration
from audiollm.pages.page import Section
from pipelines.annotate.report.survey import WORDED, AnnotationSurvey
from pipelines.steps.page.folder import named, value_at
from pipelines.steps.page.numbers import format_value, title_of, unit_of
from pipelines.steps.page.survey import OTHERS_LABEL, Groups, Sum

ROWS_SHOWN = 12
TITLES = {
    "language": "Languages", "speaker": "Speakers", "kind": "Kinds of segments", "text_source": "Origin of the text",
    "split": "Splits", "sample rate": "Sample rates", "channels": "Channels", "format": "Formats",
}  # fmt: skip


@dataclass(frozen=True)
class WordEdges:
    """The edges between the words of a column."""

    column: str
    source: str
    """Path of the measured value."""
    words: list[str]
    bounds: list[str]


def tables_section(survey: AnnotationSurvey, bins: Any) -> Section:
    """The tables that are not empty.

    Args:
        bins: the content of `bins.json`, or None.
    """
    tables = []
    for column, title in TITLES.items():
        if column in survey.groups:
            tables.append(_group_table(title, survey.groups[column]))
        if column == "speaker" and (survey.events.kept_sums or survey.events.dropped_sums):
            tables.append(_group_table("Sound events", survey.events))
    edges = _read_edges(bins)
    orders = {of.column: of.words for of in edges}
    names = {name: name.replace("_", " ") for name in WORDED if name in survey.groups}
    worded = [
        _group_table(words.capitalize(), survey.groups[name], orders.get(words, ()))
        for name, words in names.items()
    ]
    content = join(
        element("div", tables, class_="tables"),
        [heading("Measures put into words"), element("div", worded, class_="tables")] if worded else None,
        details(f"The edges between the words ({len(edges)})", map(_edge_line, edges)) if edges else None,
    )
    if not (tables or worded):
        content = notice("There are no rows to count.")
    return Section("tables", "Contents", content, "What is in it")


def _group_table(title: str, groups: Groups, order: Sequence[str] = ()) -> Markup:
    """The groups with the most seconds, kept ones first, and the number of further groups.

    Args:
        order: of the groups, where they have one (from very low to very high).
    """
    nothing, places = Sum(), {name: place for place, name in enumerate(order)}
    names = sorted(
        groups.kept_sums.keys() | groups.dropped_sums.keys(),
        key=lambda name: (
            name == OTHERS_LABEL,
            places.get(name, len(places)),
            -groups.kept_sums.get(name, nothing).seconds,
            -groups.dropped_sums.get(name, nothing).seconds,
            name,
        ),
    )
    max_seconds = max((total.seconds for total in groups.kept_sums.values()), default=0.0) or 1.0
    rows: list[list[Content]] = []
    for name in names[:ROWS_SHOWN]:
        kept_sum, dropped_sum = groups.kept_sums.get(name, nothing), groups.dropped_sums.get(name, nothing)
        rows.append(
            [
                isolated(name or "(empty)"),
                share_bar(min(100.0, 100.0 * kept_sum.seconds / max_seconds)),
                duration(kept_sum.seconds) if kept_sum.segments else "",
                f"{kept_sum.segments:,}",
                f"{dropped_sum.segments:,}" if dropped_sum.segments else "",
            ]
        )
    further_sums = [groups.kept_sums.get(name, nothing) for name in names[ROWS_SHOWN:]]
    segments, seconds = sum(of.segments for of in further_sums), sum(of.seconds for of in further_sums)
    more = f"And {len(further_sums):,} more, with {segments:,} kept segments, {duration(seconds)}."
    return element(
        "div",
        heading(title, f"{len(names) - (OTHERS_LABEL in names):,}"),
        table(("", "", "time", "kept", "dropped"), rows, ""),
        note(more) if further_sums else None,
        class_="card",
    )


def _read_edges(bins: Any) -> list[WordEdges]:
    """The saved edges with the words between them; entries of another form are skipped."""
    listed = []
    for column, edges in bins.items() if isinstance(bins, Mapping) else ():
        bounds, words = value_at(edges, "edges"), value_at(edges, "names")
        if isinstance(bounds, list) and isinstance(words, list):
            listed.append(
                WordEdges(
                    named(column, 60).replace("_", " "),
                    named(value_at(edges, "value")),
                    [named(word, 60) for word in words],
                    [format_value(bound) for bound in bounds],
                )
            )
    return listed


def _edge_line(edges: WordEdges) -> Markup:
    """Words with the edges between them."""
    line: list[Content] = []
    for place, word in enumerate(edges.words):
        line.append(bold(word))
        if place < len(edges.bounds) and place < len(edges.words) - 1:
            line.append(small(f"{edges.bounds[place]} {unit_of(edges.source)}"))
    by = f", by {title_of(edges.source)}" if edges.source else ""
    return element("p", small(f"{edges.column}{by}:"), line, class_="edges")
