"""What the page's sections show, as plain data for the template: the way from recordings to a trained model.

Each builder returns at least `absent`: why there is nothing to show, empty where there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pipelines.report.figures import Series, curve_chart, series_of
from pipelines.report.material import Material, Row, pick_evenly
from pipelines.report.media import Gallery

SEGMENTS_SHOWN = 8
EXAMPLES_SHOWN = 4
PROMPTS_SHOWN, STEPS_SHOWN = 6, 4
"""Of what training spoke at its evaluations."""
CODEBOOKS_SHOWN = 8
SET_ASIDE_SHOWN = 200
EXAMPLE_TITLES = {
    "original": "original",
    "decoded": "decoded, all codebooks",
    "first_codebook": "decoded, first codebook alone",
}
QUALITIES = {"sig": "speech", "bak": "background", "ovr": "overall"}


# ----------------------------------------------------------------------------------------------- funnel


def funnel_section(material: Material, gallery: Gallery) -> Row:
    """The recordings: how many came in, what became of them, and a few segments."""
    set_aside = _set_aside_rows(material)
    section: Row = {
        "absent": material.why_absent("annotate"),
        "set_aside": _set_aside_table(material, set_aside),
    }
    counts = material.figures("annotate")
    if counts is None:
        return section
    composed = material.figures("compose")
    quality = counts.get("quality") or {}
    section |= {
        "steps": _funnel_steps(counts, composed),
        "compose_absent": material.why_absent("compose"),
        "reasons": sorted((counts.get("reasons") or {}).items(), key=lambda item: (-item[1], item[0])),
        "facts": _funnel_facts(counts, composed),
        "quality": [
            (title, quality[key]) for key, title in QUALITIES.items() if quality.get(key) is not None
        ],
        "quality_n": quality.get("n") or 0,
        "segments": _segments(material, gallery),
    }
    return section


def _funnel_steps(counts: Row, composed: Row | None) -> list[Row]:
    """Bars of files, then of clips; each with its share of all of its unit and what became of the others."""
    files, segments = counts.get("files_seen") or 0, counts.get("segments") or 0
    audio, used = counts.get("audio_files") or 0, counts.get("files_used") or 0
    minutes = (counts.get("seconds") or 0.0) / 60
    steps = [
        ("files seen", files, files, ""),
        ("audio", audio, files, f"{counts.get('not_audio') or 0:,} not audio"),
        ("used", used, files, f"{audio - used:,} set aside whole"),
        ("segments", segments, segments, f"{minutes:.1f} minutes of audio"),
    ]
    if composed is not None:
        train, test = composed.get("train_samples") or 0, composed.get("test_samples") or 0
        steps.append(("samples", train + test, segments, f"{train:,} to train on, {test:,} to test"))
    return [
        {
            "title": title,
            "count": count,
            "percent": min(100.0, 100.0 * count / of) if of else 0.0,
            "note": note,
        }
        for title, count, of, note in steps
    ]


def _funnel_facts(counts: Row, composed: Row | None) -> list[tuple[str, str]]:
    known = {**(composed or {}), "text_agreement": counts.get("text_agreement")}
    return _facts(
        known,
        ("speakers", "speakers", lambda v: f"{v:,}"),
        ("texts", "different texts", lambda v: f"{v:,}"),
        ("train_seconds", "to train on", lambda v: f"{v / 60:.1f} min"),
        ("test_seconds", "to test on", lambda v: f"{v / 60:.1f} min"),
        ("text_agreement", "recognizer agrees with the given text", lambda v: f"{100 * v:.1f} %"),
    )


def _set_aside_rows(material: Material) -> list[Row]:
    composed = material.rows("compose", "set_aside.jsonl")  # holds annotate's as well
    later = [material.rows(kind, "set_aside.jsonl") for kind in ("train_tokenizer", "tokenize", "train")]
    return [*(composed or material.rows("annotate", "set_aside.jsonl")), *chain(*later)]


def _set_aside_table(material: Material, rows: Sequence[Row]) -> Row:
    annotated = material.result("annotate")
    source = annotated.settings.get("input") if annotated is not None else None
    table = [
        {
            "place": _below(material, str(row.get("place", "")), source),
            "id": row.get("id", ""),
            "kind": row.get("kind", ""),
            "reason": "" if row.get("reason") == row.get("kind") else material.shown(row.get("reason", "")),
            "stage": row.get("stage", ""),
        }
        for row in rows[:SET_ASIDE_SHOWN]
    ]
    return {"rows": table, "total": len(rows), "more": len(rows) - len(table)}


def _below(material: Material, path: str, source: object) -> str:
    """A recording's path below the folder that was given, as a person knows it."""
    if source and path.startswith(f"{source}/"):
        return path[len(str(source)) + 1 :]
    return material.shown(path)


