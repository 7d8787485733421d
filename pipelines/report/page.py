"""`report.html`: one page that needs nothing beside itself, and `summary.json`."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from markupsafe import Markup

from audiollm.files.atomic import write_json
from audiollm.pages.blocks import (
    Content,
    cell,
    configuration,
    element,
    facts,
    heading,
    join,
    note,
    share_bar,
    small,
    table,
)  # fmt: skip
from audiollm.pages.clips import Gallery
from audiollm.pages.formats import duration, flat_settings, megabytes, without_home
from audiollm.pages.page import Page, Section, Tile, build_section
from audiollm.pages.run_record import Row, RunRecord
from audiollm.pages.sections import ReportContext, load_sections
from audiollm.recipe.runner import Context
from pipelines.report.set_aside import set_aside_section
from pipelines.report.settings import ReportConfig
from pipelines.report.summary import seconds_and_memory, summarize_run

TILE_ORDER = (
    "scores",
    "preferences",
    "rewards",
    "policies",
    "interpretations",
    "thoughts",
    "sounds",
    "answers",
)
"""Sections in the order of their figures at the top of the page; others follow."""
PACKAGES = ("audiollm", "torch", "torchaudio", "transformers", "numpy", "librosa", "pocketsphinx")


def write_run_report(config: ReportConfig, context: Context) -> dict[str, Any]:
    """Write both files into the stage's folder; returns the numbers of clips and bytes."""
    started = time.monotonic()
    run = RunRecord(context.recipe, context.results)
    report = ReportContext(run, Gallery(config.players), config.samples)
    sections = build_sections(config.sections, report, context)
    figures = seconds_and_memory(run, context.folder.name, time.monotonic() - started)
    summary = summarize_run(run, *figures)
    path = run_page(report, summary, sections).write(context.folder / "report.html")
    for damaged_path, problem in run.damage.items():
        context.say(f"{damaged_path}: {problem}")
    write_json(context.folder / "summary.json", summary)
    return {"clips": report.gallery.num_clips, "bytes": path.stat().st_size}


def build_sections(names: Sequence[str], report: ReportContext, context: Context) -> list[Section]:
    """The sections of these names that the run has something for, and what was set aside."""
    builders = {**load_sections(names), "set_aside": set_aside_section}
    sections = []
    with context.progress("drawing", len(builders)) as progress:
        for name, builder in builders.items():
            sections.append(build_section(name, partial(builder, report), context.say))
            progress.advance(progress.task_ids[0])
    return [section for section in sections if section is not None]


def run_page(report: ReportContext, summary: Row, sections: Sequence[Section]) -> Page:
    """The page. Whatever comes from a run is escaped."""
    run, silent = report.run, report.gallery.num_silent
    names = [*TILE_ORDER, *(section.name for section in sections)]
    tiles = [
        tile for section in sorted(sections, key=lambda of: names.index(of.name)) for tile in section.tiles
    ]
    return Page(
        "audiollm report",
        run.recipe.name,
        [*sections, Section("run", "Run", _run_content(run, summary), "The run")],
        [*tiles, *_time_tiles(summary)],
        summary["warnings"],
        about=_describe_run(run, summary["failed"]),
        notes=note(f"{silent} clips of this page are without sound, to keep it small.")
        if silent
        else Markup(),
    )


def _describe_run(run: RunRecord, failed: Row | None) -> Markup:
    recipe = run.recipe
    parts = [
        f"recipe {recipe.path.name}",
        f"size {recipe.size}",
        f"seed {recipe.seed}",
        f"{len(recipe.stages)} stages",
    ]
    about = element("p", [element("span", part) for part in parts], class_="about")
    if failed is None:
        return about
    title = element("h2", f"✗ The stage {failed['stage']} failed")
    return join(
        about, element("div", title, element("pre", failed["message"]), class_="failure", role="alert")
    )


def _time_tiles(summary: Mapping[str, Any]) -> list[Tile]:
    seconds, memory = dict(summary["seconds"]), summary["memory_mb"]
    total = seconds.pop("total")
    longest, largest = max(seconds, key=seconds.__getitem__), max(memory, key=memory.__getitem__)
    return [
        Tile(duration(total), "total time", f"longest: {longest}, {duration(seconds[longest])}"),
        Tile(megabytes(summary["peak_memory_mb"]), "peak memory", f"in {largest}"),
    ]


def _run_content(run: RunRecord, summary: Row) -> Markup:
    """Time and memory of the stages, their settings, and versions."""
    about = f"{duration(summary['seconds']['total'])} in all; the memory of this process and its children"
    return join(
        heading("Time and memory", about),
        table(("stage", "time", "peak memory"), _cost_rows(run, summary), "stages"),
        heading("Configuration"),
        configuration(
            (
                [stage.name, [" ", small(stage.stage.kind)] if stage.stage.kind != stage.name else None],
                [(key, _format_setting(run, value)) for key, value in flat_settings(stage.settings())],
            )
            for stage in run.recipe.stages
        ),
        heading("Versions"),
        facts(_versions()),
    )


def _cost_rows(run: RunRecord, summary: Row) -> list[list[Content]]:
    """One row per stage of the recipe: its state, and its seconds and memory beside the largest."""
    seconds, memory = dict(summary["seconds"]), summary["memory_mb"]
    seconds.pop("total")
    longest, largest = max(seconds.values()) or 1.0, max(memory.values()) or 1.0
    rows: list[list[Content]] = []
    for stage in run.recipe.stages:
        name, result = [stage.name, " ", small(stage.stage.help)], run.results.get(stage.name)
        time_s, memory_mb = seconds.get(stage.name), memory.get(stage.name)
        if time_s is None or memory_mb is None:
            state = result.state if result is not None else "not run"
            rows.append([name, cell(state, colspan=2, class_="small")])
            continue
        failed = element("span", "✗ failed", class_="badge") if result and result.state == "failed" else None
        drawn_time = [share_bar(100 * time_s / longest), " ", duration(time_s), failed and [" ", failed]]
        rows.append(
            [name, drawn_time, [share_bar(100 * memory_mb / largest, "second"), " ", megabytes(memory_mb)]]
        )
    return rows


def _format_setting(run: RunRecord, value: Any) -> str:
    if isinstance(value, str):
        return run.shorten_paths(value)
    return without_home(json.dumps(value, ensure_ascii=False))


def _versions() -> list[tuple[str, str]]:
    """Versions and hardware of the run, without host names or paths: the page may be shown to others."""
    from importlib.metadata import PackageNotFoundError, version

    rows = [("Python", platform.python_version()), ("platform", f"{platform.system()} {platform.machine()}")]
    rows.append(("CPU cores", str(os.cpu_count() or "unknown")))
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        rows.append(("GPU", torch.cuda.get_device_name(0)))
    for package in PACKAGES:
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return rows
