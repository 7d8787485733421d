"""The section on generated samples: clips of each stage with the judges' answers, wrong ones among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from audiollm.pages.blocks import (
    StagePart,
    card,
    cards,
    clip,
    element,
    join,
    mark,
    notice,
    paragraph,
    small,
    stage_parts,
)
from audiollm.pages.clips import Gallery, shares
from audiollm.pages.page import Section
from audiollm.pages.run_record import Row, StageRecord, pick_evenly
from audiollm.pages.sections import ReportContext


@dataclass(frozen=True)
class SampleGroup:
    """Clips of one stage, judged or not."""

    name: str
    stage: StageRecord
    """The stage whose folder their paths are relative to."""
    rows: list[Row]
    absent: str = ""
    unjudged: str = ""
    """Why no judge has heard them."""


def samples_section(context: ReportContext) -> Section | None:
    """Clips of every stage `generate`, `context.samples` in all if there are as many."""
    if not context.stages("generate", "evaluate"):
        return None
    groups = collect_sample_groups(context)
    filled = [group for group in groups if group.rows]
    if filled and not context.samples:
        content = notice("None was asked for (samples: 0).")
    elif not groups:
        content = notice("This recipe has no stage generate.")
    else:
        counts = dict(zip(map(id, filled), shares(context.samples, len(filled)), strict=True))
        # the last first: where the page has its fill of sound, that of the earlier ones is left out
        parts = [_sample_part(group, counts.get(id(group), 0), context.gallery) for group in reversed(groups)]
        content = stage_parts(parts[::-1])
    return Section("samples", "Samples", content, "Generated samples")


def collect_sample_groups(context: ReportContext) -> list[SampleGroup]:
    """Judged clips by the stage that generated them, and the clips of stages without a judge."""
    judging = context.stages("evaluate")
    rows_by_judge = {stage.name: stage.rows("clips.jsonl") for stage in judging}
    groups = []
    for stage in context.stages("generate", "evaluate"):
        if stage.kind == "evaluate":
            rows = rows_by_judge[stage.name]
            sources = [made.name for made in context.stages("generate") if made.name in stage.upstream]
            if rows:
                groups.append(SampleGroup(sources[0] if len(sources) == 1 else stage.name, stage, rows))
            continue
        judges = [judge for judge in judging if stage.name in judge.upstream]
        if any(rows_by_judge[judge.name] for judge in judges):
            continue
        rows = stage.rows("generated.jsonl")
        absent = "" if rows else stage.absent or f"The stage {stage.name} wrote no clips."
        unjudged = "No stage evaluate reads them."
        if judges:
            unjudged = judges[-1].absent or f"The stage {judges[-1].name} wrote no clips."
        groups.append(SampleGroup(stage.name, stage, rows, absent, unjudged))
    return groups


def _sample_part(group: SampleGroup, count: int, gallery: Gallery) -> StagePart:
    if group.absent:
        return StagePart(group.name, group.absent, group.absent, notice(group.absent))
    rows = group.rows
    selected_rows = choose_samples(rows, count)
    wrong = sum(is_wrong(row) for row in rows)
    listed = cards(_sample_card(row, group.stage.folder, gallery) for row in selected_rows)
    if group.unjudged:
        about = notice(f"No judge has heard them. {group.unjudged}")
        return StagePart(group.name, "", f"{len(rows):,} clips", join(about, listed))
    of_these = f"; {sum(map(is_wrong, selected_rows))} of these are shown" if wrong else ""
    about = paragraph(
        f"{len(selected_rows)} of {len(rows):,} clips, spread evenly over texts and voices. {wrong:,} of all are wrong "
        f"(another text by {_pick_main_judge(rows[0])}, or another voice by the speaker judge){of_these}. A card says "
        "which text and voice were asked for, what each judge heard, and how sure it was."
    )
    return StagePart(group.name, "", f"{len(rows):,} clips, {wrong:,} wrong", join(about, listed))


def choose_samples(rows: Sequence[Row], count: int) -> list[Row]:
    """`count` rows, evenly over texts and speakers; wrong ones by their share, at most a quarter."""
    keys = ("text", "speaker")
    wrong, right = [row for row in rows if is_wrong(row)], [row for row in rows if not is_wrong(row)]
    count = min(count, len(rows))
    share = round(count * len(wrong) / len(rows))
    num_wrong = min(len(wrong), max(share, count // 4))
    num_wrong = max(num_wrong, count - len(right))
    selected_rows = [wrong[index] for index in pick_evenly(wrong, num_wrong, keys)]
    selected_rows += [right[index] for index in pick_evenly(right, count - num_wrong, keys, selected_rows)]
    return sorted(
        selected_rows, key=lambda row: (str(row.get("text")), str(row.get("speaker")), str(row.get("id")))
    )


def is_wrong(row: Row) -> bool:
    """Whether the main judge heard another text, or the speaker judge another voice."""
    correct = row.get("correct") or {}
    return correct.get(_pick_main_judge(row)) is False or correct.get("speaker") is False


def _pick_main_judge(row: Row) -> str:
    return "classifier" if "classifier" in (row.get("correct") or {}) else "pocketsphinx"


def _sample_card(row: Row, folder: Path, gallery: Gallery) -> Markup:
    heard = list((row.get("heard") or {}).items())
    if row.get("speaker_heard") is not None:
        heard.append(("speaker", row["speaker_heard"]))
    text, speaker = row.get("text", ""), row.get("speaker") or ""
    verdicts = element(
        "ul", [_judge_verdict(row, *verdict) for verdict in heard], *_problems(row), class_="verdicts"
    )
    return card(
        [f"“{text}” ", small(speaker)],
        clip(gallery.clip(folder / str(row.get("path", ""))), f"{text}, {speaker}"),
        verdicts,
        badge="✗ wrong" if is_wrong(row) else "",
    )


def _problems(row: Row) -> list[Markup]:
    problems = [row.get("problem"), "" if row.get("stopped", True) else "did not stop by itself"]
    return [element("li", problem) for problem in problems if problem]


def _judge_verdict(row: Row, judge: str, transcript: str) -> Markup:
    is_right, confidence = ((row.get(key) or {}).get(judge) for key in ("correct", "confidence"))
    sure = "" if confidence is None else f"{100 * confidence:.0f} %"
    return element(
        "li",
        mark(is_right),
        small(judge),
        element("span", transcript or "nothing"),
        small(sure),
        class_="verdict",
    )