def _segments(material: Material, gallery: Gallery) -> list[Row]:
    rows = material.rows("annotate", "segments.jsonl")
    shown = [rows[index] for index in pick_evenly(rows, SEGMENTS_SHOWN, ("text", "speaker"))]
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
        for row in shown
    ]


# -------------------------------------------------------------------------------------------- tokenizer


def tokenizer_section(material: Material, gallery: Gallery) -> Row:
    """The codec: its figures, its curves, and held-out clips before and after."""
    kind = "train_tokenizer"
    rows = material.rows(kind, "metrics.jsonl")
    charts = [
        _chart(rows, "Mel distance", "mean |Δ ln mel|", "mel"),
        _chart(rows, "STFT distance", "mean |Δ ln magnitude|", "stft"),
        _chart(rows, "Semantic loss", "distance to the teacher's features", "semantic"),
        _chart(rows, "Commitment", "squared distance to the code", "commitment"),
        *_perplexity_charts(rows),
        _adversary_chart(rows),
    ]
    figures = material.figures(kind)
    facts = [] if figures is None else _tokenizer_facts(figures)
    return {
        "absent": material.why_absent(kind),
        "facts": facts,
        "charts": [chart for chart in charts if chart["svg"]],
        "examples": _examples(material, gallery) if figures is not None else [],
        "alarms": _alarms(material, kind),
    }


def _tokenizer_facts(figures: Row) -> list[tuple[str, str]]:
    return _facts(
        figures,
        ("parameters", "parameters", lambda v: f"{v / 1e6:.2f} M"),
        ("bitrate_bps", "bitrate", lambda v: f"{v / 1000:g} kbit/s"),
        ("steps", "training steps", lambda v: f"{v:,}"),
        ("mel", "mel distance, held out", lambda v: f"{v:.3f}"),
        ("stft", "STFT distance, held out", lambda v: f"{v:.3f}"),
        ("perplexity_first", "perplexity, first codebook", lambda v: f"{v:.0f}"),
        ("perplexity_mean", "perplexity, mean", lambda v: f"{v:.0f}"),
    )


def _perplexity_charts(rows: Sequence[Row]) -> list[Row]:
    """Of all codebooks on held-out clips, and of the first and the last in training."""
    last = max(
        (int(key.split("/")[1]) for row in rows for key in row if key.startswith("perplexity/")), default=0
    )
    held_out = [
        series_of(rows, "evaluation/perplexity_first", "first codebook", dotted=True),
        series_of(rows, "evaluation/perplexity_mean", "mean of all", dotted=True),
    ]
    training = [
        series_of(rows, "perplexity/0", "first codebook"),
        series_of(rows, f"perplexity/{last}", "last codebook"),
    ]
    unit = "codes in use (perplexity)"
    return [
        _drawn("Codebook use, held out", unit, held_out),
        _drawn("Codebook use, training", unit, training),
    ]


def _adversary_chart(rows: Sequence[Row]) -> Row:
    series = [
        series_of(rows, "discriminator", "discriminator (2: it guesses)"),
        series_of(rows, "feature", "feature matching"),
    ]
    return _drawn("Adversary", "hinge loss, relative L1", series)


def _alarms(material: Material, kind: str) -> list[tuple[int, str, str]]:
    """Step, kind and text of what training warned of."""
    rows = material.rows(kind, "alarms.jsonl")
    return [(int(row.get("step", 0)), str(row.get("kind")), str(row.get("text"))) for row in rows]


def _examples(material: Material, gallery: Gallery) -> list[Row]:
    folder, listed = material.folder("train_tokenizer"), material.json("train_tokenizer", "examples.json")
    rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    return [
        {
            "name": Path(str(row.get("source", ""))).name,
            "clips": [
                (title, gallery.clip(folder / str(row[key])))
                for key, title in EXAMPLE_TITLES.items()
                if key in row
            ],
        }
        for row in rows[:EXAMPLES_SHOWN]
    ]


