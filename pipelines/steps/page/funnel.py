"""The top of the page: hours in and out, and the funnel from files over seconds to segments, with every reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from audiollm.pages.blocks import (
    Content,
    bold,
    cell,
    configuration,
    counted_reasons,
    details,
    element,
    facts,
    heading,
    isolated,
    join,
    note,
    notice,
    paragraph,
    set_aside_table,
    share_bar,
    small,
    table,
)  # fmt: skip
from audiollm.pages.formats import duration, flat_settings, percent_or_dash, without_home
from audiollm.pages.page import Section, Tile
from pipelines.steps.page.folder import (
    Folder,
    Row,
    clean_text,
    file_name,
    finite_number,
    named,
    value_at,
)
from pipelines.steps.page.numbers import Comparison, format_value
from pipelines.steps.page.survey import PartSurvey

FILES_SHOWN = 200
FEW_FILES = 12
"""So many filtered files are shown without a click."""
ASIDE_SHOWN = 100
_SECONDS = {
    "seconds_seen": "came in",
    "seconds_speech": "speech found",
    "seconds_found": "in {unit} found",
    "seconds": "kept",
}
_STATES = ("kept", "filtered", "failed")


@dataclass
class Files:
    """The content of `files.jsonl` and `set_aside.jsonl`."""

    counts: dict[str, int] = field(default_factory=dict)
    """Numbers of files by status."""
    seconds: float = 0.0
    failed: list[list[Content]] = field(default_factory=list)
    filtered: list[list[Content]] = field(default_factory=list)
    """Names and reasons, at most `FILES_SHOWN` of each."""
    not_whole: list[list[Content]] = field(default_factory=list)
    """Files whose length differs from their headers, at most `FILES_SHOWN`."""
    num_not_whole: int = 0
    aside: list[Row] = field(default_factory=list)
    aside_kinds: dict[str, int] = field(default_factory=dict)

    @property
    def more(self) -> dict[str, int]:
        """Rows of each list that are not shown."""
        listed = {"failed": self.failed, "filtered": self.filtered}
        more = {status: self.counts.get(status, 0) - len(rows) for status, rows in listed.items()}
        more["not_whole"] = self.num_not_whole - len(self.not_whole)
        return more | {"aside": sum(self.aside_kinds.values()) - len(self.aside)}


def read_files(folder: Folder) -> Files:
    """Read both lists, line by line."""
    files = Files()
    for row in folder.rows("files.jsonl"):
        status = named(row.get("status")) if row.get("status") in _STATES else "unknown"
        files.counts[status] = files.counts.get(status, 0) + 1
        files.seconds += finite_number(row.get("duration_s")) or 0.0
        if row.get("length"):
            files.num_not_whole += 1
            if len(files.not_whole) < FILES_SHOWN:
                files.not_whole.append(_list_file(row, "length"))
        rows = {"failed": files.failed, "filtered": files.filtered}.get(status)
        if rows is not None and len(rows) < FILES_SHOWN:
            rows.append(_list_file(row, "reason"))
    for row in folder.rows("set_aside.jsonl"):
        kind = named(row.get("kind") or "", 120)
        if kind in files.aside_kinds or len(files.aside_kinds) < FILES_SHOWN:
            files.aside_kinds[kind] = files.aside_kinds.get(kind, 0) + 1
        if len(files.aside) < ASIDE_SHOWN:
            texts = {
                key: named(without_home(str(row.get(key) or "")))
                for key in ("place", "id", "reason", "stage")
            }
            reason = texts["reason"] if texts["reason"] != kind else ""
            files.aside.append({**texts, "kind": kind, "reason": reason})
    return files


def _list_file(row: Row, key: str) -> list[Content]:
    """A file of `files.jsonl` in a list of the page, with the text under `key` as its reason."""
    reason = clean_text(without_home(str(row.get(key) or "")), 300)
    duration_s = finite_number(row.get("duration_s"))
    length = "" if duration_s is None else duration(duration_s)
    return [cell(isolated(file_name(row)), class_="file"), length, reason]


def read_counts(
    folder: Folder, files: Files, survey: PartSurvey, rules: list[Comparison], kept_rows: str
) -> tuple[Row, bool]:
    """The content of `funnel.json`, completed by counts of the rows; and whether the file exists.

    Args:
        kept_rows: name of the file of the kept parts.
    """
    content = folder.json("funnel.json")
    recorded = (
        {key: value for key, value in content.items() if value is not None}
        if isinstance(content, dict)
        else {}
    )
    counted: Row = {}
    if folder.has(kept_rows):
        counted |= {"segments": survey.kept_sum.segments, "seconds": survey.kept_sum.seconds}
    if folder.has("filtered.jsonl"):
        counted["segments_found"] = survey.kept_sum.segments + survey.dropped_sum.segments
        counted["stages"] = _counted_stages(survey, rules)
        counted["reasons"] = {
            title: sum(r.dropped.segments for r in survey.reasons.values() if r.title == title)
            for title in sorted({reason.title for reason in survey.reasons.values()})
        }
    elif files.aside_kinds:
        counted["reasons"] = dict(files.aside_kinds)
    if files.counts:
        counted |= {
            f"files_{status}": files.counts.get(status, 0) for status in ("kept", "filtered", "failed")
        }
        counted |= {"files_seen": sum(files.counts.values()), "seconds_seen": files.seconds}
    return counted | recorded, bool(recorded)


def headline_figures(counts: Row, timings: Row, unit: str) -> list[Tile]:
    """The big figures: hours in, hours kept, files, segments, cost and wall time; those that are known."""
    seen_s, kept_s = finite_number(counts.get("seconds_seen")), finite_number(counts.get("seconds"))
    tiles = []
    if kept_s is not None:
        share = percent_or_dash(kept_s / seen_s) if seen_s else ""
        tiles.append(Tile(duration(kept_s), "kept", f"{share} of what came in" if share else "of audio"))
    if seen_s is not None:
        found_s = finite_number(counts.get("seconds_found"))
        note = f"{duration(found_s)} of it in {unit}" if found_s is not None else "of audio"
        tiles.append(Tile(duration(seen_s), "came in", note))
    if counts.get("files_kept") is not None:
        parts = [f"{count_of(counts, f'files_{status}'):,} {status}" for status in ("filtered", "failed")]
        tiles.append(Tile(f"{count_of(counts, 'files_kept'):,}", "files kept", ", ".join(parts)))
    if counts.get("segments") is not None:
        of = counts.get("segments_found")
        note = f"of {count_of(counts, 'segments_found'):,} found" if of is not None else f"in {unit}.jsonl"
        tiles.append(Tile(f"{count_of(counts, 'segments'):,}", f"{unit} kept", note))
    return tiles + _cost_tiles(timings)


def funnel_section(
    folder: Folder, files: Files, counts: Row, is_given: bool, unit: str, beside: Content = None
) -> Section:
    """Bars of files, of seconds and of segments; reasons; thresholds that were not applied.

    Args:
        beside: what follows the reasons.
    """
    groups = [_file_bars(counts), _second_bars(counts, unit), _part_bars(counts, unit)]
    groups = [group for group in groups if group is not None]
    duplicates = [("duplicates", f"{count_of(counts, 'duplicates'):,}")] if counts.get("duplicates") else []
    reasons, errors = ranked(counts.get("reasons")), ranked(counts.get("errors"))
    not_applied = [_not_applied(row) for row in folder.objects("not_applied.json")]
    content = join(
        None if is_given else notice("There is no funnel.json: these figures are counted from the rows."),
        None if groups else notice("There is nothing to count: no funnel.json, no rows and no files.jsonl."),
        element("div", groups, class_="bars"),
        facts(duplicates),
        reason_list("Set aside, by reason", reasons),
        beside,
        reason_list("Values that could not be had", errors, "of segments that were kept, by step"),
        [heading("Thresholds that were not applied"), not_applied] if not_applied else None,
    )
    return Section("funnel", "Funnel", content, "What came in, what was kept")


def reason_list(title: str, pairs: Sequence[tuple[str, int]], about: str = "") -> Markup | None:
    """Counts by reason below their heading; None without any."""
    return join(heading(title, about), counted_reasons(pairs)) if pairs else None


def _not_applied(row: Row) -> Markup:
    scorer = named(row.get("scorer"))
    reason = clean_text(without_home(str(row.get("reason") or "")), 300) or "it was not measured"
    about = f" ({format_value(row.get('value'))}): {reason}"
    return notice(bold(named(row.get("threshold"))), about, [" ", small(scorer)] if scorer else None)


def files_section(files: Files) -> Section:
    """The lists of failed files, of filtered files, and of everything else that was set aside."""
    return Section("files", "Files", _files(files), "Files that were not kept, or are not whole")


def _files(files: Files) -> Markup:
    if not (files.counts or files.aside):
        return notice("There is no files.jsonl and no set_aside.jsonl.")
    more = files.more
    aside = set_aside_table(files.aside, max(more["aside"], 0))
    total = sum(files.aside_kinds.values())
    return join(
        _file_list("Failed", files.failed, more["failed"]),
        _file_list("Filtered", files.filtered, more["filtered"], len(files.filtered) <= FEW_FILES),
        None if files.failed or files.filtered else paragraph("None."),
        _file_list("Not as long as their headers promise", files.not_whole, more["not_whole"]),
        details(f"All that was set aside, and why ({total:,})", aside) if files.aside else None,
    )


def _file_list(title: str, rows: Sequence[list[Content]], more: int, is_open: bool = True) -> Markup | None:
    if not rows:
        return None
    listed = table(("file", "length", "reason"), rows, "list", has_row_headings=False)
    below = note(f"And {more:,} more in files.jsonl.") if more else None
    return details(f"{title} ({len(rows) + more:,})", listed, below, is_open=is_open)


def cost_section(folder: Folder, timings: Row) -> Section:
    """One row per step: seconds of one core, and hours of audio per hour of one core; and the settings of the run."""
    settings = [
        (named(key, 120), format_value(without_home(value) if isinstance(value, str) else value))
        for key, value in flat_settings(folder.yaml("config.yaml"))
    ]
    shown = [heading("Settings"), configuration([("config.yaml", settings)])] if settings else None
    return Section("cost", "Cost", join(_cost_table(timings), shown), "What it cost")


def _cost_table(timings: Row) -> Markup:
    steps = timings.get("steps")
    if not isinstance(steps, Mapping) or not steps:
        return notice("There is no timings.json, or it names no step.")
    seconds = {name: finite_number(value_at(step, "seconds")) or 0.0 for name, step in steps.items()}
    longest, total = max(seconds.values()) or 1.0, sum(seconds.values())
    rows: list[list[Content]] = []
    for name in sorted(steps, key=lambda name: (-seconds[name], name)):
        audio_s = finite_number(value_at(steps[name], "audio_s")) or 0.0
        calls = finite_number(value_at(steps[name], "calls"))
        speed = audio_s / seconds[name] if seconds[name] > 0 and audio_s > 0 else None
        share = [" ", small(percent_or_dash(seconds[name] / total))] if total else None
        of_audio = None if speed is None else [" ", small(f"{duration(audio_s)} of audio")]
        rows.append(
            [
                named(name, 80),
                [share_bar(100 * seconds[name] / longest), " ", duration(seconds[name]), share],
                "–" if calls is None else f"{int(calls):,}",
                [_format_speed(speed), of_audio],
            ]
        )
    speed = _measure_speed(timings)
    shown_speed = "–" if speed is None else bold(_format_speed(speed))
    rows.append(["all steps", duration(total), None, shown_speed])
    headings = ("step", "seconds of one core", "calls", "hours of audio an hour of one core")
    return table(headings, rows, "stages")


def _format_speed(speed: float | None) -> str:
    return "–" if speed is None else f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"


# ---------------------------------------------------------------------------------------------------- bars


def _file_bars(counts: Row) -> Markup | None:
    num_seen = count_of(counts, "files_seen")
    bars = []
    if "files_seen" in counts:
        bars.append(_funnel_bar("seen", num_seen, num_seen, ""))
    if "audio_files" in counts:
        note = f"{count_of(counts, 'not_audio'):,} not audio"
        bars.append(_funnel_bar("audio", count_of(counts, "audio_files"), num_seen, note))
    if "files_kept" in counts:
        parts = [f"{count_of(counts, f'files_{status}'):,} {status}" for status in ("filtered", "failed")]
        bars.append(_funnel_bar("kept", count_of(counts, "files_kept"), num_seen, ", ".join(parts)))
    return _bar_group("Files", bars)


def _second_bars(counts: Row, unit: str) -> Markup | None:
    seconds_seen = finite_number(counts.get("seconds_seen")) or 0.0
    bars = []
    for key, title in _SECONDS.items():
        seconds = finite_number(counts.get(key))
        if seconds is not None and seconds_seen:
            share = seconds / seconds_seen
            bars.append(
                _funnel_bar(
                    title.format(unit=unit), seconds, seconds_seen, percent_or_dash(share), duration(seconds)
                )
            )
    return _bar_group("Audio", bars)


def _part_bars(counts: Row, unit: str) -> Markup | None:
    """Parts found, what each rule left of them, and those kept."""
    total = count_of(counts, "segments_found") or count_of(counts, "segments")
    bars = []
    if "segments_found" in counts:
        bars.append(_funnel_bar("found", total, total, ""))
    stages = counts.get("stages")
    for stage in stages if isinstance(stages, list) else ():
        if isinstance(stage, Mapping):
            bars.append(_stage_bar(dict(stage), total))
    if "segments" in counts and total:
        seconds = finite_number(counts.get("seconds"))
        note = f"{duration(seconds)} of audio" if seconds is not None else ""
        bars.append(_funnel_bar("kept", count_of(counts, "segments"), total, note))
    return _bar_group(unit.capitalize(), bars)


def _bar_group(title: str, bars: Sequence[Markup]) -> Markup | None:
    if not bars:
        return None
    return element("div", heading(title), element("div", bars, class_="funnel long"), class_="card")


def ranked(counts: Any) -> list[tuple[str, int]]:
    """Names and counts, the largest first."""
    pairs = counts.items() if isinstance(counts, Mapping) else ()
    ranked = [(named(name, 120), count) for name, count in pairs if isinstance(count, int)]
    return sorted(ranked, key=lambda item: (-item[1], item[0]))


def _stage_bar(stage: Row, total: int) -> Markup:
    before, after = count_of(stage, "segments_in"), count_of(stage, "segments_out")
    lost, limit = before - after, stage.get("threshold")
    lost_s = (finite_number(stage.get("seconds_in")) or 0.0) - (
        finite_number(stage.get("seconds_out")) or 0.0
    )
    title = named(stage.get("title") or stage.get("rule") or stage.get("step") or "", 80)
    note = f"{lost:,} dropped, {duration(max(lost_s, 0.0))}" if lost else "none dropped"
    step = named(stage.get("step") or "", 60)
    beside = step + ("" if limit is None else f" · limit {format_value(limit)}")
    shown = [title, [" ", small(beside)] if beside else None]
    return _funnel_bar(shown, after, total, note, lost=lost)


def _counted_stages(survey: PartSurvey, rules: list[Comparison]) -> list[Row]:
    """Counts per stage from the dropped rows, in the order of the rules."""
    order = {(rule.step, rule.name): place for place, rule in enumerate(rules)}
    limits = {(rule.step, rule.name): rule.threshold for rule in rules}
    segments = survey.kept_sum.segments + survey.dropped_sum.segments
    seconds = survey.kept_sum.seconds + survey.dropped_sum.seconds
    stages = []
    for key in sorted(survey.reasons, key=lambda key: (order.get(key, len(order)), key)):
        dropped = survey.reasons[key].dropped
        stages.append(
            {
                "step": key[0],
                "rule": key[1],
                "title": survey.reasons[key].title,
                "threshold": limits.get(key),
                "segments_in": segments,
                "segments_out": segments - dropped.segments,
                "seconds_in": seconds,
                "seconds_out": seconds - dropped.seconds,
            }
        )
        segments, seconds = segments - dropped.segments, seconds - dropped.seconds
    return stages


def _funnel_bar(
    title: Content, size: float, of: float, note: str, text: str = "", lost: float = 0.0
) -> Markup:
    """A bar that is `size` of `of` wide, and after it what was lost.

    Args:
        text: the size in words, where it is no count.
    """
    percent = max(0.0, min(100.0, 100.0 * size / of)) if of else 0.0
    lost_percent = max(0.0, min(100.0 - percent, 100.0 * lost / of)) if of else 0.0
    drawn = share_bar(percent, digits=2, lost_percent=lost_percent)
    return element(
        "div", element("span", title, class_="what"), bold(text or f"{size:,}"), drawn, small(note)
    )


# ------------------------------------------------------------------------------------------------- headline


def _cpu_note(steps_s: float, timings: Row) -> str:
    """The steps' CPU-seconds, and those of the command around them, where this run did all of the work.

    One worker is the command's own process, whose seconds hold those of the steps.
    """
    note = f"{duration(steps_s)} of CPU in the steps"
    command_s = finite_number(timings.get("driver_cpu_s"))
    if command_s is None or finite_number(timings.get("known")):
        return note
    is_alone = finite_number(timings.get("workers")) == 1 and timings.get("engine") == "local"
    return f"{note}, {duration(command_s if is_alone else steps_s + command_s)} in all"


def _cost_tiles(timings: Row) -> list[Tile]:
    tiles = []
    speed = _measure_speed(timings)
    if speed is not None:
        cpu_s = sum(finite_number(value_at(step, "seconds")) or 0.0 for step in timings["steps"].values())
        value = f"{speed:,.0f} h" if speed >= 100 else f"{speed:.1f} h"
        tiles.append(Tile(value, "of audio an hour of one core", _cpu_note(cpu_s, timings)))
    wall_s = finite_number(timings.get("wall_s"))
    if wall_s is not None:
        workers = finite_number(timings.get("workers"))
        note = f"{workers:g} worker{'' if workers == 1 else 's'}" if workers is not None else ""
        if isinstance(timings.get("engine"), str):
            note = f"{note}, engine {named(timings['engine'], 30)}".strip(", ")
        if finite_number(timings.get("known")):
            note += f"; {timings['known']:,} answers were known"
        tiles.append(Tile(duration(wall_s), "wall time", note))
    return tiles


def _measure_speed(timings: Row) -> float | None:
    """Seconds of audio per second of one core, all steps together."""
    steps = timings.get("steps")
    audio_s = finite_number(timings.get("audio_s"))
    if not isinstance(steps, Mapping) or not audio_s:
        return None
    total = sum(finite_number(value_at(step, "seconds")) or 0.0 for step in steps.values())
    return audio_s / total if total > 0 else None


def count_of(counts: Row, key: str) -> int:
    return int(finite_number(counts.get(key)) or 0)
