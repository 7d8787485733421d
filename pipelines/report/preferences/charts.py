"""The charts of one stage that was trained on preferences."""

from __future__ import annotations

from pipelines.report.curves import chart_of, draw_chart
from pipelines.report.figures import reliability_chart, series_of
from pipelines.report.material import Row
from pipelines.report.preferences.history import REWARDS, VERDICTS, Training


def policy_charts(training: Training) -> list[Row]:
    rows, key = training.rows, training.key
    lengths = [
        training.lengths("tokens", "its own"),
        series_of(rows, f"evaluation/{key('length_chosen')}", "chosen"),
        series_of(rows, f"evaluation/{key('length_rejected')}", "rejected"),
    ]
    return [
        chart_of(rows, "Margin", "reward of chosen − rejected", key("margin")),
        *_implicit_rewards(training),
        chart_of(rows, "In the right order", "share of pairs", key("accuracy")),
        draw_chart(
            "KL from the reference",
            "nats per token",
            [series_of(rows, "evaluation/kl_per_token", "KL", True)],
        ),
        draw_chart("Length of answers", "tokens", lengths),
        draw_chart("Length of spoken answers", "seconds", [training.lengths("seconds", "its own")]),
        chart_of(rows, "Loss", "mean over pairs", "loss"),
        chart_of(rows, "Gradient norm", "before clipping", "gradient_norm"),
    ]


def _implicit_rewards(training: Training) -> list[Row]:
    """Implicit rewards by role, held out and in training."""
    names = VERDICTS if training.judges_single else REWARDS
    held_out, trained = (
        [series_of(training.rows, before + training.key(key), role, bool(before)) for key, role in names]
        for before in ("evaluation/", "")
    )
    unit = "β log policy / reference"
    return [
        draw_chart("Implicit reward, held out", unit, held_out),
        draw_chart("Implicit reward, training", unit, trained),
    ]


def reward_charts(training: Training) -> list[Row]:
    rows, key = training.rows, training.key
    return [
        chart_of(rows, "In the right order", "share of pairs", key("accuracy")),
        chart_of(rows, "Margin", "score of chosen − rejected", key("margin")),
        draw_chart(
            "Score",
            "of held-out answers",
            [
                series_of(rows, f"evaluation/{key(f'score_{role}')}", role, True)
                for role in ("chosen", "rejected")
            ],
        ),
        chart_of(rows, "Loss", "mean over pairs", "loss"),
        chart_of(rows, "Gradient norm", "before clipping", "gradient_norm"),
    ]


def reliability(training: Training) -> list[Row]:
    """The picture of a reward model's calibration, where it left one."""
    calibration = training.stage.json("reliability.json")
    bins = calibration.get("bins") if isinstance(calibration, dict) else None
    filled_bins = [
        (float(row["confidence"]), float(row["accuracy"]), int(row["count"]))
        for row in (bins if isinstance(bins, list) else [])
        if isinstance(row, dict)
        and all(isinstance(row.get(key), int | float) for key in ("confidence", "accuracy", "count"))
    ]
    svg = reliability_chart(filled_bins, "share of pairs in the right order over the model's confidence")
    note = "A bar that ends at its line: as often right as sure. Below: the number of held-out pairs."
    return [{"title": "Reliability", "svg": svg, "note": note}] if svg else []
