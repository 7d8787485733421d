"""The section on training: figures, curves and clips spoken at evaluations, for every stage `train`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from audiollm.evaluate.report.clips import Gallery, shares
from pipelines.report.curves import alarms_of, chart_of, draw_chart, facts_of, spread_places
from pipelines.report.figures import series_of
from pipelines.report.material import Material, Row, Trace

CODEBOOKS_SHOWN = 8
PROMPTS_SHOWN, STEPS_SHOWN = 6, 4
"""Clips spoken at evaluations that the page shows; prompts are counted over all stages together."""
BRIEF = ("begins from", "training steps", "audio loss, held out", "text loss, held out")
"""The facts that stand beside the name of one of several stages."""


def training_section(material: Material, gallery: Gallery) -> Row:
    """Every stage `train` in the order of the recipe; `absent` where it has none."""
    stages = material.stages("train")
    if not stages:
        return {"absent": "This recipe has no stage train.", "stages": []}
    listening_stages = [stage for stage in stages if stage.rows("listening/prompts.jsonl")]
    prompts = dict(
        zip(
            (stage.name for stage in listening_stages),
            shares(PROMPTS_SHOWN, len(listening_stages)),
            strict=True,
        )
    )
    # the last first: where the page has its fill of sound, that of the earlier ones is left out
    sections = [
        _build_training_stage(material, stage, gallery, prompts.get(stage.name, 0))
        for stage in reversed(stages)
    ]
    return {"absent": "", "stages": sections[::-1]}


def _build_training_stage(material: Material, stage: Trace, gallery: Gallery, prompts: int) -> Row:
    rows = stage.rows("metrics.jsonl")
    charts = [
        chart_of(rows, "Audio loss", "nats per code", "audio_loss"),
        _codebook_chart(rows),
        chart_of(rows, "Text loss", "nats per token", "text_loss"),
        chart_of(rows, "Gradient norm", "before clipping", "gradient_norm"),
        chart_of(rows, "Learning rate", "learning rate", "learning_rate"),
    ]
    facts = _collect_training_facts(material, stage)
    return {
        "name": stage.name,
        "absent": stage.absent,
        "brief": stage.absent or " · ".join(f"{title} {value}" for title, value in facts if title in BRIEF),
        "facts": facts,
        "charts": [chart for chart in charts if chart["svg"]],
        "alarms": alarms_of(stage),
        "listening": listening(stage, gallery, prompts),
    }


def _collect_training_facts(material: Material, stage: Trace) -> list[tuple[str, str]]:
    """The facts of a training: the model that it started from, and its figures."""
    if stage.figures is None or stage.result is None:
        return []
    settings = stage.result.settings
    start_settings = {"start": settings.get("start"), "trained": settings.get("trained")}
    if start_settings["trained"] == "all":
        del start_settings["trained"]
    return facts_of(
        {**start_settings, **stage.figures},
        ("start", "begins from", lambda v: _origin(material, stage, str(v))),
        ("trained", "trained", lambda v: ", ".join(v) if isinstance(v, list) else str(v)),
        ("parameters", "parameters", lambda v: f"{v / 1e6:.2f} M"),
        ("steps", "training steps", lambda v: f"{v:,}"),
        ("sequences", "training sequences", lambda v: f"{v:,}"),
        ("vocabulary", "text vocabulary", lambda v: f"{v:,}"),
        ("audio_loss", "audio loss, held out", lambda v: f"{v:.3f}"),
        ("text_loss", "text loss, held out", lambda v: f"{v:.3f}"),
    )


def _origin(material: Material, stage: Trace, start: str) -> str:
    """The stage that made a model, else the last part of its path: paths of published weights are long."""
    below = [name for name in stage.upstream if Path(start).is_relative_to(material.recipe.folder / name)]
    return below[0] if below else Path(start).name


def _codebook_chart(rows: Sequence[Row]) -> Row:
    """The audio loss in training by codebook; of many codebooks an even choice."""
    codebook_names = {
        key.removeprefix("audio_loss/") for row in rows for key in row if key.startswith("audio_loss/")
    }
    books = sorted(int(book) for book in codebook_names if book.isdecimal())
    visible_books = [books[place] for place in spread_places(len(books), CODEBOOKS_SHOWN)]
    series = [series_of(rows, f"audio_loss/{book}", str(book)) for book in visible_books]
    return draw_chart("Audio loss by codebook", "nats per code, training", series, "codebook")


def listening(stage: Trace, gallery: Gallery, count: int) -> Row:
    """Prompts, and the sound of each at the first evaluation, the last, and some between."""
    if not count:
        return {"prompts": [], "shown": 0, "total": 0}
    step_folders = sorted(
        (int(match[1]), path)
        for path in (stage.folder / "listening").glob("step-*")
        if (match := re.fullmatch(r"step-(\d+)", path.name))
    )
    steps = [step_folders[place] for place in spread_places(len(step_folders), STEPS_SHOWN)]
    prompts = []
    for row in stage.rows("listening/prompts.jsonl")[:count]:
        file = f"{Path(str(row.get('name'))).name}.wav"
        clips = [(step, gallery.clip(path / file)) for step, path in steps if (path / file).is_file()]
        if clips:
            prompts.append({"text": row.get("text", ""), "speaker": row.get("speaker", ""), "clips": clips})
    return {"prompts": prompts, "shown": len(steps), "total": len(step_folders)}
