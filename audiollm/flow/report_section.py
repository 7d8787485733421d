"""The section on flow matching: trainings, generated sounds beside real ones, edits before and after, scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from markupsafe import Markup

from audiollm.pages.blocks import (
    card,
    cards,
    clip,
    element,
    heading,
    join,
    lines,
    mark,
    note,
    notice,
    paragraph,
    score_cell,
    small,
    table,
)  # fmt: skip
from audiollm.pages.charts import series_of
from audiollm.pages.clips import Gallery, PageClip
from audiollm.pages.formats import format_number, percent_or_dash
from audiollm.pages.page import Section, Tile
from audiollm.pages.run_record import Row, StageRecord, pick_evenly
from audiollm.pages.sections import ReportContext
from audiollm.pages.stage_parts import chart_of, draw_chart, evaluation_clips, facts_of, training_part

TRAINED, GENERATED, EDITED, JUDGED = "train_flow", "generate_sound", "edit_sounds", "evaluate_sound"
SOUND_STAGES = (TRAINED, GENERATED, EDITED, JUDGED)
SOUNDS_SHOWN, EDITS_SHOWN, PROMPTS_SHOWN = 8, 12, 6
"""Cards and prompts of each stage."""


def sounds_section(context: ReportContext) -> Section | None:
    """Every stage of flow matching, in the order of the recipe."""
    if not context.run.has(*SOUND_STAGES):
        return None
    gallery, judges = context.gallery, context.stages(JUDGED)
    judged = [stage for stage in judges if stage.figures]
    content = join(
        [_edits(stage, gallery, judged) for stage in context.stages(EDITED)],
        [_generated_sounds(stage, gallery, judged) for stage in context.stages(GENERATED)],
        [_sound_scores(stage) for stage in judges],
        [_flow_training(stage, gallery) for stage in context.stages(TRAINED)],
    )
    return Section("sounds", "Sounds", content, tiles=_sound_tiles(judged))


def with_span(clip: PageClip, start_s: float, end_s: float) -> PageClip:
    """The clip with a span drawn in."""
    if not clip.duration_s:
        return clip
    first, last = (min(max(100 * second / clip.duration_s, 0.0), 100.0) for second in (start_s, end_s))
    return replace(clip, span=(round(first, 2), round(last - first, 2)))


# Private


def _sound_tiles(judged: Sequence[StageRecord]) -> list[Tile]:
    """The share of events recognized, of every stage that judges sounds."""
    tiles = []
    for stage in judged:
        scores = (stage.figures or {}).get("recognized") or {}
        if scores.get("accuracy") is not None:
            before = f"{stage.name}: " if len(judged) > 1 else ""
            interval = f"{percent_or_dash(scores.get('low'))} to {percent_or_dash(scores.get('high'))}"
            about = f"{scores.get('n') or 0:,} sounds at their places, {interval}"
            tiles.append(Tile(percent_or_dash(scores["accuracy"]), f"{before}asked sounds recognized", about))
    return tiles


def _flow_training(stage: StageRecord, gallery: Gallery) -> Markup:
    rows = stage.rows("metrics.jsonl")
    held_out = [
        series_of(rows, f"evaluation/{key}", name, dotted=True)
        for key, name in (("loss", "all conditions"), ("loss_unconditional", "none"))
    ]
    drawn = [
        chart_of(rows, "Loss", "squared error of the velocity", "loss"),
        draw_chart("Held-out loss", "with all conditions, and without", held_out, "conditions"),
        chart_of(rows, "Gradient norm", "before clipping", "gradient_norm"),
        chart_of(rows, "Learning rate", "learning rate", "learning_rate"),
    ]
    listed = facts_of(
        stage.figures or {},
        ("parameters", "parameters", lambda v: f"{v / 1e6:.2f} M"),
        ("steps", "training steps", lambda v: f"{v:,}"),
        ("sounds", "training sounds", lambda v: f"{v:,}"),
        ("loss", "loss, held out", lambda v: f"{v:.3f}"),
        ("conditions_gain", "lowered by the conditions", lambda v: f"{v:.1%}"),
    )
    clips = evaluation_clips(stage, gallery, PROMPTS_SHOWN, "made")
    return join(heading("Training", stage.name), training_part(stage, listed, (), drawn, clips).content)


def _cards_of(stage: StageRecord, title: str, about: str, listed: Iterable[Markup]) -> Markup:
    absent = notice(stage.absent) if stage.absent else None
    return join(heading(title, f"{stage.name}: {about}"), absent, cards(listed, "wide-cards"))


def _titled_clips(clips: Iterable[tuple[str, PageClip]], about: str) -> list[Markup]:
    return [join(element("h5", title), clip(sound, f"{title}, {about}")) for title, sound in clips]


def _generated_sounds(stage: StageRecord, gallery: Gallery, judged: Sequence[StageRecord]) -> Markup:
    """Generated sounds, each beside the real one."""
    rows = stage.rows("generated.jsonl")
    labels_by_sound = _collect_labels(stage, judged)
    listed = []
    for index in pick_evenly(rows, SOUNDS_SHOWN, ("caption",)):
        row = rows[index]
        id = row.get("id", "")
        clips = [("made", gallery.clip(stage.folder / str(row.get("audio", ""))))]
        if row.get("reference"):
            clips.append(("real", gallery.clip(Path(str(row["reference"])))))
        heard = [
            [
                mark(label == heard_label and not is_far),
                f" {label}: heard {heard_label}",
                is_far and [" ", small("far from the real sound")],
            ]
            for label, heard_label, is_far in labels_by_sound.get(str(row.get("id"))) or []
        ]
        thought = row.get("thought") and element("p", row["thought"], class_="said small")
        listed.append(
            card(row.get("caption") or id, thought, _titled_clips(clips, str(id)), lines(*heard, file=id))
        )
    about = f"{len(listed)} of {len(rows):,}, each beside the real sound of its scene"
    return _cards_of(stage, "Generated sounds", about, listed)


def _edits(stage: StageRecord, gallery: Gallery, judged: Sequence[StageRecord]) -> Markup:
    """Edits: the track before and after, with the span drawn in, and what a perfect edit gives."""
    rows = stage.rows("edited.jsonl")
    verdicts = {
        (str(judged_row.get("id")), str(judged_row.get("case"))): judged_row
        for judge in judged
        if stage.name in judge.upstream
        for judged_row in judge.rows("rows.jsonl")
        if judged_row.get("case")
    }
    selected_rows = [rows[index] for index in pick_evenly(rows, EDITS_SHOWN, ("operation", "by"))]
    listed = []
    for row in selected_rows:
        key = str(row.get("id")), f"{row.get('operation')} by {row.get('by')}"
        order = str(row.get("operation", "")), str(row.get("id", ""))
        listed.append((order, _edit_card(stage, row, verdicts.get(key) or {}, gallery)))
    listed.sort(key=lambda pair: pair[0])
    about = f"{len(listed)} of {len(rows):,}; the span is drawn in, and all outside of it is the input's own"
    return _cards_of(stage, "Edits", about, (drawn for _, drawn in listed))


def _edit_card(stage: StageRecord, row: Row, verdict: Row, gallery: Gallery) -> Markup:
    start_s, end_s = _read_edit_span(row)
    names = (("before", "before"), ("after", "audio"), ("a perfect edit", "reference"))
    clips = [
        (title, with_span(gallery.clip(stage.folder / str(row[key])), start_s, end_s))
        for title, key in names
        if row.get(key)
    ]
    event, id = row.get("event"), row.get("id", "")
    name = f"{row.get('operation', '')} {event.get('name', '') if isinstance(event, Mapping) else ''}"
    is_done = verdict.get("verdict", verdict.get("the sound is heard, or gone"))
    heard = None
    if verdict.get("heard") is not None:
        why = verdict.get("why") and [" ", small(verdict["why"])]
        heard = [mark(is_done), f" heard in its place: {verdict['heard'] or 'silence'}", why]
    return card(
        [f"{name} ", small(f"by {row.get('by', '')}, {start_s:.2f} to {end_s:.2f} s")],
        _titled_clips(clips, f"{name}, {id}"),
        lines(row.get("caption") and f"asked: {row['caption']}", heard, file=id),
        badge="✗ wrong" if is_done is False else "",
    )


def _read_edit_span(row: Mapping[str, Any]) -> tuple[float, float]:
    span = row.get("span")
    if isinstance(span, list) and len(span) == 2 and all(isinstance(bound, int | float) for bound in span):
        return float(span[0]), float(span[1])
    return 0.0, 0.0


def _collect_labels(
    stage: StageRecord, judged: Sequence[StageRecord]
) -> dict[str, list[tuple[str, str, bool]]]:
    """Asked and heard labels by sound, from the judge of a stage's sounds, and whether the sound is far from the real
    one."""
    labels: dict[str, list[tuple[str, str, bool]]] = {}
    for judge in judged:
        if stage.name in judge.upstream:
            for row in judge.rows("rows.jsonl"):
                pairs = row.get("recognized")
                if isinstance(pairs, list):
                    listed = row.get("far")
                    far_flags = listed[: len(pairs)] if isinstance(listed, list) else []
                    labels[str(row.get("id"))] = [
                        (str(pair[0]), str(pair[1]), is_far is True)
                        for pair, is_far in zip_longest(pairs, far_flags)
                        if len(pair) == 2
                    ]
    return labels


def _sound_scores(stage: StageRecord) -> Markup:
    """The measures of a stage that judges sounds."""
    title = heading("Scores", stage.name)
    if stage.absent:
        return join(title, notice(stage.absent))
    figures = stage.figures or {}
    recognized, edits = figures.get("recognized") or {}, figures.get("edits") or {}
    measures = [
        (name, format_number(of.get("mean")), of.get("n"))
        for name, of in (figures.get("measures") or {}).items()
        if isinstance(of, Mapping) and of.get("n")
    ]
    measures += [
        (name, format_number(value), "all")
        for name, value in (figures.get("whole") or {}).items()
        if value is not None
    ]
    columns = list(next(iter(edits.values()))) if edits else []
    rows = [(case, *(score_cell(of[name]) for name in columns)) for case, of in edits.items()]
    return join(
        title,
        paragraph("Asked sounds recognized at their places: ", score_cell(recognized))
        if recognized.get("n")
        else None,
        table(("measure", "mean", "sounds"), measures) if measures else None,
        table(("edit", *columns), rows, "scores many") if rows else None,
        [note(f"{role}: {name}") for role, name in (figures.get("judges") or {}).items()],
    )
