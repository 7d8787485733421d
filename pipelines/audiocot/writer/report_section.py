"""The section on models that write chains of thought: scores by question and stage, and answers beside the truth."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from audiollm.pages.blocks import (
    card,
    cards,
    clip,
    element,
    file_label,
    heading,
    join,
    note,
    notice,
    score_cell,
    small,
    table,
)  # fmt: skip
from audiollm.pages.clips import Gallery
from audiollm.pages.formats import percent_or_dash
from audiollm.pages.page import Section, Tile
from audiollm.pages.run_record import Row, StageRecord, pick_evenly
from audiollm.pages.sections import ReportContext

KIND = "evaluate_thoughts"
QUESTIONS = {"clip": "The CoT of a clip", "region": "The CoT of an object", "instruction": "Instructions"}
ANSWERS_SHOWN = 9
"""Answers of the first stage that are shown with their sound."""


def thoughts_section(context: ReportContext) -> Section | None:
    """Every stage `evaluate_thoughts`: a table by kind of question, a row a stage, and answers of the first stage."""
    stages = context.stages(KIND)
    if not stages:
        return None
    content = join(
        [notice(f"{stage.name}: {stage.absent}") for stage in stages if stage.absent],
        [_measures_table(stages, question, title) for question, title in QUESTIONS.items()],
        _cards(stages[0], context.gallery),
    )
    return Section("thoughts", "Chains of thought", content, tiles=_thought_tiles(stages))


def _thought_tiles(stages: Sequence[StageRecord]) -> list[Tile]:
    """Events that the first writer names right, in the clips that it is asked about."""
    for stage in stages:
        scores = _read_measures(stage, "clip").get("events named (F1)") or {}
        if scores.get("accuracy") is None:
            continue
        interval = f"{percent_or_dash(scores.get('low'))} to {percent_or_dash(scores.get('high'))}"
        about = f"{stage.name}: F1 of {scores.get('n') or 0:,} events of clips never heard, {interval}"
        return [Tile(percent_or_dash(scores["accuracy"]), "sounds named in CoTs", about)]
    return []


# Private


def _read_measures(stage: StageRecord, question: str) -> Mapping[str, Any]:
    tables = (stage.figures or {}).get("tables")
    measures = tables.get(question) if isinstance(tables, Mapping) else None
    return measures if isinstance(measures, Mapping) else {}


def _measures_table(stages: Sequence[StageRecord], question: str, title: str) -> Markup | None:
    """Measures that any stage has for a kind of question, and a row of cells for each stage that was asked it."""
    asked = [(stage, measures) for stage in stages if (measures := _read_measures(stage, question))]
    if not asked:
        return None
    headings = list(dict.fromkeys(name for _, measures in asked for name in measures))
    rows = []
    for stage, measures in asked:
        control = (stage.figures or {}).get("control")
        cells = [score_cell(measures.get(name) or {}) for name in headings]
        rows.append(([stage.name, control and [" ", small(control)]], *cells))
    return join(heading(title), table(["stage", *headings], rows, "scores"))


def _cards(stage: StageRecord, gallery: Gallery) -> Markup | None:
    """Answers of a stage, of every kind, right and wrong ones."""
    rows = stage.rows("rows.jsonl")
    listed = [_answer_card(rows[i], stage, gallery) for i in pick_evenly(rows, ANSWERS_SHOWN, ("question",))]
    return join(heading("Answers", "beside the truth"), cards(listed, "wide-cards")) if listed else None


def _answer_card(row: Row, stage: StageRecord, gallery: Gallery) -> Markup:
    id, sound, problem = row.get("id", ""), row.get("sound"), row.get("problem") or ""
    return card(
        QUESTIONS.get(str(row.get("question")), ""),
        element("p", row.get("asked", ""), class_="said small"),
        clip(gallery.clip(stage.folder / str(sound)), f"sound of {id}") if sound else None,
        element("h5", "written"),
        note(row.get("prose") or row.get("answer") or "nothing"),
        notice(problem) if problem else None,
        element("h5", "true"),
        note(json.dumps(row.get("truth"), ensure_ascii=False)),
        file_label(id, tag="p"),
        style="bad" if problem else "",
    )
