"""The section on recordings: their number, their fate, and a few segments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from audiollm.pages.blocks import (
    bold,
    card,
    cards,
    clip,
    counted_reasons,
    element,
    facts,
    heading,
    join,
    lines,
    notice,
    share_bar,
    small,
)  # fmt: skip
from audiollm.pages.clips import Gallery
from audiollm.pages.page import Section
from audiollm.pages.run_record import Row, StageRecord, pick_evenly
from audiollm.pages.sections import ReportContext
from audiollm.pages.stage_parts import Facts, facts_of
from pipelines.review.corrections import PERSON

SEGMENTS_SHOWN = 8
QUALITIES = {"sig": "speech", "bak": "background", "ovr": "overall"}
ABOUT_QUALITY = "DNSMOS, 1 (bad) to 5 (excellent); means of {n} segments, never a filter"


def recordings_section(context: ReportContext) -> Section | None:
    """Files, segments and samples as bars, and segments to listen to."""
    composed = context.stages("compose")
    annotated = context.run.last("annotate") or (composed[-1] if composed else None)
    if annotated is None:
        return None
    if annotated.figures is None:
        content = notice(annotated.absent)
    else:
        content = _recording_funnels(context, annotated, composed)
    return Section("recordings", "Recordings", content, "From recordings to samples")


def _recording_funnels(
    context: ReportContext, annotated: StageRecord, composed: Sequence[StageRecord]
) -> Markup:
    """A funnel for each annotation from which samples were made, below its name; one where there is one.

    Args:
        annotated: the last annotation, which has the samples that were made of none.
    """
    made_of = {
        stage.name: [made for made in composed if stage.name in made.upstream]
        for stage in context.stages("annotate")
        if stage.figures is not None
    }
    sources = [name for name, made in made_of.items() if made]
    if len(sources) < 2:
        return _recording_funnel(annotated, composed, context.gallery)
    return join(
        *(
            join(heading(stage.name), _recording_funnel(stage, made_of[stage.name], context.gallery))
            for stage in context.stages("annotate")
            if stage.name in sources
        )
    )


def _recording_funnel(annotated: StageRecord, composed: Sequence[StageRecord], gallery: Gallery) -> Markup:
    counts = (annotated.figures or {}) if annotated.kind == "annotate" else {}
    quality, reasons = counts.get("quality") or {}, (counts.get("reasons") or {}).items()
    return join(
        element(
            "div",
            *_recording_bars(counts),
            *_sample_bars(composed, counts.get("segments") or 0),
            [notice(f"No samples: {stage.absent}") for stage in composed if stage.absent],
            class_="funnel card",
        ),
        facts(_collect_recording_facts(counts, composed)),
        reasons
        and [
            heading("Set aside, by reason"),
            counted_reasons(sorted(reasons, key=lambda item: (-item[1], item[0]))),
        ],
        _quality_meters(quality),
        _segments(annotated, gallery),
    )


def _quality_meters(quality: Row) -> Markup | None:
    meters = [
        element(
            "div",
            element("span", title),
            share_bar(25 * (quality[key] - 1)),
            bold(f"{quality[key]:.2f}"),
        )
        for key, title in QUALITIES.items()
        if quality.get(key) is not None
    ]
    about = ABOUT_QUALITY.format(n=quality.get("n") or 0)
    return join(heading("Quality", about), element("div", meters, class_="meters")) if meters else None


def _recording_bars(counts: Row) -> list[Markup]:
    """Bars of files, then of segments; each with its share of its unit and the fate of the rest."""
    if not counts:
        return []
    files, segments = counts.get("files_seen") or 0, counts.get("segments") or 0
    audio, used = counts.get("audio_files") or 0, counts.get("files_kept") or 0
    minutes = (counts.get("seconds") or 0.0) / 60
    return [
        _count_bar("files seen", files, files, ""),
        _count_bar("audio", audio, files, f"{counts.get('not_audio') or 0:,} not audio"),
        _count_bar("used", used, files, f"{audio - used:,} set aside whole"),
        _count_bar("segments", segments, segments, f"{minutes:.1f} minutes of audio"),
    ]


def _sample_bars(composed: Sequence[StageRecord], segments: int) -> list[Markup]:
    """A bar of samples for each stage `compose`, as a share of the segments or, without these, of the most samples."""
    finished = [(stage.name, stage.figures) for stage in composed if stage.figures is not None]
    parts = [(figures.get("train_samples") or 0, figures.get("test_samples") or 0) for _, figures in finished]
    total = segments or max(map(sum, parts), default=0)
    bars = []
    for (name, figures), (train, test) in zip(finished, parts, strict=True):
        note = f"{train:,} to train on, {test:,} to test"
        if len(composed) > 1:
            note += f"; {(figures.get('train_seconds') or 0) / 60:.1f} min to train on"
        bars.append(_count_bar("samples" if len(composed) == 1 else name, train + test, total, note))
    return bars


def _count_bar(title: str, count: int, of: int, note: str) -> Markup:
    percent = min(100.0, 100.0 * count / of) if of else 0.0
    name = element("span", title, class_="what")
    return element("div", name, bold(f"{count:,}"), share_bar(percent, digits=2), small(note))


def _collect_recording_facts(counts: Row, composed: Sequence[StageRecord]) -> Facts:
    """Facts about the samples, if one stage makes them, and about the recordings."""
    samples = (composed[0].figures or {}) if len(composed) == 1 else {}
    return facts_of(
        {**samples, "text_agreement": counts.get("text_agreement")},
        ("speakers", "speakers", lambda v: f"{v:,}"),
        ("texts", "different texts", lambda v: f"{v:,}"),
        ("train_seconds", "to train on", lambda v: f"{v / 60:.1f} min"),
        ("test_seconds", "to test on", lambda v: f"{v / 60:.1f} min"),
        ("text_agreement", "recognizer agrees with the given text", lambda v: f"{100 * v:.1f} %"),
    )


def _segments(annotated: StageRecord, gallery: Gallery) -> Markup | None:
    rows = annotated.rows("segments.jsonl")
    listed = [
        _heard_segment(rows[index], gallery)
        for index in pick_evenly(rows, SEGMENTS_SHOWN, ("text", "speaker"))
    ]
    return join(heading("Some of the segments"), cards(listed)) if listed else None


_TEXT_SOURCES = {"given": "text given", PERSON: "text corrected by a person"}


def _heard_segment(row: Row, gallery: Gallery) -> Markup:
    text, speaker = row.get("text", ""), row.get("speaker") or ""
    path, overall = Path(str(row.get("path", ""))), (row.get("quality") or {}).get("ovr")
    heard = [
        [f"{judge} heard ", f"“{transcript}”" if transcript else "nothing"]
        for judge, transcript in (row.get("heard") or {}).items()
    ]
    return card(
        [f"“{text}” ", small(speaker)],
        clip(gallery.clip(path, row.get("start_s") or 0.0, row.get("end_s")), f"{text}, {speaker}"),
        lines(
            _TEXT_SOURCES.get(str(row.get("text_source")), "text as recognized"),
            *heard,
            overall is not None and f"quality {overall:.2f}",
            file=row.get("file") or path.name,
        ),
    )
