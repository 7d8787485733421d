"""The section on tokenizers: figures, curves, and clips before and after, for every stage that trains one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from audiollm.pages.blocks import Chart, StagePart, card, file_label, heading, join, named_clips, stage_parts
from audiollm.pages.charts import series_of
from audiollm.pages.clips import Gallery
from audiollm.pages.page import Section
from audiollm.pages.run_record import Row, StageRecord
from audiollm.pages.sections import ReportContext
from audiollm.pages.spectrograms import DYNAMIC_RANGE_DB
from audiollm.pages.stage_parts import Facts, allot, chart_of, draw_chart, facts_of, training_part

TOKENIZER_STAGES = ("train_tokenizer", "train_vae", "fit_mel_pca")
EXAMPLES_SHOWN = 4
"""Examples shown, over all stages together."""
BRIEF = ("training steps", "mel distance, held out")
"""The facts that stand beside the name of one of several stages."""
EXAMPLE_TITLES = {
    "original": "original",
    "decoded": "decoded",
    "first_codebook": "decoded, first codebook alone",
}


def tokenizer_section(context: ReportContext) -> Section | None:
    """Every stage that trains a tokenizer or an autoencoder, in the order of the recipe."""
    stages = context.stages(*TOKENIZER_STAGES)
    if not stages:
        return None
    examples = allot(EXAMPLES_SHOWN, [stage for stage in stages if stage.figures is not None])
    # the last first: where the page has its fill of sound, that of the earlier ones is left out
    parts = [_codec_part(stage, context.gallery, examples.get(stage.name, 0)) for stage in reversed(stages)]
    return Section("tokenizer", "Tokenizer", stage_parts(parts[::-1]))


def _codec_part(stage: StageRecord, gallery: Gallery, examples: int) -> StagePart:
    rows = stage.rows("metrics.jsonl")
    drawn = [
        chart_of(rows, "Mel distance", "mean |Δ ln mel|", "mel"),
        chart_of(rows, "STFT distance", "mean |Δ ln magnitude|", "stft"),
        chart_of(rows, "Semantic loss", "distance to the teacher's features", "semantic"),
        chart_of(rows, "Pitch loss", "nats per frame", "pitch"),
        chart_of(rows, "Divergence", "nats per frame", "kl"),
        chart_of(rows, "Commitment", "squared distance to the code", "commitment"),
        *_perplexity_charts(rows, (stage.figures or {}).get("steps")),
        _adversary_chart(rows),
    ]
    listed = [] if stage.figures is None else _tokenizer_facts(stage.figures)
    return training_part(stage, listed, BRIEF, drawn, _tokenizer_examples(stage, gallery, examples))


def _tokenizer_facts(figures: Row) -> Facts:
    return facts_of(
        figures,
        ("parameters", "parameters", lambda v: f"{v / 1e6:.2f} M"),
        ("bitrate_bps", "bitrate", lambda v: f"{v / 1000:g} kbit/s"),
        ("steps", "training steps", lambda v: f"{v:,}"),
        ("mel", "mel distance, held out", lambda v: f"{v:.3f}"),
        ("stft", "STFT distance, held out", lambda v: f"{v:.3f}"),
        ("voicing_f1", "voiced/unvoiced F1, held out", lambda v: f"{v:.3f}"),
        ("close_pitch", "voiced frames within 50 cents", lambda v: f"{v:.3f}"),
        ("voiced_share", "voiced share, decoded", lambda v: f"{v:.3f}"),
        ("voiced_share_original", "voiced share, original", lambda v: f"{v:.3f}"),
        ("harmonicity", "periodicity 1 to 4 kHz, decoded", lambda v: f"{v:.3f}"),
        ("harmonicity_original", "periodicity 1 to 4 kHz, original", lambda v: f"{v:.3f}"),
        ("snr_db", "waveform, decoded against original", lambda v: f"{v:.1f} dB SNR"),
        ("latent_rate", "latents per second", lambda v: f"{v:.1f}"),
        ("channels_active", "latent's channels in use", lambda v: f"{v:.0%}"),
        ("perplexity_first", "perplexity, first codebook", lambda v: f"{v:.0f}"),
        ("perplexity_mean", "perplexity, mean", lambda v: f"{v:.0f}"),
    )


def _perplexity_charts(rows: Sequence[Row], steps: Any) -> list[Chart]:
    """Charts of code use: all codebooks on held-out clips, the first and the last in training.

    Args:
        steps: those of a training that is done; a row at this step is the evaluation of the tokenizer that is saved.
    """
    is_fitted = steps is not None and bool(rows) and rows[-1].get("step") == steps
    books = {key.removeprefix("perplexity/") for row in rows for key in row if key.startswith("perplexity/")}
    last = max((int(book) for book in books if book.isdecimal()), default=0)
    held_out = [
        series_of(rows, "evaluation/perplexity_first", "first codebook", dotted=True),
        series_of(rows, "evaluation/perplexity_mean", "mean of all", dotted=True),
    ]
    training = [
        series_of(rows, "perplexity/0", "first codebook"),
        series_of(rows, f"perplexity/{last}", "last codebook"),
    ]
    unit = "codes in use (perplexity)"
    fitted = "The last point: codebooks fitted once more to the averaged encoder, as they are saved."
    return [
        draw_chart("Codebook use, held out", unit, held_out, note=fitted if is_fitted else ""),
        draw_chart("Codebook use, training", unit, training),
    ]


def _adversary_chart(rows: Sequence[Row]) -> Chart:
    series = [
        series_of(rows, "discriminator", "discriminator (2: it guesses)"),
        series_of(rows, "feature", "feature matching"),
    ]
    return draw_chart("Adversary", "hinge loss, relative L1", series)


def _tokenizer_examples(stage: StageRecord, gallery: Gallery, max_examples: int) -> Markup | None:
    listed = stage.json("examples.json")
    rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    examples = []
    for row in rows[:max_examples]:
        name = Path(str(row.get("source", ""))).name
        clips = [
            (title, gallery.clip(stage.folder / str(row[key])))
            for key, title in EXAMPLE_TITLES.items()
            if key in row
        ]
        examples.append(card(file_label(name), named_clips(clips, name), style="example"))
    about = f"mel spectrograms, {DYNAMIC_RANGE_DB:g} dB below the loudest point"
    return join(heading("Held-out clips, before and after", about), examples) if examples else None
