"""The page of a codec evaluation: one self-contained HTML file with tables, charts, players and spectrograms.

Shapes: K codebooks, T frames, N samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup

from audiollm.audio import AudioError, Waveform, load
from audiollm.codec import Codec
from audiollm.evaluate.codec.evaluation import COMPARISON_RATE, EvaluationClip, match_reference
from audiollm.evaluate.codec.scores import METRICS
from audiollm.evaluate.report.remedies import with_remedy
from audiollm.pages.blocks import (
    Cell,
    Chart,
    bold,
    cell,
    charts,
    element,
    example,
    heading,
    join,
    named_clips,
    note,
    notice,
    reasons_table,
    small,
    table,
)  # fmt: skip
from audiollm.pages.charts import DISTINCT_COLOURS, bar_chart, line_chart
from audiollm.pages.clips import Gallery, PageClip
from audiollm.pages.page import MAX_SOUND_BYTES, Page, Section
from audiollm.pages.spectrograms import mel_decibels

ABOUT_SCORES = (
    "Means over clips, compared at 24 kHz. A codec is underlined where it is better than each other one beyond chance: "
    "the 95 % interval of their difference over the same clips, 8 or more, drawn anew, lies on its side of 0. "
    "Where a metric has no value for a clip, the clip is left out of its mean and the reason is counted. The original "
    "is heard by what needs no reference; ≈ original: a codec is to have the original's value. Word errors are over "
    "all words."
)
ABOUT_CODEBOOKS = (
    "Share of the codes of each codebook that occur at all, and exp of the entropy of their use. Over few frames both "
    "are bounded by the number of frames."
)
ABOUT_PREFIXES = (
    "Means over the same clips. The axes begin where the values do, and not at 0: a line may look steep over a "
    "difference that is within chance."
)
EXAMPLE_S = 8.0


@dataclass(frozen=True)
class _Dots:
    """The codecs with their colours."""

    names: Sequence[str]

    def dot(self, name: str) -> Markup:
        if name not in self.names:
            return Markup()
        colour = DISTINCT_COLOURS[list(self.names).index(name) % len(DISTINCT_COLOURS)]
        return element("span", class_="dot", style=f"background:{colour}")

    def dotted_names(self) -> list[Markup]:
        return [join(self.dot(name), name) for name in self.names]

    def legend(self) -> Markup:
        return element("ul", [element("li", name) for name in self.dotted_names()], class_="legend")


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
    dots = _Dots(list(codecs))
    gallery = Gallery(most_bytes=MAX_SOUND_BYTES, lossless=True)
    sections = [
        Section("codecs", "Codecs", _codec_table(result, dots), "The codecs"),
        Section("scores", "Scores", _codec_scores(result, dots)),
        Section(
            "codebooks", "Codebooks", join(note(ABOUT_CODEBOOKS), dots.legend(), codebook_charts(result))
        ),
    ]
    if prefixes := prefix_charts(result):
        content = join(note(ABOUT_PREFIXES), dots.legend(), prefixes)
        sections.insert(2, Section("prefixes", "Fewer codebooks", content, "With fewer codebooks"))
    examples = _codec_examples(codecs, clips, num_examples, gallery, dots)
    if examples:
        about = note(f"The first {EXAMPLE_S:g} s, FLAC. {gallery.about_spectrograms(' of the original')}")
        sections.append(Section("examples", "Listen", join(about, examples)))
    set_aside = [(item["path"], item["reason"]) for item in result["set_aside"]]
    if set_aside:
        sections.append(Section("set_aside", "Set aside", reasons_table("file", set_aside)))
    page = Page("audiollm evaluation", "Codecs side by side", sections, about=note(_describe_clips(result)))
    return page.write(path)


def _describe_clips(result: Mapping[str, Any]) -> str:
    sizes = [
        f"{size['clips']} clips of {kind}, {size['seconds']:.0f} s" for kind, size in result["clips"].items()
    ]
    if "judges" in result:
        judges = result["judges"]
        sizes += [
            f"recognizer: {judges['recognizer'] or 'none'}",
            f"speaker judge: {judges['speaker'] or 'none'}",
        ]
    return " · ".join(sizes)


def _codec_table(result: Mapping[str, Any], dots: _Dots) -> Markup:
    rows = [(title, *texts) for title, texts in _codec_rows(result)]
    return table(["codec", *dots.dotted_names()], rows, "measured upright")


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


def _codec_scores(result: Mapping[str, Any], dots: _Dots) -> Markup:
    tables = [_kind_scores(result, kind, dots) for kind in result["clips"]]
    return join(note(ABOUT_SCORES), tables, dots.legend(), metric_charts(result))


def _kind_scores(result: Mapping[str, Any], kind: str, dots: _Dots) -> Markup:
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
        best = result["best"].get(kind, {}).get(name)
        cells = [_page_cell(original.get(name), name)] if has_original else []
        cells += [
            _page_cell(table, name, codec == best)
            for codec, table in zip(result["codecs"], tables, strict=True)
        ]
        title = f"{metric.title} {metric.direction}"
        rows.append([join(title, metric.unit and [" ", small(metric.unit)]), *cells])
    size = result["clips"][kind]
    headings = ["metric", *(["original"] if has_original else []), *dots.dotted_names()]
    return join(
        heading(kind, f"{size['clips']} clips, {size['seconds']:.0f} s"),
        rows and table(headings, rows, "measured upright"),
        [notice(small(f"n/a: {', '.join(titles)} ({why})")) for why, titles in absent.items()],
    )


def _page_cell(table: Mapping[str, Any] | None, metric: str, is_best: bool = False) -> Cell:
    if table is None:
        return cell(bold())
    digits = METRICS[metric].digits
    missing = "; ".join(f"{count} × {with_remedy(reason)}" for reason, count in table["reasons"].items())
    if table["mean"] is None:
        return cell(bold("n/a"), missing and element("small", missing, class_="missing"))
    return cell(
        bold(f"{table['mean']:.{digits}f}"),
        small(f"median {table['median']:.{digits}f}", tag="small"),
        missing and element("small", f"n {table['n']}; n/a: {missing}", class_="missing"),
        class_="best" if is_best else "",
    )


# ------------------------------------------------------------------------------------------------- charts


def metric_charts(result: Mapping[str, Any]) -> Markup:
    """For each metric that has a value, its mean by kind of clip, a bar for each codec."""
    drawn = []
    for metric in result["metrics"]:
        means = {
            name: {kind: _metric_mean(scores["kinds"], kind, metric) for kind in result["clips"]}
            for name, scores in result["codecs"].items()
        }
        kinds = [kind for kind in result["clips"] if any(of[kind] is not None for of in means.values())]
        if kinds:
            bars = {name: [by_kind[kind] for kind in kinds] for name, by_kind in means.items()}
            title = _metric_title(metric)
            drawn.append(Chart(title, bar_chart(bars, kinds, title)))
    return charts(drawn)


def codebook_charts(result: Mapping[str, Any]) -> Markup:
    """Share of used codes and perplexity, by codebook."""
    drawn = []
    for key, title in (("usage", "share of codes used"), ("perplexity", "perplexity")):
        lines = {
            name: list(enumerate(scores["codebooks"][key], start=1))
            for name, scores in result["codecs"].items()
        }
        drawn.append(Chart(title, line_chart(lines, "codebook", title, is_counted=True)))
    return charts(drawn)


def prefix_charts(result: Mapping[str, Any]) -> Markup:
    """Each metric against the bitrate, by kind of clip, for codecs that were scored with fewer codebooks, too."""
    if all(len(scores["prefixes"]) < 2 for scores in result["codecs"].values()):
        return Markup()
    drawn = []
    for metric in result["metrics"]:
        for kind in result["clips"]:
            points_by_name = {
                name: [
                    (scores["prefix_bitrates_bps"][number] / 1000, mean)
                    for number, kinds in scores["prefixes"].items()
                    if (mean := _metric_mean(kinds, kind, metric)) is not None
                ]
                for name, scores in result["codecs"].items()
            }
            lines = {name: points for name, points in points_by_name.items() if points}
            if lines:
                title = f"{_metric_title(metric)}, {kind}"
                drawn.append(Chart(title, line_chart(lines, "kbps", title)))
    return charts(drawn)


def _metric_mean(kinds: Mapping[str, Any], kind: str, metric: str) -> float | None:
    table = kinds.get(kind, {}).get(metric)
    return None if table is None else table["mean"]


def _metric_title(metric: str) -> str:
    definition = METRICS[metric]
    unit = f" ({definition.unit})" if definition.unit else ""
    return f"{definition.title}{unit} {definition.direction}"


# ----------------------------------------------------------------------------------------------- examples


def _codec_examples(
    codecs: Mapping[str, Codec], clips: Sequence[EvaluationClip], number: int, gallery: Gallery, dots: _Dots
) -> list[Markup]:
    """Clips with the sound and the spectrogram of the original and of each codec, up to the page's limit of sound."""
    examples: list[Markup] = []
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
        about = f"{clip.kind} · {recording.duration_s:.1f} s from {clip.start_s:.1f} s"
        about += f" · “{clip.text}”" if clip.text else ""
        named_sounds = [(join(dots.dot(name), name), sound) for name, sound in sounds]
        title = [clip.path.name, " ", small(about)]
        examples.append(example(title, named_clips(named_sounds, clip.path.name)))
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
