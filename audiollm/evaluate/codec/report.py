"""The page of a codec evaluation: one self-contained HTML file with tables, charts, players and spectrograms.

Shapes: K codebooks, T frames, N samples.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from markupsafe import Markup, escape

from audiollm.audio import AudioError, Waveform, load
from audiollm.codec import Codec
from audiollm.evaluate.codec.evaluation import COMPARISON_RATE, EvaluationClip, match_reference
from audiollm.evaluate.codec.scores import METRICS
from audiollm.evaluate.report.clips import Gallery, PageClip
from audiollm.evaluate.report.page import MAX_SOUND_BYTES, render_template
from audiollm.evaluate.report.remedies import with_remedy
from audiollm.evaluate.report.spectrograms import DYNAMIC_RANGE_DB, mel_decibels
from audiollm.files.atomic import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXAMPLE_S = 8.0
COLOURS = 6
"""Number of distinct codec colours; further codecs reuse them."""
_INK, _LINE = "#010203", "#010204"
_SERIES = tuple(f"#0105{index:02d}" for index in range(COLOURS))
_PAGE_COLOURS = {_INK: "currentColor", _LINE: "var(--line)"} | {
    stand_in: f"var(--c{index})" for index, stand_in in enumerate(_SERIES)
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "audiollm",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.parse_math": False,  # names are shown as they are written: `$\\x$` is no formula
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _LINE,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "figure.facecolor": "none",
}


def write_codec_report(
    path: Path,
    result: Mapping[str, Any],
    codecs: Mapping[str, Codec],
    clips: Sequence[EvaluationClip],
    num_examples: int,
) -> Path:
    """Write the page of `results.json`; the first clips of each kind in turn can be heard in it.

    Args:
        result: what `evaluate_codec` returned.
        clips: those that were scored; up to `num_examples` of them are coded again, 8 s of each.
    """
    colours = {name: f"var(--c{index % COLOURS})" for index, name in enumerate(codecs)}
    gallery = Gallery(most_bytes=MAX_SOUND_BYTES, lossless=True)
    examples = _codec_examples(codecs, clips, num_examples, gallery)
    set_aside = [(item["path"], item["reason"]) for item in result["set_aside"]]
    prefixes = prefix_charts(result)
    titles = {
        "codecs": "Codecs",
        "scores": "Scores",
        **({"prefixes": "Fewer codebooks"} if prefixes else {}),
        "codebooks": "Codebooks",
        **({"examples": "Listen"} if examples else {}),
        **({"set_aside": "Set aside"} if set_aside else {}),
    }
    page = render_template(
        "codec_report.html",
        page_kind="audiollm evaluation",
        name="Codecs side by side",
        tiles=(),
        warnings=(),
        titles=titles,
        codec_rows=_codec_rows(result),
        dynamic_range=f"{DYNAMIC_RANGE_DB:g}",
        num_silent=gallery.num_silent,
        result=result,
        colours=colours,
        tables=[score_table(result, kind) for kind in result["clips"]],
        metric_charts=metric_charts(result),
        codebook_charts=codebook_charts(result),
        prefix_charts=prefixes,
        examples=examples,
        seconds=EXAMPLE_S,
        set_aside=set_aside,
    )
    write_text(path, page)
    return path


def _codec_rows(result: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Properties and costs of the codecs: a title and one text per codec; empty rows are left out."""
    rows: dict[str, list[str]] = {}
    for codec in result["codecs"].values():
        frames, usage, perplexity = (codec["codebooks"][key] for key in ("frames", "usage", "perplexity"))
        parameters, failed = codec.get("parameters"), codec["failed_clips"]
        cells = {
            "bitrate": f"{codec['bitrate_bps'] / 1000:.2f} kbit/s",
            "codebooks": f"{codec['num_codebooks']} × {codec['codebook_size']:,} codes",
            "frames per second": f"{codec['frame_rate']:g}",
            "sample rate": f"{codec['sample_rate']:,} Hz",
            "parameters": f"{parameters / 1e6:.1f} M" if parameters else "",
            "codes used": f"{100 * min(usage):.0f} to {100 * max(usage):.0f} % of {frames:,} frames",
            "perplexity": f"{min(perplexity):.0f} to {max(perplexity):.0f}",
            "clips that it failed on": f"{failed:,}" if failed else "",
        }
        for what in ("encode", "decode"):
            seconds = codec["speed"][f"{what}_cpu_s_per_audio_s"]
            cells[f"{what}, CPU-s per second of audio"] = (
                "not timed: every clip failed or was scored before" if seconds is None else f"{seconds:.4f}"
            )
        for title, text in cells.items():
            rows.setdefault(title, []).append(text)
    return [(title, texts) for title, texts in rows.items() if any(texts)]


