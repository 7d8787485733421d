"""The section on recordings: their number, their fate, a few segments, and all that was set aside."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from audiollm.evaluate.report.clips import Gallery
from pipelines.report.curves import facts_of
from pipelines.report.material import Material, Row, Trace, pick_evenly

SEGMENTS_SHOWN = 8
SET_ASIDE_SHOWN = 200
SETTING_ASIDE = (
    "train_tokenizer", "tokenize", "train", "train_preference", "train_reward", "train_policy", "train_interpreter",
    "train_vae", "fit_mel_pca", "encode_latents", "train_flow", "generate_sound", "edit_sounds",
)  # fmt: skip
"""Stages that set recordings and samples aside, beside those that make samples."""
QUALITIES = {"sig": "speech", "bak": "background", "ovr": "overall"}


def recordings_section(material: Material, gallery: Gallery) -> Row:
    """Files, segments and samples as bars; `absent` where neither `annotate` nor, without it, `compose` is done."""
    composed = material.stages("compose")
    annotated = material.last("annotate") or (composed[-1] if composed else None)
    section: Row = {
        "absent": annotated.absent if annotated is not None else "This recipe has no stage annotate.",
        "set_aside": _set_aside_table(material, _set_aside_rows(material)),
    }
    if annotated is None or annotated.figures is None:
        return section
    counts = annotated.figures if annotated.kind == "annotate" else {}
    quality = counts.get("quality") or {}
    section |= {
        "steps": [*_file_steps(counts), *_sample_steps(composed, counts.get("segments") or 0)],
        "compose_absent": [stage.absent for stage in composed if stage.absent],
        "reasons": sorted((counts.get("reasons") or {}).items(), key=lambda item: (-item[1], item[0])),
        "facts": _collect_recording_facts(counts, composed),
        "quality": [
            (title, quality[key]) for key, title in QUALITIES.items() if quality.get(key) is not None
        ],
        "quality_n": quality.get("n") or 0,
        "segments": _segments(annotated, gallery),
    }
    return section


def _file_steps(counts: Row) -> list[Row]:
    """Bars of files, then of segments; each with its share of its unit and the fate of the rest."""
    if not counts:
        return []
    files, segments = counts.get("files_seen") or 0, counts.get("segments") or 0
    audio, used = counts.get("audio_files") or 0, counts.get("files_kept") or 0
    minutes = (counts.get("seconds") or 0.0) / 60
    return [
        _build_count_step("files seen", files, files, ""),
        _build_count_step("audio", audio, files, f"{counts.get('not_audio') or 0:,} not audio"),
        _build_count_step("used", used, files, f"{audio - used:,} set aside whole"),
        _build_count_step("segments", segments, segments, f"{minutes:.1f} minutes of audio"),
    ]


def _sample_steps(composed: Sequence[Trace], segments: int) -> list[Row]:
    """A bar of samples for each stage `compose`, as a share of the segments or, without these, of the most samples."""
    finished = [(stage.name, stage.figures) for stage in composed if stage.figures is not None]
    parts = [(figures.get("train_samples") or 0, figures.get("test_samples") or 0) for _, figures in finished]
    total = segments or max(map(sum, parts), default=0)
    steps = []
    for (name, figures), (train, test) in zip(finished, parts, strict=True):
        note = f"{train:,} to train on, {test:,} to test"
        if len(composed) > 1:
            note += f"; {(figures.get('train_seconds') or 0) / 60:.1f} min to train on"
        steps.append(_build_count_step("samples" if len(composed) == 1 else name, train + test, total, note))
    return steps


def _build_count_step(title: str, count: int, of: int, note: str) -> Row:
    return {
        "title": title,
        "count": count,
        "percent": min(100.0, 100.0 * count / of) if of else 0.0,
        "note": note,
    }


def _collect_recording_facts(counts: Row, composed: Sequence[Trace]) -> list[tuple[str, str]]:
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


def _set_aside_rows(material: Material) -> list[Row]:
    """The set-aside rows of all stages, each once: the lists of stages `compose` begin with that of `annotate`."""
    first, *later = (
        list(chain.from_iterable(stage.rows("set_aside.jsonl") for stage in material.stages(kind)))
        for kind in ("compose", *SETTING_ASIDE)
    )
    annotated = material.last("annotate")
    if not first and annotated is not None:
        first = annotated.rows("set_aside.jsonl")
    keys = ("stage", "place", "id", "kind", "reason")
    rows = chain(first, *later)
    return list({tuple(str(row.get(key)) for key in keys): row for row in rows}.values())


def _set_aside_table(material: Material, rows: Sequence[Row]) -> Row:
    annotated = material.last("annotate")
    source = annotated.result.settings.get("input") if annotated is not None and annotated.result else None
    table = [
        {
            "place": _shorten_recording_path(material, str(row.get("place", "")), source),
            "id": row.get("id", ""),
            "kind": row.get("kind", ""),
            "reason": ""
            if row.get("reason") == row.get("kind")
            else material.shorten_paths(row.get("reason", "")),
            "stage": row.get("stage", ""),
        }
        for row in rows[:SET_ASIDE_SHOWN]
    ]
    return {"rows": table, "total": len(rows), "more": len(rows) - len(table)}


def _shorten_recording_path(material: Material, path: str, source: object) -> str:
    """A recording's path relative to the folder that was given."""
    if source and path.startswith(f"{source}/"):
        return path[len(str(source)) + 1 :]
    return material.shorten_paths(path)


def _segments(annotated: Trace, gallery: Gallery) -> list[Row]:
    rows = annotated.rows("segments.jsonl")
    selected_rows = [rows[index] for index in pick_evenly(rows, SEGMENTS_SHOWN, ("text", "speaker"))]
    return [
        {
            "name": row.get("file") or Path(str(row.get("path", ""))).name,
            "text": row.get("text", ""),
            "given": row.get("text_source") == "given",
            "heard": list((row.get("heard") or {}).items()),
            "speaker": row.get("speaker") or "",
            "overall": (row.get("quality") or {}).get("ovr"),
            "clip": gallery.clip(Path(str(row.get("path", ""))), row.get("start_s") or 0.0, row.get("end_s")),
        }
        for row in selected_rows
    ]
