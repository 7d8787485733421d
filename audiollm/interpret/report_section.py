"""The section on interpretation: quality over latency, and streams that play: the source above, what was said below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from audiollm.errors import ConfigError
from audiollm.evaluate.interpret.logged_outputs import LOG_NAME, LoggedOutput, read_log
from audiollm.evaluate.interpret.pictures import QualityPoint, quality_over_latency
from audiollm.pages.blocks import (
    Content,
    bold,
    cell,
    clip,
    element,
    figure,
    heading,
    join,
    note,
    notice,
    player,
    small,
    table,
)  # fmt: skip
from audiollm.pages.clips import PageClip
from audiollm.pages.formats import format_number, percent_or_dash
from audiollm.pages.page import Section, Tile
from audiollm.pages.run_record import Row, StageRecord
from audiollm.pages.sections import ReportContext
from audiollm.pages.stage_parts import spread_places
from audiollm.rl.report.record_sounds import RecordSounds

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


def interpretations_section(context: ReportContext) -> Section | None:
    """Every stage `evaluate_interpreter`, side by side."""
    stages = context.stages(KIND)
    if not stages:
        return None
    headings = ["stage", *(name for _, name, _, _ in FIGURES), "right segments", "empty", "streams"]
    about = (
        "the source above, each stage's output below, each word where it comes out; a click plays from there"
    )
    streams = _stream_cards(context, stages)
    content = join(
        table(headings, map(_latency_row, stages)),
        _draw_quality_picture(stages),
        [heading("What is said while it is heard", about), streams] if streams else None,
    )
    return Section(
        "interpretations", "Interpretation", content, tiles=_interpretation_tiles(context.run.last(KIND))
    )


def _interpretation_tiles(stage: StageRecord | None) -> list[Tile]:
    """The quality and the lag of the last stage that interpreted."""
    figures = (stage.figures if stage is not None else None) or {}
    if stage is None or figures.get("chrF") is None or figures.get("AL") is None:
        return []
    about = f"{stage.name}: lag (AL) {figures['AL'] / 1000:.2f} s, n = {figures.get('streams') or 0:,}"
    return [Tile(f"{figures['chrF']:.1f}", "chrF, interpreted live", about)]


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


def _outputs(stage: StageRecord) -> dict[int, LoggedOutput]:
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


def _latency_row(stage: StageRecord) -> list[Content]:
    if stage.absent:
        return [stage.name, cell(stage.absent, colspan=len(FIGURES) + 3, class_="text")]
    figures = stage.figures or {}
    cells = [
        format_number(None if figures.get(key) is None else figures[key] * factor, decimals)
        for key, _, decimals, factor in FIGURES
    ]
    counts = ["–" if figures.get(key) is None else figures[key] for key in ("empty", "streams")]
    return [stage.name, *cells, bold(percent_or_dash(figures.get("right_segments"))), *counts]


def _draw_quality_picture(stages: Sequence[StageRecord]) -> Markup | None:
    """chrF over AL of all stages; None where none has both."""
    figures_by_stage = [(stage.name, stage.figures or {}) for stage in stages]
    points = [
        QualityPoint(name, figures["AL"] / 1000, figures["chrF"])
        for name, figures in figures_by_stage
        if isinstance(figures.get("AL"), int | float) and isinstance(figures.get("chrF"), int | float)
    ]
    if not points:
        return None
    title = ["Quality over latency ", small("up and to the left is better")]
    return figure(Markup(quality_over_latency(points, "AL, s", "chrF")), title, style="plane")


def _stream_cards(context: ReportContext, stages: Sequence[StageRecord]) -> list[Markup]:
    """Some sources, evenly picked, with what each stage said."""
    logs = {stage.name: _outputs(stage) for stage in stages}
    by_name = {stage.name: stage for stage in stages}
    indices = sorted({index for outputs in logs.values() for index in outputs})
    listed = []
    for index in [indices[place] for place in spread_places(len(indices), STREAMS_SHOWN)]:
        outputs = [(name, log[index]) for name, log in logs.items() if index in log]
        source = _source_clip(context, by_name[outputs[0][0]], outputs[0][1])
        speech = [
            (name, context.gallery.clip(by_name[name].folder / output.prediction))
            for name, output in outputs
            if output.is_speech
        ]
        listed.append(_stream(outputs, source, speech))
    return listed


def _stream(
    outputs: Sequence[tuple[str, LoggedOutput]], source: PageClip, speech: Sequence[tuple[str, PageClip]]
) -> Markup:
    """A source with the words of all outputs where they come out, and their speech."""
    first = outputs[0][1]
    name, source_s = _id(first) or f"stream {first.index}", first.source_length / 1000
    duration_s = source.duration_s if source.duration_s and source.cut else max(source_s, source.duration_s)
    # where the sound ends earlier than the timeline, its picture does, too
    share = round(100 * min(1.0, source.duration_s / duration_s), 2) if source.duration_s else 100
    image = source.spectrogram and element(
        "img", src=source.spectrogram.image, alt="spectrogram of the source", style=f"width:{share}%"
    )
    timeline = stream_timeline(duration_s, outputs)
    ticks = [element("span", text, style=f"left:{place}%") for place, text in timeline["ticks"]]
    tracks = element(
        "div",
        element("div", image, class_="source"),
        map(_word_track, timeline["tracks"]),
        element("div", ticks, class_="ticks", aria_hidden="true"),
        element("i", class_="now", hidden=True),
        class_="tracks",
        style=f"width:{timeline['width']}px",
        data_seconds=timeline["duration_s"],
    )
    return element(
        "article",
        element("h4", name, class_="file"),
        notice(f"No sound: {source.problem}") if source.problem else None,
        element("div", tracks, class_="interpreted"),
        player(source, f"source of {name}"),
        note(f"reference: {first.reference}"),
        [join(element("h5", stage), clip(sound, f"the speech of {stage}")) for stage, sound in speech],
        class_="card",
    )


def _word_track(track: Mapping[str, Any]) -> Markup:
    words = [
        element(
            "span",
            word["text"],
            class_="word",
            data_at=word["at"],
            style=f"left:{word['left']}%;top:{1.05 + 1.3 * word['lane']}rem",
        )
        for word in track["words"]
    ]
    return element(
        "div",
        small(track["name"]),
        words or element("span", "nothing", class_="word silent"),
        class_="said-track",
        style=f"height:{1.3 * track['lanes'] + 1.1}rem",
    )


def _source_clip(context: ReportContext, stage: StageRecord, output: LoggedOutput) -> PageClip:
    """The sound of a source: its file, or that of its record in the manifests before the shards."""
    if isinstance(output.source, str) and output.source and Path(output.source).is_file():
        return context.gallery.clip(Path(output.source))
    sounds = RecordSounds(context, stage)
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