def score_table(result: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """A row per metric that has a value for this kind of clip, a cell per codec; the others with their reasons."""
    of_codecs = [scores["kinds"].get(kind, {}) for scores in result["codecs"].values()]
    original = result["original"].get(kind, {})
    has_original = any(table["n"] for table in original.values())
    columns = [original, *of_codecs] if has_original else of_codecs
    rows, absent = [], dict[str, list[str]]()
    for name in result["metrics"]:
        metric = METRICS[name]
        tables = [tables.get(name) for tables in of_codecs]
        if not any((column.get(name) or {}).get("n") for column in columns):
            reasons = {reason for table in tables if table for reason in table["reasons"]}
            why = "; ".join(with_remedy(reason) for reason in sorted(reasons)) or "no clip"
            absent.setdefault(why, []).append(metric.title)
            continue
        best = _best_mean(tables, name)
        cells = [_page_cell(original.get(name), name)] if has_original else []
        cells += [_page_cell(table, name, best) for table in tables]
        rows.append(
            {"title": metric.title, "higher": metric.higher_is_better, "unit": metric.unit, "cells": cells}
        )
    sizes = result["clips"][kind]
    return {"kind": kind, **sizes, "has_original": has_original, "rows": rows, "absent": absent}


def _best_mean(tables: Sequence[Mapping[str, Any] | None], metric: str) -> float | None:
    means = [table["mean"] for table in tables if table and table["mean"] is not None]
    if len(means) < 2:
        return None
    return max(means) if METRICS[metric].higher_is_better else min(means)


def _page_cell(table: Mapping[str, Any] | None, metric: str, best: float | None = None) -> dict[str, Any]:
    if table is None:
        return {"text": "", "note": "", "best": False, "missing": ""}
    digits = METRICS[metric].digits
    missing = "; ".join(f"{count} × {with_remedy(reason)}" for reason, count in table["reasons"].items())
    if table["mean"] is None:
        return {"text": "n/a", "note": "", "best": False, "missing": missing}
    return {
        "text": f"{table['mean']:.{digits}f}",
        "note": f"median {table['median']:.{digits}f}",
        "best": table["mean"] == best,
        "missing": f"n {table['n']}; n/a: {missing}" if missing else "",
    }


# ------------------------------------------------------------------------------------------------- charts


def metric_charts(result: Mapping[str, Any]) -> list[Markup]:
    """For each metric that has a value, its mean by kind of clip, a bar for each codec."""
    charts = []
    for metric in result["metrics"]:
        kinds = [
            kind
            for kind in result["clips"]
            if any(
                _metric_mean(scores["kinds"], kind, metric) is not None
                for scores in result["codecs"].values()
            )
        ]
        if not kinds:
            continue
        bars = {
            name: [_metric_mean(scores["kinds"], kind, metric) for kind in kinds]
            for name, scores in result["codecs"].items()
        }
        charts.append(
            _chart(_metric_title(metric), lambda axes, bars=bars, kinds=kinds: _draw_bars(axes, bars, kinds))
        )
    return charts


def codebook_charts(result: Mapping[str, Any]) -> list[Markup]:
    """Share of used codes and perplexity, by codebook."""
    charts = []
    for key, title in (("usage", "share of codes used"), ("perplexity", "perplexity")):
        lines = {
            name: list(enumerate(scores["codebooks"][key], start=1))
            for name, scores in result["codecs"].items()
        }
        charts.append(
            _chart(title, lambda axes, lines=lines: _draw_lines(axes, lines, "codebook", floor=True))
        )
    return charts


def prefix_charts(result: Mapping[str, Any]) -> list[Markup]:
    """Each metric against the bitrate, by kind of clip, for codecs that were scored with fewer codebooks, too."""
    charts = []
    if all(len(scores["prefixes"]) < 2 for scores in result["codecs"].values()):
        return []
    for metric in result["metrics"]:
        for kind in result["clips"]:
            lines = {}
            for name, scores in result["codecs"].items():
                points = [
                    (scores["prefix_bitrates_bps"][number] / 1000, mean)
                    for number, kinds in scores["prefixes"].items()
                    if (mean := _metric_mean(kinds, kind, metric)) is not None
                ]
                if points:
                    lines[name] = points
            if lines:
                charts.append(
                    _chart(
                        f"{_metric_title(metric)}, {kind}",
                        lambda axes, lines=lines: _draw_lines(axes, lines, "kbps"),
                    )
                )
    return charts


def _metric_mean(kinds: Mapping[str, Any], kind: str, metric: str) -> float | None:
    table = kinds.get(kind, {}).get(metric)
    return None if table is None else table["mean"]


def _metric_title(metric: str) -> str:
    definition = METRICS[metric]
    unit = f" ({definition.unit})" if definition.unit else ""
    return f"{definition.title}{unit} {'↑' if definition.higher_is_better else '↓'}"


def _draw_bars(axes: Axes, bars: Mapping[str, Sequence[float | None]], kinds: Sequence[str]) -> None:
    width = 0.8 / len(bars)
    for index, values in enumerate(bars.values()):
        places = [at - 0.4 + (index + 0.5) * width for at in range(len(kinds))]
        heights = [0.0 if value is None else value for value in values]
        axes.bar(places, heights, width * 0.9, color=_SERIES[index % COLOURS])
    axes.set_xticks(range(len(kinds)), kinds)
    axes.tick_params(length=0)


def _draw_lines(
    axes: Axes, lines: Mapping[str, Sequence[tuple[float, float]]], x_label: str, floor: bool = False
) -> None:
    from matplotlib.ticker import MaxNLocator

    for index, points in enumerate(lines.values()):
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=_SERIES[index % COLOURS], marker="o", markersize=3.4, linewidth=1.5)
    if floor:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=x_label == "codebook"))
    axes.tick_params(length=3, width=0.6)


