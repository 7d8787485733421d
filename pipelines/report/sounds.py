"""The section on flow matching: trainings, generated sounds beside real ones, edits before and after, scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from audiollm.evaluate.report.clips import Gallery, PageClip
from audiollm.evaluate.report.formats import format_number, percent_or_dash
from pipelines.report.curves import alarms_of, chart_of, draw_chart, facts_of
from pipelines.report.figures import series_of
from pipelines.report.material import Material, Row, Trace, pick_evenly
from pipelines.report.training import PROMPTS_SHOWN, listening

TRAINED, GENERATED, EDITED, JUDGED = "train_flow", "generate_sound", "edit_sounds", "evaluate_sound"
SOUND_STAGES = (TRAINED, GENERATED, EDITED, JUDGED)
SOUNDS_SHOWN, EDITS_SHOWN = 8, 12
"""Cards of each stage."""


def sounds_section(material: Material, gallery: Gallery) -> Row:
    """Every stage of flow matching, in the order of the recipe."""
    judged = [stage for stage in material.stages(JUDGED) if stage.figures]
    return {
        "absent": "" if material.has(*SOUND_STAGES) else "This recipe makes no sounds by flow matching.",
        "edits": [_edits(stage, gallery, judged) for stage in material.stages(EDITED)],
        "made": [_build_generated_sounds(stage, gallery, judged) for stage in material.stages(GENERATED)],
        "trainings": [_training(stage, gallery) for stage in material.stages(TRAINED)],
        "scores": [_format_sound_scores(stage) for stage in material.stages(JUDGED)],
    }


def sound_tiles(material: Material) -> list[Row]:
    """The share of events recognized, of every stage that judges sounds."""
    tiles = []
    judged = [stage for stage in material.stages(JUDGED) if stage.figures]
    for stage in judged:
        table = (stage.figures or {}).get("recognized") or {}
        if table.get("accuracy") is not None:
            before = f"{stage.name}: " if len(judged) > 1 else ""
            interval = f"{percent_or_dash(table.get('low'))} to {percent_or_dash(table.get('high'))}"
            note = f"{table.get('n') or 0:,} sounds at their places, {interval}"
            tiles.append(
                {
                    "value": percent_or_dash(table["accuracy"]),
                    "title": f"{before}asked sounds recognized",
                    "note": note,
                }
            )
    return tiles


def with_span(clip: PageClip, start_s: float, end_s: float) -> PageClip:
    """The clip with a span drawn in."""
    if not clip.duration_s:
        return clip
    first, last = (min(max(100 * second / clip.duration_s, 0.0), 100.0) for second in (start_s, end_s))
    return replace(clip, span=(round(first, 2), round(last - first, 2)))


# Private


def _training(stage: Trace, gallery: Gallery) -> Row:
    rows = stage.rows("metrics.jsonl")
    held_out = [
        series_of(rows, f"evaluation/{key}", name, dotted=True)
        for key, name in (("loss", "all conditions"), ("loss_unconditional", "none"))
    ]
    charts = [
        chart_of(rows, "Loss", "squared error of the velocity", "loss"),
        draw_chart("Held-out loss", "with all conditions, and without", held_out, "conditions"),
        chart_of(rows, "Gradient norm", "before clipping", "gradient_norm"),
        chart_of(rows, "Learning rate", "learning rate", "learning_rate"),
    ]
    facts = facts_of(
        stage.figures or {},
        ("parameters", "parameters", lambda v: f"{v / 1e6:.2f} M"),
        ("steps", "training steps", lambda v: f"{v:,}"),
        ("sounds", "training sounds", lambda v: f"{v:,}"),
        ("loss", "loss, held out", lambda v: f"{v:.3f}"),
        ("conditions_gain", "lowered by the conditions", lambda v: f"{v:.1%}"),
    )
    return {
        "name": stage.name,
        "absent": stage.absent,
        "facts": facts,
        "charts": [chart for chart in charts if chart["svg"]],
        "alarms": alarms_of(stage),
        "listening": listening(stage, gallery, PROMPTS_SHOWN),
    }


def _build_generated_sounds(stage: Trace, gallery: Gallery, judged: Sequence[Trace]) -> Row:
    """Generated sounds, each beside the real one."""
    rows = stage.rows("generated.jsonl")
    labels_by_sound = _collect_labels(stage, judged)
    cards = []
    for index in pick_evenly(rows, SOUNDS_SHOWN, ("caption",)):
        row = rows[index]
        clips = [("made", gallery.clip(stage.folder / str(row.get("audio", ""))))]
        if row.get("reference"):
            clips.append(("real", gallery.clip(Path(str(row["reference"])))))
        cards.append(
            {
                "title": row.get("caption") or row.get("id", ""),
                "cot": row.get("thought") or "",
                "id": row.get("id", ""),
                "clips": clips,
                "heard": labels_by_sound.get(str(row.get("id"))) or [],
            }
        )
    return {"name": stage.name, "absent": stage.absent, "total": len(rows), "cards": cards}


def _edits(stage: Trace, gallery: Gallery, judged: Sequence[Trace]) -> Row:
    """Edits: the track before and after, with the span drawn in, and what a perfect edit gives."""
    rows = stage.rows("edited.jsonl")
    verdicts = {
        (str(judged_row.get("id")), str(judged_row.get("case"))): judged_row
        for judge in judged
        if stage.name in judge.upstream
        for judged_row in judge.rows("rows.jsonl")
        if judged_row.get("case")
    }
    cards = []
    for index in pick_evenly(rows, EDITS_SHOWN, ("operation", "by")):
        row = rows[index]
        start_s, end_s = _read_edit_span(row)
        names = (("before", "before"), ("after", "audio"), ("a perfect edit", "reference"))
        clips = [
            (title, with_span(gallery.clip(stage.folder / str(row[key])), start_s, end_s))
            for title, key in names
            if row.get(key)
        ]
        verdict = verdicts.get((str(row.get("id")), f"{row.get('operation')} by {row.get('by')}")) or {}
        event = row.get("event")
        cards.append(
            {
                "operation": row.get("operation", ""),
                "by": row.get("by", ""),
                "sound": event.get("name", "") if isinstance(event, Mapping) else "",
                "caption": row.get("caption") or "",
                "id": row.get("id", ""),
                "span": f"{start_s:.2f} to {end_s:.2f} s",
                "clips": clips,
                "heard": verdict.get("heard"),
                "done": verdict.get("verdict", verdict.get("the sound is heard, or gone")),
                "why": str(verdict.get("why") or ""),
            }
        )
    cards.sort(key=lambda card: (str(card["operation"]), str(card["id"])))
    return {"name": stage.name, "absent": stage.absent, "total": len(rows), "cards": cards}


def _read_edit_span(row: Mapping[str, Any]) -> tuple[float, float]:
    span = row.get("span")
    if isinstance(span, list) and len(span) == 2 and all(isinstance(bound, int | float) for bound in span):
        return float(span[0]), float(span[1])
    return 0.0, 0.0


def _collect_labels(stage: Trace, judged: Sequence[Trace]) -> dict[str, list[tuple[str, str, bool]]]:
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


def _format_sound_scores(stage: Trace) -> Row:
    """The measures of a stage that judges sounds, as texts."""
    figures = stage.figures or {}
    set_measures = [
        (name, format_number(value))
        for name, value in (figures.get("whole") or {}).items()
        if value is not None
    ]
    measures = [
        (name, format_number(table.get("mean")), table.get("n"))
        for name, table in (figures.get("measures") or {}).items()
        if isinstance(table, Mapping) and table.get("n")
    ]
    edits = figures.get("edits") or {}
    columns = list(next(iter(edits.values()))) if edits else []
    return {
        "name": stage.name,
        "absent": stage.absent,
        "judges": list((figures.get("judges") or {}).items()),
        "recognized": figures.get("recognized"),
        "whole": set_measures,
        "measures": measures,
        "edit_columns": columns,
        "edits": [
            (case, [_format_sound_cell(table[name]) for name in columns]) for case, table in edits.items()
        ],
    }


def _format_sound_cell(table: Mapping[str, Any]) -> Row:
    return {
        "value": table.get("accuracy"),
        "low": table.get("low"),
        "high": table.get("high"),
        "n": table.get("n"),
    }
