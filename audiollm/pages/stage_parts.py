"""The parts that sections on trainings share: facts, charts of `metrics.jsonl`, alarms, clips of evaluations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from markupsafe import Markup

from audiollm.pages.blocks import (
    Chart,
    Content,
    StagePart,
    alarms,
    card,
    charts,
    clip,
    element,
    facts,
    heading,
    join,
    notice,
    small,
)
from audiollm.pages.charts import Series, curve_chart, series_of
from audiollm.pages.clips import Gallery, shares
from audiollm.pages.run_record import Row, StageRecord

MAX_EVALUATIONS = 4
"""Evaluations of a training whose clips are shown."""
Facts = list[tuple[str, str]]


def _percent(value: Any) -> str:
    return f"{value:.1%}"


FROZEN_FACTS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("frozen_weights_mb", "memory of weights, frozen ones in fewer bytes", lambda v: f"{v:,.0f} MB"),
    ("logit_error_start", "error of logits by that, at the start", _percent),
    ("same_tokens_start", "same likeliest token, at the start", _percent),
    ("logit_error_saved", "logits of the saved model against the trained one", _percent),
    ("same_tokens_saved", "same likeliest token, saved and trained", _percent),
)
"""The facts of a training with `frozen_weights`."""


def facts_of(figures: Row, *fact_formats: tuple[str, str, Callable[[Any], str]]) -> Facts:
    """Title and text of each known figure (key, title, format) that is present and of the expected type."""
    listed = []
    for key, title, show in fact_formats:
        if figures.get(key) is not None:
            with suppress(TypeError, ValueError):
                listed.append((title, show(figures[key])))
    return listed


def training_part(
    stage: StageRecord,
    listed: Facts,
    brief: Sequence[str],
    drawn: Iterable[Chart],
    *content: Content,
    before_charts: Content = None,
) -> StagePart:
    """The part of a stage that trains: its facts, alarms and charts, then `content`.

    Args:
        brief: titles of the facts that stand beside its name, where there are several stages.
    """
    head = [notice(stage.absent) if stage.absent else None, facts(listed), alarms(alarms_of(stage))]
    about = stage.absent or " · ".join(f"{title} {value}" for title, value in listed if title in brief)
    return StagePart(stage.name, stage.absent, about, join(head, before_charts, charts(drawn), content))


def chart_of(rows: Sequence[Row], title: str, y_label: str, key: str) -> Chart:
    """The training values of `key` and, where there are any, those on held-out data."""
    series = [series_of(rows, key, "training"), series_of(rows, f"evaluation/{key}", "held out", dotted=True)]
    return draw_chart(title, y_label, series)


def draw_chart(
    title: str, y_label: str, series: Sequence[Series], legend_title: str = "", note: str = ""
) -> Chart:
    """A chart over the training steps."""
    return Chart(title, curve_chart(series, y_label, f"{title} over the training steps", legend_title), note)


def alarms_of(stage: StageRecord) -> list[tuple[int, str, str]]:
    """Step, kind and text of each alarm of the training."""
    rows = stage.rows("alarms.jsonl")
    complete_rows = [row for row in rows if isinstance(row.get("step"), int)]
    return [(row["step"], str(row.get("kind")), str(row.get("text"))) for row in complete_rows]


def spread_places(count: int, max_places: int) -> list[int]:
    """At most `max_places` indices of a list of `count`: the first, the last, and evenly between."""
    num_places = min(count, max_places)
    return [round(number * (count - 1) / max(1, num_places - 1)) for number in range(num_places)]


def allot(total: int, stages: Iterable[StageRecord], at_least: int = 0) -> dict[str, int]:
    """By the names of stages, how many of `total` cases each shows: equal shares, and at least so many."""
    names = [stage.name for stage in stages]
    return {name: max(at_least, count) for name, count in zip(names, shares(total, len(names)), strict=True)}


def evaluation_clips(stage: StageRecord, gallery: Gallery, count: int, verb: str) -> Markup:
    """Held-out prompts, and the sound of each at the first evaluation, the last, and some between.

    Args:
        count: prompts.
        verb: what it did to them: `said`.
    """
    step_folders = sorted(
        (int(match[1]), path)
        for path in (stage.folder / "listening").glob("step-*")
        if count and (match := re.fullmatch(r"step-(\d+)", path.name))
    )
    steps = [step_folders[place] for place in spread_places(len(step_folders), MAX_EVALUATIONS)]
    prompts = []
    for row in stage.rows("listening/prompts.jsonl")[:count]:
        file, text = f"{Path(str(row.get('name'))).name}.wav", row.get("text", "")
        clips = [
            element(
                "div",
                element("h5", f"step {step:,}"),
                clip(gallery.clip(path / file), f"{text}, step {step}"),
            )
            for step, path in steps
            if (path / file).is_file()
        ]
        if clips:
            title = [f"“{text}” ", small(row.get("speaker", ""))]
            prompts.append(card(title, element("div", clips, class_="row"), style="example"))
    if not prompts:
        return Markup()
    about = f"the same held-out prompts, at {len(steps)} of {len(step_folders):,} evaluations; all are in TensorBoard"
    return join(heading(f"What it {verb} as it learned", about), prompts)