def _chart(title: str, draw: Any) -> Markup:
    """An inline SVG that takes the page's colours, under its title."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(3.3, 2.2), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue().decode()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    view_box = re.search(r'viewBox="([^"]*)"', svg)
    assert view_box is not None
    head = f'<svg class="chart" viewBox="{view_box.group(1)}" role="img" aria-label="{escape(title)}">'
    svg = head + svg[svg.index(">") + 1 :]
    # ids are local to a figure and would clash on one page
    prefix = re.sub(r"\W", "", title)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    for stand_in, colour in _PAGE_COLOURS.items():
        svg = svg.replace(stand_in, colour)
    return Markup(f'<figure class="card"><figcaption>{escape(title)}</figcaption>{svg}</figure>')


# ----------------------------------------------------------------------------------------------- examples


def _codec_examples(
    codecs: Mapping[str, Codec], clips: Sequence[EvaluationClip], number: int, gallery: Gallery
) -> list[dict[str, Any]]:
    """Clips with the sound and the spectrogram of the original and of each codec, up to the page's limit of sound."""
    examples: list[dict[str, Any]] = []
    for clip in _alternate_kinds(clips):
        if len(examples) == number or gallery.num_silent:
            break
        try:
            end_s = clip.start_s + EXAMPLE_S
            recording = load(
                clip.path, clip.start_s, end_s if clip.end_s is None else min(end_s, clip.end_s), mono=True
            )
        except AudioError:  # named among those set aside
            continue
        sounds = _original_and_decoded_sounds(recording, codecs, gallery)
        span = f"{recording.duration_s:.1f} s from {clip.start_s:.1f} s"
        examples.append(
            {"name": clip.path.name, "kind": clip.kind, "text": clip.text, "span": span, "sounds": sounds}
        )
    return examples


def _alternate_kinds(clips: Sequence[EvaluationClip]) -> list[EvaluationClip]:
    """The clips in turn by kind: the first of each kind, then the second of each, ..."""
    counts: dict[str, int] = {}
    ranked = []
    for clip in clips:
        counts[clip.kind] = counts.get(clip.kind, 0) + 1
        ranked.append((counts[clip.kind], clip))
    return [clip for _, clip in sorted(ranked, key=lambda pair: pair[0])]


def _original_and_decoded_sounds(
    recording: Waveform, codecs: Mapping[str, Codec], gallery: Gallery
) -> list[tuple[str, PageClip]]:
    reference = recording.resample(COMPARISON_RATE)
    loudest_db = float(mel_decibels(reference.samples_CN[0].numpy(), COMPARISON_RATE).max())
    sounds = [("original", gallery.clip_of(reference))]
    for name, codec in codecs.items():
        try:
            with torch.no_grad():
                codes_KT = codec.encode(recording.resample(codec.sample_rate).samples_CN)
                decoded_1N = match_reference(codec.decode(codes_KT).cpu(), codec.sample_rate, reference)
            decoded = Waveform(decoded_1N, COMPARISON_RATE)
            sounds.append((name, gallery.clip_of(decoded, loudest_db)))
        except Exception as error:  # counted in the scores, too
            sounds.append((name, PageClip(problem=f"{type(error).__name__}: {error}")))
    return sounds
