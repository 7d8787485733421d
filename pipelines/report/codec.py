"""The section on the tokenizer: its figures, its curves, and held-out clips before and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipelines.report.curves import alarms_of, chart_of, drawn, facts_of
from pipelines.report.figures import series_of
from pipelines.report.material import Material, Row, Trace
from pipelines.report.media import Gallery

EXAMPLES_SHOWN = 4
EXAMPLE_TITLES = {
    "original": "original",
    "decoded": "decoded, all codebooks",
    "first_codebook": "decoded, first codebook alone",
}


def tokenizer_section(material: Material, gallery: Gallery) -> Row:
    """The last stage `train_tokenizer`; `absent` where it is not done, with what it has left so far."""
    stage = material.last("train_tokenizer")
    if stage is None:
        return {"absent": "This recipe has no stage train_tokenizer."}
    rows = stage.rows("metrics.jsonl")
    charts = [
        chart_of(rows, "Mel distance", "mean |Δ ln mel|", "mel"),
        chart_of(rows, "STFT distance", "mean |Δ ln magnitude|", "stft"),
        chart_of(rows, "Semantic loss", "distance to the teacher's features", "semantic"),
        chart_of(rows, "Commitment", "squared distance to the code", "commitment"),
        *_perplexity_charts(rows),
        _adversary_chart(rows),
    ]
    return {
        "absent": stage.absent,
        "facts": [] if stage.figures is None else _tokenizer_facts(stage.figures),
        "charts": [chart for chart in charts if chart["svg"]],
        "examples": _examples(stage, gallery) if stage.figures is not None else [],
        "alarms": alarms_of(stage),
    }


def _tokenizer_facts(figures: Row) -> list[tuple[str, str]]:
    return facts_of(
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
        drawn("Codebook use, held out", unit, held_out),
        drawn("Codebook use, training", unit, training),
    ]


def _adversary_chart(rows: Sequence[Row]) -> Row:
    series = [
        series_of(rows, "discriminator", "discriminator (2: it guesses)"),
        series_of(rows, "feature", "feature matching"),
    ]
    return drawn("Adversary", "hinge loss, relative L1", series)


def _examples(stage: Trace, gallery: Gallery) -> list[Row]:
    listed = stage.json("examples.json")
    rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    return [
        {
            "name": Path(str(row.get("source", ""))).name,
            "clips": [
                (title, gallery.clip(stage.folder / str(row[key])))
                for key, title in EXAMPLE_TITLES.items()
                if key in row
            ],
        }
        for row in rows[:EXAMPLES_SHOWN]
    ]
