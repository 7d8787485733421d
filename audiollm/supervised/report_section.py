"""The section on training: figures, curves and clips spoken at evaluations, for every stage `train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from audiollm.hub_models.names import folder_label
from audiollm.pages.blocks import Chart, StagePart, stage_parts
from audiollm.pages.charts import series_of
from audiollm.pages.page import Section
from audiollm.pages.run_record import Row, RunRecord, StageRecord
from audiollm.pages.sections import ReportContext
from audiollm.pages.stage_parts import (
    FROZEN_FACTS,
    Facts,
    allot,
    chart_of,
    draw_chart,
    evaluation_clips,
    facts_of,
    spread_places,
    training_part,
)  # fmt: skip

CODEBOOKS_SHOWN = 8
PROMPTS_SHOWN = 6
"""Prompts spoken at evaluations that the page shows, over all stages together."""
BRIEF = ("begins from", "training steps", "audio loss, held out", "text loss, held out")
"""The facts that stand beside the name of one of several stages."""


def training_section(context: ReportContext) -> Section | None:
    """Every stage `train` in the order of the recipe."""
    stages = context.stages("train")
    if not stages:
        return None
    prompts = allot(PROMPTS_SHOWN, [stage for stage in stages if stage.rows("listening/prompts.jsonl")])
    # the last first: where the page has its fill of sound, that of the earlier ones is left out
    parts = [_training_part(context, stage, prompts.get(stage.name, 0)) for stage in reversed(stages)]
    return Section("training", "Training", stage_parts(parts[::-1]))


def _training_part(context: ReportContext, stage: StageRecord, prompts: int) -> StagePart:
    rows = stage.rows("metrics.jsonl")
    drawn = [
        chart_of(rows, "Audio loss", "nats per code", "audio_loss"),
        _codebook_chart(rows),
        chart_of(rows, "First codebook and end", "nats per code", "first_codebook_loss"),
        chart_of(rows, "Other codebooks", "nats per code", "depth_loss"),
        chart_of(rows, "Text loss", "nats per token", "text_loss"),
        chart_of(rows, "Gradient norm", "before clipping", "gradient_norm"),
        chart_of(rows, "Learning rate", "learning rate", "learning_rate"),
    ]
    clips = evaluation_clips(stage, context.gallery, prompts, "said")
    return training_part(stage, _collect_training_facts(context.run, stage), BRIEF, drawn, clips)


def _collect_training_facts(run: RunRecord, stage: StageRecord) -> Facts:
    """The facts of a training: the model that it started from, and its figures."""
    if stage.figures is None or stage.result is None:
        return []
    settings = stage.result.settings
    start_settings = {"start": settings.get("start"), "trained": settings.get("trained")}
    if start_settings["trained"] == "all":
        del start_settings["trained"]
    return facts_of(
        {**start_settings, **stage.figures},
        ("start", "begins from", lambda v: _origin(run, stage, str(v))),
        ("trained", "trained", lambda v: ", ".join(v) if isinstance(v, list) else str(v)),
        ("parameters", "parameters", lambda v: f"{v / 1e6:.2f} M"),
        ("steps", "training steps", lambda v: f"{v:,}"),
        ("sequences", "training sequences", lambda v: f"{v:,}"),
        ("vocabulary", "text vocabulary", lambda v: f"{v:,}"),
        ("audio_loss", "audio loss, held out", lambda v: f"{v:.3f}"),
        ("first_codebook_loss", "loss of the first codebook, held out", lambda v: f"{v:.3f}"),
        ("depth_loss", "loss of the other codebooks, held out", lambda v: f"{v:.3f}"),
        ("text_loss", "text loss, held out", lambda v: f"{v:.3f}"),
        *FROZEN_FACTS,
    )


def _origin(run: RunRecord, stage: StageRecord, start: str) -> str:
    """The stage that made a model, else the last part of its path: paths of published weights are long."""
    below = [name for name in stage.upstream if Path(start).is_relative_to(run.recipe.folder / name)]
    return below[0] if below else folder_label(Path(start))


def _codebook_chart(rows: Sequence[Row]) -> Chart:
    """The audio loss in training by codebook; of many codebooks an even choice."""
    codebook_names = {
        key.removeprefix("audio_loss/") for row in rows for key in row if key.startswith("audio_loss/")
    }
    books = sorted(int(book) for book in codebook_names if book.isdecimal())
    visible_books = [books[place] for place in spread_places(len(books), CODEBOOKS_SHOWN)]
    series = [series_of(rows, f"audio_loss/{book}", str(book)) for book in visible_books]
    return draw_chart("Audio loss by codebook", "nats per code, training", series, "codebook")
