"""The section on all that the stages of a run set aside: how much of what each had, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from audiollm.files.set_aside import TEXTS
from audiollm.pages.blocks import Content, cell, element, heading, isolated, join, note, notice, small, table
from audiollm.pages.page import Section
from audiollm.pages.run_record import Row, RunRecord, StageRecord
from audiollm.pages.sections import ReportContext
from pipelines.steps.page.folder import clean_text

FILES = "set_aside*.jsonl"
"""The first rank of a training writes `set_aside.jsonl`, the others `set_aside-RANK.jsonl`."""
COUNTED = (
    "samples", "sequences", "segments", "streams", "questions", "clips", "scenes", "talks", "sounds", "edits",
)  # fmt: skip
"""Figures of stages that say beside how many something was set aside: the first that a stage has."""
MAX_REASONS = 20
MAX_EXAMPLES = 2
MAX_EXAMPLE_CHARACTERS = 300

RowKey = tuple[str, ...]


def set_aside_section(context: ReportContext) -> Section | None:
    """A part for each stage that set something aside, with a table of reasons, most frequent first.

    A row that a stage took over from the stage before it (`compose` begins its list with that of `annotate`) is counted
    once, there. None where no stage has set anything aside.
    """
    run = context.run
    rows_by_stage: dict[str, dict[RowKey, Row]] = {}
    parts = []
    for stage in run.stages(*(stage.stage.kind for stage in run.recipe.stages)):
        rows = rows_by_stage[stage.name] = _read_set_aside_files(stage)
        earlier = {key for name in stage.upstream for key in rows_by_stage.get(name, ())}
        parts.append(_stage_part(run, stage, [row for key, row in rows.items() if key not in earlier]))
    content = join(parts)
    return Section("set_aside", "Set aside", content, "What was set aside, and why") if content else None


def _read_set_aside_files(stage: StageRecord) -> dict[RowKey, Row]:
    files = sorted(path.name for path in stage.folder.glob(FILES))
    return {tuple(str(row.get(key)) for key in TEXTS): row for name in files for row in stage.rows(name)}


def _stage_part(run: RunRecord, stage: StageRecord, rows: Sequence[Row]) -> Content:
    """Nothing where there are no rows and no file is damaged."""
    damage = [
        notice(f"{run.shorten_paths(path)}: {problem}")
        for path, problem in run.damage.items()
        if path.parent == stage.folder and path.match(FILES)
    ]
    if not (rows or damage):
        return None
    by_reason: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        by_reason[clean_text(row.get("kind")) or "no reason given", clean_text(row.get("stage"))].append(row)
    ranked = sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    folders = _annotated_folders(run)
    files = ", ".join(run.shorten_paths(path) for path in sorted(stage.folder.glob(FILES)))
    listed = [
        (
            [kind, by != stage.kind and [" ", small(by)]],
            f"{len(alike):,}",
            cell([_show_example(run, row, folders) for row in alike[:MAX_EXAMPLES]], class_="file"),
        )
        for (kind, by), alike in ranked[:MAX_REASONS]
    ]
    num_more = len(ranked) - len(listed)
    more = f"And {num_more:,} more reasons. " if num_more else ""
    return [
        heading(stage.name, _count_sentence(len(rows), stage.figures or {})),
        damage,
        rows and table(("reason", "count", "examples"), listed, "list", has_row_headings=False),
        note(f"{more}Every one is in {files}."),
    ]


def _count_sentence(count: int, figures: Mapping[str, Any]) -> str:
    counts = dict(figures)
    if "train_samples" in figures:
        counts["samples"] = figures["train_samples"] + figures.get("test_samples", 0)
    beside = next(
        (f", beside {counts[name]:,} {name}" for name in COUNTED if isinstance(counts.get(name), int)), ""
    )
    return f"{count:,} set aside{beside}"


def _annotated_folders(run: RunRecord) -> list[str]:
    """The folders of recordings that were given, each with a `/` at its end."""
    results = [stage.result for stage in run.stages("annotate")]
    return [f"{result.settings.get('input')}/" for result in results if result is not None]


def _show_example(run: RunRecord, row: Row, folders: Sequence[str]) -> Markup:
    """Where it is, its id, and what is wrong with it beyond the few words that are counted."""
    place, id, kind, reason = (str(row.get(key, "")) for key in ("place", "id", "kind", "reason"))
    folder = next((folder for folder in folders if place.startswith(folder)), "")
    place = clean_text(run.shorten_paths(place.removeprefix(folder)), MAX_EXAMPLE_CHARACTERS)
    particulars = clean_text(run.shorten_paths(reason), MAX_EXAMPLE_CHARACTERS) if reason != kind else ""
    shown_id = id if id not in place else ""
    return element("div", isolated(place), [[" ", small(text)] for text in (shown_id, particulars) if text])
