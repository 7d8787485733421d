"""The section on models that write chains of thought: scores by question and stage, and answers beside the truth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from audiollm.evaluate.report.clips import Gallery
from audiollm.evaluate.report.formats import percent_or_dash
from pipelines.report.material import Material, Row, Trace, pick_evenly

KIND = "evaluate_thoughts"
QUESTIONS = {"clip": "The CoT of a clip", "region": "The CoT of an object", "instruction": "Instructions"}
ANSWERS_SHOWN = 9
"""Answers of the first stage that are shown with their sound."""


def thoughts_section(material: Material, gallery: Gallery) -> Row:
    """Every stage `evaluate_thoughts`: a table by kind of question, a row a stage, and answers of the first stage."""
    stages = material.stages(KIND)
    tables = [
        {"title": title, "headings": headings, "rows": rows}
        for question, title in QUESTIONS.items()
        for headings, rows in [_tabulate_measures(stages, question)]
        if rows
    ]
    return {
        "absent": "" if stages else f"This recipe has no stage {KIND}.",
        "missing": [(stage.name, stage.absent) for stage in stages if stage.absent],
        "tables": tables,
        "cards": _cards(stages[0], gallery) if stages else [],
    }


def thought_tiles(material: Material) -> list[Row]:
    """Events that the first writer names right, in the clips that it is asked about."""
    for stage in material.stages(KIND):
        table = _read_measures(stage, "clip").get("events named (F1)") or {}
        if table.get("accuracy") is None:
            continue
        interval = f"{percent_or_dash(table.get('low'))} to {percent_or_dash(table.get('high'))}"
        note = f"{stage.name}: F1 of {table.get('n') or 0:,} events of clips never heard, {interval}"
        return [{"value": percent_or_dash(table["accuracy"]), "title": "sounds named in CoTs", "note": note}]
    return []


# Private


def _read_measures(stage: Trace, question: str) -> Mapping[str, Any]:
    tables = (stage.figures or {}).get("tables")
    measures = tables.get(question) if isinstance(tables, Mapping) else None
    return measures if isinstance(measures, Mapping) else {}


def _tabulate_measures(stages: list[Trace], question: str) -> tuple[list[str], list[Row]]:
    """Measures that any stage has for a kind of question, and a row of cells for each stage that was asked it."""
    stage_measures = [(stage, _read_measures(stage, question)) for stage in stages]
    stage_measures = [(stage, measures) for stage, measures in stage_measures if measures]
    headings = list(dict.fromkeys(name for _, measures in stage_measures for name in measures))
    rows = [
        {
            "name": stage.name,
            "control": (stage.figures or {}).get("control") or "",
            "cells": [_format_measure_cell(measures.get(name) or {}) for name in headings],
        }
        for stage, measures in stage_measures
    ]
    return headings, rows


def _format_measure_cell(table: Mapping[str, Any]) -> Row:
    return {
        "value": table.get("accuracy"),
        "low": table.get("low"),
        "high": table.get("high"),
        "n": table.get("n"),
    }


def _cards(stage: Trace, gallery: Gallery) -> list[Row]:
    """Answers of a stage, of every kind, right and wrong ones."""
    rows = stage.rows("rows.jsonl")
    cards = []
    for index in pick_evenly(rows, ANSWERS_SHOWN, ("question",)):
        row = rows[index]
        sound = row.get("sound")
        cards.append(
            {
                "title": QUESTIONS.get(str(row.get("question")), ""),
                "id": row.get("id", ""),
                "asked": row.get("asked", ""),
                "truth": json.dumps(row.get("truth"), ensure_ascii=False),
                "answer": row.get("answer") or "nothing",
                "problem": row.get("problem") or "",
                "prose": row.get("prose") or "",
                "clip": gallery.clip(stage.folder / str(sound)) if sound else None,
            }
        )
    return cards
