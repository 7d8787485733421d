"""The charts of one stage that was trained on fresh answers."""

from __future__ import annotations

from audiollm.pages.blocks import Chart
from audiollm.pages.charts import Series, series_of
from audiollm.pages.stage_parts import chart_of, draw_chart
from audiollm.rl.online.report.history import REWARD, FreshTraining, short_name

PHASES = ("rollout", "reward", "score", "update", "weights")
"""Phases of a step in the order in which they happen; others that a training tells of stand behind them."""
MAX_FUNCTIONS = 12


def policy_training_charts(training: FreshTraining) -> list[Chart]:
    """All charts; those without a point have no `svg`."""
    rows = training.rows
    return [
        draw_chart(
            "Reward", "weighted sum", [series_of(rows, REWARD, "training"), training.held_out(REWARD)]
        ),
        draw_chart("Reward by function, training", "before weights", _by_function(training, held_out=False)),
        draw_chart("Reward by function, held out", "greedy answers", _by_function(training, held_out=True)),
        draw_chart("KL from the reference", "nats per answer", _kl(training)),
        draw_chart("Weight of the KL", "coefficient", _kl_weights(training)),
        draw_chart("Entropy", "nats per token", [series_of(rows, "entropy", "entropy")]),
        chart_of(rows, "Length of answers", "tokens", "answer_length"),
        draw_chart(
            "Clipped ratios",
            "share of tokens",
            [series_of(rows, "clipped_low", "below"), series_of(rows, "clipped_high", "above")],
        ),
        draw_chart("Groups and answers", "share", _collect_share_curves(training)),
        draw_chart(
            "Sampling against training", "KL per token, nats", [series_of(rows, "mismatch_kl", "mismatch")]
        ),
        draw_chart("Error of the critic", "squared", [series_of(rows, "value_error", "error")]),
        draw_chart(
            "Returns that the critic explains", "share", [series_of(rows, "value_explained", "explained")]
        ),
        draw_chart("Loss of supervised samples", "nats per token", [series_of(rows, "ptx_loss", "loss")]),
        chart_of(rows, "Gradient norm", "before clipping", "gradient_norm"),
        draw_chart("Time by phase", "seconds per step", _phases(training)),
    ]


def _by_function(training: FreshTraining, held_out: bool) -> list[Series]:
    names = training.reward_names[:MAX_FUNCTIONS]
    if len(names) < 2:
        return []  # the first chart shows it
    if held_out:
        return [Series(short_name(name), training.held_out(name).points, dotted=True) for name in names]
    return [series_of(training.rows, f"reward/{name}", short_name(name)) for name in names]


def _kl(training: FreshTraining) -> list[Series]:
    measured = [series_of(training.rows, "kl", "KL")]
    if training.speaks:
        measured = [series_of(training.rows, f"kl_{kind}", kind) for kind in ("text", "audio")]
    steps = [step for series in measured for step, _ in series.points]
    if not steps:
        return measured
    targets = dict.fromkeys(target for target in training.kl_targets if target is not None)
    ends = sorted({min(steps), max(steps)})
    return [*measured, *(Series("target", [(step, target) for step in ends]) for target in targets)]


def _kl_weights(training: FreshTraining) -> list[Series]:
    if not training.speaks:
        return [series_of(training.rows, "kl_weight", "coefficient")]
    return [
        series_of(training.rows, "kl_weight", "text"),
        series_of(training.rows, "kl_weight_audio", "audio"),
    ]


def _collect_share_curves(training: FreshTraining) -> list[Series]:
    named = (
        ("groups_without_variance", "no variance"),
        ("truncated", "cut"),
        ("skipped", "skipped"),
        ("mismatch_beyond", "beyond cap"),
    )
    curves = [series_of(training.rows, key, name) for key, name in named]
    return [curve for curve in curves if any(value for _, value in curve.points)] or curves[:1]


def _phases(training: FreshTraining) -> list[Series]:
    rows = training.stage.rows("performance.jsonl")
    phases = dict.fromkeys(
        key.removeprefix("seconds/") for row in rows for key in row if key.startswith("seconds/")
    )
    names = [name for name in PHASES if name in phases] + sorted(set(phases) - set(PHASES))
    return [series_of(rows, f"seconds/{name}", name) for name in names]
