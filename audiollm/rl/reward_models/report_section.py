"""The section on reward models: curves, calibration, several models side by side, and pairs to read and hear."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from audiollm.pages.blocks import Chart, charts, join
from audiollm.pages.charts import reliability_chart, series_of
from audiollm.pages.page import Section
from audiollm.pages.sections import ReportContext
from audiollm.pages.stage_parts import chart_of, draw_chart
from audiollm.rl.report.comparison import Picture, compare_trainings, curves_of
from audiollm.rl.report.preference_parts import order_tiles, preference_parts
from audiollm.rl.report.trainings import REWARD_MODELS, Training


def rewards_section(context: ReportContext) -> Section | None:
    """Every stage `train_reward` in the order of the recipe, and several of them side by side."""
    trainings = [Training(stage) for stage in context.stages(REWARD_MODELS)]
    if not trainings:
        return None
    parts = preference_parts(
        context, trainings, _reward_charts, lambda training: charts(reliability(training), "two")
    )
    compared = _compare_reward_models(context, trainings) if len(trainings) > 1 else None
    tiles = order_tiles(trainings, "reward model: ")
    return Section("rewards", "Reward models", join(compared, parts), tiles=tiles)


def _compare_reward_models(context: ReportContext, trainings: Sequence[Training]) -> Markup:
    pictures: list[Picture] = [
        ("In the right order", "share of pairs", curves_of(trainings, "accuracy")),
        ("Margin", "score of chosen − rejected", curves_of(trainings, "margin")),
        ("Gradient norm", "before clipping", curves_of(trainings, "gradient_norm")),
    ]
    return compare_trainings(context, trainings, pictures, "reward model")


def _reward_charts(training: Training) -> list[Chart]:
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


def reliability(training: Training) -> list[Chart]:
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
    return [Chart("Reliability", svg, note)] if svg else []
