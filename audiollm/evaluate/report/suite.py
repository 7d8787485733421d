"""The outcome of a suite: written as a page and as plain data, and printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from markupsafe import Markup
from rich.console import Console
from rich.progress import Progress, TextColumn

from audiollm.evaluate.report.remedies import with_remedy
from audiollm.pages.blocks import (
    definitions,
    element,
    example,
    figure,
    heading,
    join,
    named_clips,
    note,
    reasons_table,
    scrolled,
    table,
)  # fmt: skip
from audiollm.pages.formats import format_number, percent
from audiollm.pages.page import MAX_SOUND_BYTES, Page, Section, Tile
from audiollm.progress import COLUMNS, progress_bar
from audiollm.terminal import print_table

if TYPE_CHECKING:
    from audiollm.pages.clips import Gallery, PageClip

Item = TypeVar("Item")
EXAMPLE_S = 12.0
MAX_TILES = 6
"""Languages or systems with figures of their own at the top of a page."""
MAX_MISSING = 200
"""Missing values that a page lists; results.json counts all reasons, rows.jsonl has every case."""


@dataclass(frozen=True)
class ScoreTable:
    """A table of the page; cells are texts."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def without_empty_columns(self) -> ScoreTable:
        """The table without its empty columns."""
        filled_columns = [
            place for place in range(len(self.headings)) if any(row[place] for row in self.rows)
        ]
        rows = [[row[place] for place in filled_columns] for row in self.rows]
        return ScoreTable(self.title, [self.headings[place] for place in filled_columns], rows, self.note)


@dataclass(frozen=True)
class Sound:
    """A recording, or a span of one, that the page plays."""

    name: str
    path: Path
    start_s: float = 0.0
    end_s: float | None = None


@dataclass(frozen=True)
class Example:
    """A case of the page: named lines of text, a picture, and sounds."""

    title: str
    lines: Sequence[tuple[str, str]] = ()
    sounds: Sequence[Sound] = ()
    picture: str = ""
    """SVG, whose texts are escaped already; empty for none."""


@dataclass(frozen=True)
class SuiteResult:
    """The outcome of a suite."""

    title: str
    about: Sequence[str]
    """Lines under the title: what was judged, by whom, how it is defined."""
    result: Mapping[str, Any]
    """The content of `results.json`."""
    tables: Sequence[ScoreTable]
    examples: Sequence[Example] = ()
    """Cases to listen to, the worst first."""
    missing: Sequence[tuple[str, str]] = ()
    """Cases without a value, and why."""
    rows: Sequence[Mapping[str, Any]] = ()
    """The content of `rows.jsonl`: one row per case, in the order of the list."""
    pictures: Sequence[tuple[str, str]] = ()
    """Title and SVG of each picture; texts of the SVG are escaped already."""
    order: str = "Worst first"
    """Heading of the examples: how they are chosen."""
    tiles: Sequence[Tile] = ()
    """The figures at the top of the page."""


def share_tiles(title: str, table: Mapping[str, Any], key: str = "accuracy") -> list[Tile]:
    """A share with its 95 % interval as a figure at the top of a page; none where the table has no value."""
    if table.get(key) is None:
        return []
    interval = ""
    if table.get("low") is not None:
        interval = f"{percent(table['low'], 1)} to {percent(table['high'], 1)}, "
    return [Tile(percent(table[key], 1), title, f"{interval}n = {table['n']:,}")]


def with_warning(outcome: SuiteResult, warning: str) -> SuiteResult:
    """The outcome with a sentence that whoever reads its figures has to know; the same where there is none."""
    if not warning:
        return outcome
    result = {**outcome.result, "warnings": [*outcome.result.get("warnings", ()), warning]}
    return replace(outcome, about=[*outcome.about, f"Note: {warning}"], result=result)


