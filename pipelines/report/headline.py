"""The large figures at the top of the page: a value, its title, and a note on its origin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.evaluate.report.formats import duration, megabytes, percent_or_dash
from pipelines.report.material import Material, Row
from pipelines.report.policies.interpretations import interpretation_tiles
from pipelines.report.policies.section import policy_tiles
from pipelines.report.policies.written_thoughts import thought_tiles
from pipelines.report.preferences.section import preference_tiles
from pipelines.report.sounds import sound_tiles

MAX_ANSWERING = 6
"""Stages `evaluate_listening` that have a tile each; of more, the best one has."""


def headline(material: Material, summary: Mapping[str, Any]) -> list[Row]:
    """The figures at the top of the page: voice, answers, time and memory.

    Where a recipe evaluates speech several times, each has one tile with what its main judge says.
    """
    voice_figures = [(stage.name, stage.figures) for stage in material.stages("evaluate") if stage.figures]
    if len(material.stages("evaluate")) > 1:
        tiles = [_voice_tile(name, figures) for name, figures in voice_figures]
    else:
        tiles = [tile for _, figures in voice_figures for tile in _voice_tiles(figures)]
    tiles += [*preference_tiles(material), *policy_tiles(material), *interpretation_tiles(material)]
    tiles += thought_tiles(material)
    tiles += sound_tiles(material)
    answering = material.stages("evaluate_listening")
    if len(answering) > MAX_ANSWERING:
        scored = [stage for stage in answering if (stage.figures or {}).get("accuracy") is not None]
        answering = sorted(scored, key=lambda stage: -(stage.figures or {})["accuracy"])[:1]
        tiles += [
            tile
            | {"title": f"right answers, the best of {len(scored)}", "note": f"{stage.name}: {tile['note']}"}
            for stage in answering
            for tile in _answer_tiles(stage.figures or {}, "")[:1]
        ]
    else:
        for stage in answering:
            tiles += _answer_tiles(stage.figures or {}, stage.name if len(answering) > 1 else "")
    seconds, memory = dict(summary["seconds"]), summary["memory_mb"]
    total = seconds.pop("total")
    longest, largest = max(seconds, key=seconds.__getitem__), max(memory, key=memory.__getitem__)
    tiles.append(_tile(duration(total), "total time", f"longest: {longest}, {duration(seconds[longest])}"))
    tiles.append(_tile(megabytes(summary["peak_memory_mb"]), "peak memory", f"in {largest}"))
    return [tile for tile in tiles if tile is not None]


def warnings_of(material: Material) -> list[Row]:
    """Return the warnings of all stages: a model that is worse than its start, a training that was stopped."""
    return [
        {"stage": name, "text": str(text)}
        for name, result in material.results.items()
        for text in (result.figures or {}).get("warnings") or ()
    ]


def _tile(value: str, title: str, note: str) -> Row:
    return {"value": value, "title": title, "note": note}


def _voice_tiles(figures: Row) -> list[Row | None]:
    main = str(figures.get("judge") or "")
    tiles = [_text_tile(figures, main, "", "relative_accuracy")]
    if not main.startswith("pocketsphinx"):
        tiles.append(_text_tile(figures, "pocketsphinx", "pocketsphinx_", "pocketsphinx_relative"))
    voice = figures.get("speaker_generated_accuracy")
    if voice is not None:
        real = percent_or_dash(figures.get("speaker_real_accuracy"))
        tiles.append(
            _tile(percent_or_dash(voice), "right voice", f"classifier of the voices: {real} on real takes")
        )
    return tiles


def _text_tile(figures: Row, judge: str, prefix: str, relative: str) -> Row | None:
    if figures.get(relative) is None:
        return None
    real, generated = figures.get(f"{prefix}real_accuracy"), figures.get(f"{prefix}generated_accuracy")
    note = f"{judge}: {percent_or_dash(generated)} generated, {percent_or_dash(real)} real"
    return _tile(percent_or_dash(figures[relative]), "right text, relative to real", note)


def _voice_tile(name: str, figures: Row) -> Row | None:
    """The figure of one stage of several: the main judge's score, with the voice in the note."""
    tile = _text_tile(figures, str(figures.get("judge") or ""), "", "relative_accuracy")
    if tile is None:
        return None
    voice = figures.get("speaker_generated_accuracy")
    note = tile["note"] + (f"; right voice {percent_or_dash(voice)}" if voice is not None else "")
    return tile | {"title": f"{name}: {tile['title']}", "note": note}


def _answer_tiles(figures: Row, name: str) -> list[Row]:
    """Right answers beside chance, and word errors by language."""
    before = f"{name}: " if name else ""
    tiles = []
    if figures.get("accuracy") is not None:
        interval = f"{percent_or_dash(figures.get('low'))} to {percent_or_dash(figures.get('high'))}"
        chance = percent_or_dash(figures.get("chance"))
        note = f"{figures.get('questions') or 0:,} questions: {interval}; chance {chance}"
        tiles.append(_tile(percent_or_dash(figures["accuracy"]), f"{before}right answers", note))
    rates = {
        language: rate for language, rate in (figures.get("error_rate") or {}).items() if rate is not None
    }
    for language, rate in rates.items():
        note = f"{language}: {figures.get('recordings') or 0:,} recordings" if len(rates) == 1 else language
        tiles.append(_tile(percent_or_dash(rate), f"{before}word error rate", note))
    return tiles
