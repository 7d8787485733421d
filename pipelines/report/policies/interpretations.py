"""The section on interpretation: quality over latency, and streams that play: the source above, what was said below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from audiollm.errors import ConfigError
from audiollm.evaluate.interpret.logged_outputs import LOG_NAME, LoggedOutput, read_log
from audiollm.evaluate.interpret.pictures import QualityPoint, quality_over_latency
from audiollm.evaluate.report.clips import Gallery, PageClip
from audiollm.evaluate.report.formats import format_number, percent_or_dash
from pipelines.report.curves import spread_places
from pipelines.report.material import Material, Row, Trace
from pipelines.report.preferences.sounds import RecordSounds

KIND = "evaluate_interpreter"
STREAMS_SHOWN = 4
"""Streams that the page plays, each with the outputs of all stages."""
PIXELS_PER_SECOND, MIN_PIXELS = 90, 560
"""Width of a timeline."""
PIXELS_PER_LETTER, MAX_LANES = 7.5, 4
"""Words that would lie over one another go to lanes of their own."""
FIGURES = (
    ("AL", "AL, s", 2, 0.001),
    ("LAAL", "LAAL, s", 2, 0.001),
    ("chrF", "chrF", 1, 1.0),
    ("BLEU", "BLEU", 1, 1.0),
)
"""Figure of a stage, its heading, decimals, and its factor: latencies are logged in ms."""


def interpretations_section(material: Material, gallery: Gallery) -> Row:
    """Every stage `evaluate_interpreter`, side by side; `absent` where the recipe has none."""
    stages = material.stages(KIND)
    if not stages:
        return {"absent": f"This recipe has no stage {KIND}.", "rows": [], "picture": "", "streams": []}
    logs = {stage.name: _outputs(stage) for stage in stages}
    return {
        "absent": "",
        "headings": [heading for _, heading, _, _ in FIGURES],
        "rows": [_build_interpretation_row(stage) for stage in stages],
        "picture": _draw_quality_picture(stages),
        "streams": _build_stream_entries(material, stages, logs, gallery),
    }


def interpretation_tiles(material: Material) -> list[Row]:
    """The quality and the lag of the last stage that interpreted."""
    stage = material.last(KIND)
    figures = (stage.figures if stage is not None else None) or {}
    if stage is None or figures.get("chrF") is None or figures.get("AL") is None:
        return []
    note = f"{stage.name}: lag (AL) {figures['AL'] / 1000:.2f} s, n = {figures.get('streams') or 0:,}"
    return [{"value": f"{figures['chrF']:.1f}", "title": "chrF, interpreted live", "note": note}]


def stream_timeline(duration_s: float, outputs: Sequence[tuple[str, LoggedOutput]]) -> Row:
    """Return the places of the words of several outputs to one source, in percent of the timeline.

    Args:
        duration_s: of the sound that plays; words behind it are left out.
        outputs: name and output of each stage.
    """
    width = max(MIN_PIXELS, PIXELS_PER_SECOND * duration_s)
    tracks = []
    for name, output in outputs:
        ends = [-1.0] * MAX_LANES
        words: list[Row] = []
        for word, at_s in _timed_words(output):
            if at_s > duration_s + 1e-6:
                continue
            x = at_s / duration_s * width
            lane = min(
                range(MAX_LANES),
                key=lambda number: (ends[number] > x, number if ends[number] <= x else ends[number]),
            )
            ends[lane] = max(ends[lane], x) + PIXELS_PER_LETTER * len(word) + 8
            words.append(
                {"text": word, "left": round(100 * x / width, 3), "lane": lane, "at": round(at_s, 3)}
            )
        lanes = 1 + max((word["lane"] for word in words), default=0)
        tracks.append({"name": name, "words": words, "lanes": lanes})
    ticks = [(round(100 * second / duration_s, 3), f"{second} s") for second in range(int(duration_s) + 1)]
    return {"width": round(width), "duration_s": round(duration_s, 3), "tracks": tracks, "ticks": ticks}


# Private


def _outputs(stage: Trace) -> dict[int, LoggedOutput]:
    """The outputs of a stage by the index of their source; none where there is no log, or a damaged one."""
    path = stage.folder / LOG_NAME
    if stage.figures is None or not path.is_file():
        return {}
    try:
        outputs, bad = read_log(stage.folder)
    except ConfigError as error:
        stage.damage[path] = f"{error.message}: it is left out"
        return {}
    if bad:
        stage.damage[path] = f"{len(bad)} lines left out: {bad[0].reason}"
    return {output.index: output for output in outputs}


def _build_interpretation_row(stage: Trace) -> Row:
    figures = stage.figures or {}
    cells = [
        format_number(None if figures.get(key) is None else figures[key] * factor, decimals)
        for key, _, decimals, factor in FIGURES
    ]
    return {
        "name": stage.name,
        "absent": stage.absent,
        "cells": cells,
        "right": percent_or_dash(figures.get("right_segments")),
        "empty": figures.get("empty"),
        "streams": figures.get("streams"),
    }


def _draw_quality_picture(stages: Sequence[Trace]) -> str:
    """chrF over AL of all stages; empty where none has both."""
    figures_by_stage = [(stage.name, stage.figures or {}) for stage in stages]
    points = [
        QualityPoint(name, figures["AL"] / 1000, figures["chrF"])
        for name, figures in figures_by_stage
        if isinstance(figures.get("AL"), int | float) and isinstance(figures.get("chrF"), int | float)
    ]
    return quality_over_latency(points, "AL, s", "chrF") if points else ""


def _build_stream_entries(
    material: Material, stages: Sequence[Trace], logs: dict[str, dict[int, LoggedOutput]], gallery: Gallery
) -> list[Row]:
    """Some sources, evenly picked, with what each stage said."""
    indices = sorted({index for outputs in logs.values() for index in outputs})
    selected_indices = [indices[place] for place in spread_places(len(indices), STREAMS_SHOWN)]
    streams = []
    by_name = {stage.name: stage for stage in stages}
    for index in selected_indices:
        outputs = [(name, log[index]) for name, log in logs.items() if index in log]
        first = outputs[0][1]
        clip = _source_clip(material, by_name[outputs[0][0]], first, gallery)
        source_s = first.source_length / 1000
        duration_s = clip.duration_s if clip.duration_s and clip.cut else max(source_s, clip.duration_s)
        streams.append(
            {
                "name": _id(first) or f"stream {index}",
                "reference": first.reference,
                "clip": clip,
                # where the sound ends earlier than the timeline, its picture does, too
                "share": round(100 * min(1.0, clip.duration_s / duration_s), 2) if clip.duration_s else 100,
                "speech": [
                    (name, gallery.clip(by_name[name].folder / output.prediction))
                    for name, output in outputs
                    if output.is_speech
                ],
                **stream_timeline(duration_s, outputs),
            }
        )
    return streams


def _source_clip(material: Material, stage: Trace, output: LoggedOutput, gallery: Gallery) -> PageClip:
    """The sound of a source: its file, or that of its record in the manifests before the shards."""
    if isinstance(output.source, str) and output.source and Path(output.source).is_file():
        return gallery.clip(Path(output.source))
    sounds = RecordSounds(material, stage, gallery)
    id = _id(output)
    sounds.find([id])
    return sounds.clip(id, {"path": str(output.source or id), "part": 0})


def _id(output: LoggedOutput) -> str:
    """The sample's id, where the log tells it."""
    return str((output.model_extra or {}).get("id") or "")


def _timed_words(output: LoggedOutput) -> list[tuple[str, float]]:
    """Words and the times at which they came out, in seconds; pieces of speech by their number."""
    words: Sequence[Any] = output.prediction.split()
    if output.is_speech:
        words = [f"♪{number}" for number, _ in enumerate(output.delays, start=1)]
    return [(str(word), time / 1000) for word, time in zip(words, output.delays, strict=False)]