def conclude(outcome: SuiteResult, out: Path, num_examples: int, console: Console) -> None:
    """Write results.json, rows.jsonl and report.html, print the tables."""
    from audiollm.files.atomic import write_json, write_jsonl

    write_json(out / "results.json", outcome.result)
    write_jsonl(out / "rows.jsonl", ({k: v for k, v in row.items() if k != "key"} for row in outcome.rows))
    for line in outcome.about:
        console.print(line, style="dim", highlight=False, markup=False)
    for scores in outcome.tables:
        filled_table = scores.without_empty_columns()
        print_table(console, filled_table.headings, filled_table.rows, filled_table.title)
        if scores.note:
            console.print(f"  {scores.note}", style="dim", highlight=False, markup=False)
    missing = list(dict.fromkeys(outcome.missing))
    for name, reason in missing[:5]:
        console.print(f"n/a  {name}: {reason}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    if len(missing) > 5:
        console.print(f"n/a  {len(missing) - 5} more: see the report", style="yellow", highlight=False)
    with console.status("writing the report"):
        report = write_page(out / "report.html", outcome, num_examples)
    console.print(f"[bold green]report:[/bold green] {report}", highlight=False, soft_wrap=True)


def write_page(path: Path, outcome: SuiteResult, num_examples: int) -> Path:
    """Write the page of an outcome, self-contained, with the sound of up to `num_examples` cases."""
    from audiollm.pages.clips import Gallery

    gallery = Gallery(most_bytes=MAX_SOUND_BYTES, lossless=True)
    sections = [
        Section("scores", "Scores", join(map(_score_table, outcome.tables), _suite_pictures(outcome)))
    ]
    examples = [_suite_example(example, gallery) for example in outcome.examples[:num_examples]]
    if examples:
        about = note(
            f"The first {EXAMPLE_S:g} s of each, FLAC. {gallery.about_spectrograms(' of each sound')}"
        )
        sections.append(Section("examples", outcome.order, join(about, examples)))
    missing = list(dict.fromkeys(outcome.missing))[:MAX_MISSING]
    if missing:
        reasons = [(name, with_remedy(reason)) for name, reason in missing]
        sections.append(Section("missing", "Without a value", reasons_table("what", reasons)))
    about = join(map(note, outcome.about))
    return Page("audiollm evaluation", outcome.title, sections, outcome.tiles, about=about).write(path)


def _score_table(scores: ScoreTable) -> Markup:
    filled = scores.without_empty_columns()
    below = element("p", filled.note, class_="small note") if filled.note else None
    return join(heading(filled.title), table(filled.headings, filled.rows, "measured"), below)


def _suite_pictures(outcome: SuiteResult) -> list[Markup]:
    return [figure(scrolled(Markup(svg)), title, style="picture") for title, svg in outcome.pictures]


def _suite_example(case: Example, gallery: Gallery) -> Markup:
    return example(
        case.title,
        definitions(case.lines, "steps"),
        case.picture and scrolled(Markup(case.picture)),
        named_clips([(sound.name, _load_page_clip(sound, gallery)) for sound in case.sounds], case.title),
    )


def metric_cells(table: Mapping[str, Any], digits: int = 3) -> list[str]:
    """The cells of a `statistics.metric_table`: mean, median, n and the number of missing values."""
    return [
        format_number(table["mean"], digits),
        format_number(table["median"], digits),
        str(table["n"]),
        not_available(table),
    ]


def not_available(table: Mapping[str, Any]) -> str:
    """The number of missing values as text; empty where it is 0."""
    return str(table["not_available"] or "")


def reasons_of(tables: Iterable[Mapping[str, Any]]) -> str:
    """The most frequent reasons for missing values, for a note."""
    counts: dict[str, int] = {}
    for metric in tables:
        for reason, count in metric["reasons"].items():
            counts[reason] = counts.get(reason, 0) + count
    frequent_reasons = sorted(counts.items(), key=lambda item: -item[1])
    text = "; ".join(f"{count} × {with_remedy(reason)}" for reason, count in frequent_reasons[:4]) + (
        "; ..." if len(frequent_reasons) > 4 else ""
    )
    return f"n/a: {text}." if text else ""


def spread_items(items: Sequence[Item], limit: int | None) -> list[Item]:
    """At most `limit` items, evenly over the list."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[index * len(items) // limit] for index in range(limit)]


@contextmanager
def bar(console: Console, description: str, total: int) -> Iterator[Progress]:
    """A progress bar with one task; its field `what` names the last finished case."""
    columns = (*COLUMNS, TextColumn("[dim]{task.fields[what]}"))
    with progress_bar(console, description, total, columns, what="") as progress:
        yield progress


def step(progress: Progress, what: str) -> None:
    """Advance a progress bar by one case, and show its name."""
    progress.update(progress.task_ids[0], advance=1, what=what.replace("[", "("))


def _load_page_clip(sound: Sound, gallery: Gallery) -> PageClip:
    end_s = sound.start_s + EXAMPLE_S
    return gallery.clip(sound.path, sound.start_s, end_s if sound.end_s is None else min(end_s, sound.end_s))
