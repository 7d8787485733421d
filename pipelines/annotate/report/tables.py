"""Tables of the corpus: languages, speakers, sound events, formats, and measures put into words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.annotate.report.survey import WORDED, AnnotationSurvey
from pipelines.steps.page.folder import Row, named, value_at
from pipelines.steps.page.numbers import format_value, title_of, unit_of
from pipelines.steps.page.survey import OTHERS_LABEL, Groups, Sum

ROWS_SHOWN = 12
TITLES = {
    "language": "Languages", "speaker": "Speakers", "kind": "Kinds of segments", "text_source": "Origin of the text",
    "split": "Splits", "sample rate": "Sample rates", "channels": "Channels", "format": "Formats",
}  # fmt: skip


def tables_section(survey: AnnotationSurvey, bins: Any) -> Row:
    """The tables that are not empty.

    Args:
        bins: the content of `bins.json`, or None.
    """
    tables = []
    for column in TITLES:
        groups = survey.groups.get(column)
        if groups is not None:
            tables.append(_make_group_table(TITLES[column], groups))
        if column == "speaker" and (survey.events.kept_sums or survey.events.dropped_sums):
            tables.append(_make_group_table("Sound events", survey.events))
    edges = _edges(bins)
    orders = {edge["column"]: edge["words"] for edge in edges}
    worded = [
        _make_group_table(
            name.replace("_", " ").capitalize(),
            survey.groups[name],
            order=orders.get(name.replace("_", " "), ()),
        )
        for name in WORDED
        if name in survey.groups
    ]
    if not (tables or worded):
        return {"absent": "There are no rows to count."}
    return {"tables": tables, "worded": worded, "edges": edges}


def _make_group_table(title: str, groups: Groups, order: Sequence[str] = ()) -> Row:
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
    rows = []
    for name in names[:ROWS_SHOWN]:
        kept_sum, dropped_sum = groups.kept_sums.get(name, nothing), groups.dropped_sums.get(name, nothing)
        rows.append(
            {
                "name": name or "(empty)",
                "segments": kept_sum.segments,
                "seconds": kept_sum.seconds,
                "percent": min(100.0, 100.0 * kept_sum.seconds / max_seconds),
                "dropped": dropped_sum.segments,
            }
        )
    further_sums = [groups.kept_sums.get(name, nothing) for name in names[ROWS_SHOWN:]]
    return {
        "title": title,
        "rows": rows,
        "total": len(names) - (OTHERS_LABEL in names),
        "more": len(further_sums),
        "more_segments": sum(total.segments for total in further_sums),
        "more_seconds": sum(total.seconds for total in further_sums),
    }


def _edges(bins: Any) -> list[Row]:
    """The saved edges with the words between them; entries of another form are skipped."""
    rows = []
    for column, edges in bins.items() if isinstance(bins, Mapping) else ():
        bounds, words = value_at(edges, "edges"), value_at(edges, "names")
        if isinstance(bounds, list) and isinstance(words, list):
            source = named(value_at(edges, "value"))
            rows.append(
                {
                    "column": named(column, 60).replace("_", " "),
                    "source": title_of(source) if source else "",
                    "unit": unit_of(source),
                    "words": [named(word, 60) for word in words],
                    "bounds": [format_value(bound) for bound in bounds],
                }
            )
    return rows