# --------------------------------------------------------------------------------------------- training


def training_section(material: Material, gallery: Gallery) -> Row:
    """The model: its figures and curves, and what it said of the same prompts as it learned."""
    rows = material.rows("train", "metrics.jsonl")
    charts = [
        _chart(rows, "Audio loss", "nats per code", "audio_loss"),
        _codebook_chart(rows),
        _chart(rows, "Text loss", "nats per token", "text_loss"),
        _chart(rows, "Gradient norm", "before clipping", "gradient_norm"),
        _chart(rows, "Learning rate", "learning rate", "learning_rate"),
    ]
    facts = _facts(
        material.figures("train") or {},
        ("parameters", "parameters", lambda v: f"{v / 1e6:.2f} M"),
        ("steps", "training steps", lambda v: f"{v:,}"),
        ("sequences", "training sequences", lambda v: f"{v:,}"),
        ("vocabulary", "text vocabulary", lambda v: f"{v:,}"),
        ("audio_loss", "audio loss, held out", lambda v: f"{v:.3f}"),
        ("text_loss", "text loss, held out", lambda v: f"{v:.3f}"),
    )
    return {
        "absent": material.why_absent("train"),
        "facts": facts,
        "charts": [chart for chart in charts if chart["svg"]],
        "alarms": _alarms(material, "train"),
        "listening": _listening(material, gallery),
    }


def _codebook_chart(rows: Sequence[Row]) -> Row:
    """The audio loss of each codebook in training, or of some of them evenly picked, by its number."""
    found = {key.removeprefix("audio_loss/") for row in rows for key in row if key.startswith("audio_loss/")}
    books = sorted(int(book) for book in found if book.isdecimal())
    shown = [books[place] for place in _spread(len(books), CODEBOOKS_SHOWN)]
    series = [series_of(rows, f"audio_loss/{book}", str(book)) for book in shown]
    return _drawn("Audio loss by codebook", "nats per code, training", series, "codebook")


def _listening(material: Material, gallery: Gallery) -> Row:
    """Prompts, and the sound of each at the first evaluation, the last, and some between."""
    if material.result("train") is None:
        return {"prompts": [], "shown": 0, "total": 0}
    folder = material.folder("train") / "listening"
    found = sorted(
        (int(match[1]), path)
        for path in folder.glob("step-*")
        if (match := re.fullmatch(r"step-(\d+)", path.name))
    )
    steps = [found[place] for place in _spread(len(found), STEPS_SHOWN)]
    prompts = []
    for row in material.rows("train", "listening/prompts.jsonl")[:PROMPTS_SHOWN]:
        file = f"{Path(str(row.get('name'))).name}.wav"
        clips = [(step, gallery.clip(path / file)) for step, path in steps if (path / file).is_file()]
        if clips:
            prompts.append({"text": row.get("text", ""), "speaker": row.get("speaker", ""), "clips": clips})
    return {"prompts": prompts, "shown": len(steps), "total": len(found)}


def _spread(count: int, most: int) -> list[int]:
    """At most `most` places of a list of `count`: the first, the last, and evenly between."""
    shown = min(count, most)
    return [round(number * (count - 1) / max(1, shown - 1)) for number in range(shown)]


def _facts(figures: Row, *known: tuple[str, str, Callable[[Any], str]]) -> list[tuple[str, str]]:
    """The known (key, title, how to show it) of the figures that are there."""
    return [(title, show(figures[key])) for key, title, show in known if figures.get(key) is not None]


def _chart(rows: Sequence[Row], title: str, y_label: str, key: str) -> Row:
    """The training values of `key` and, where there are any, those on held-out data."""
    series = [series_of(rows, key, "training"), series_of(rows, f"evaluation/{key}", "held out", dotted=True)]
    return _drawn(title, y_label, series)


def _drawn(title: str, y_label: str, series: Sequence[Series], legend_title: str = "") -> Row:
    svg = curve_chart(series, y_label, f"{title} over the training steps", legend_title)
    return {"title": title, "svg": svg}
