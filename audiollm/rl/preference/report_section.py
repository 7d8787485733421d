"""The section on preferences: curves, methods in one picture and one table, and pairs to read and hear."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from audiollm.pages.blocks import Chart, join
from audiollm.pages.charts import series_of
from audiollm.pages.page import Section
from audiollm.pages.sections import ReportContext
from audiollm.pages.stage_parts import chart_of, draw_chart
from audiollm.rl.report.comparison import Picture, compare_trainings, curves_of
from audiollm.rl.report.preference_parts import order_tiles, preference_parts
from audiollm.rl.report.trainings import POLICIES, REWARDS, VERDICTS, Training

ABOUT_METHODS = (
    "In order: share of held-out pairs whose chosen answer has the higher implicit reward. Rewards and margins are in "
    "the units of each method (its β), and not to be compared between methods. KL: from the reference to the policy, "
    "per token of the held-out answers. Length: mean tokens of the policy's own greedy answers to the same held-out "
    "prompts, before the training and at its end."
)


def preferences_section(context: ReportContext) -> Section | None:
    """Every stage `train_preference` in the order of the recipe, and several of them side by side."""
    trainings = [Training(stage) for stage in context.stages(POLICIES)]
    if not trainings:
        return None
    parts = preference_parts(context, trainings, policy_charts)
    compared = _compare_methods(context, trainings) if len(trainings) > 1 else None
    return Section("preferences", "Preferences", join(compared, parts), tiles=order_tiles(trainings))


def _compare_methods(context: ReportContext, trainings: Sequence[Training]) -> Markup:
    lengths = [training.lengths("tokens", training.stage.name) for training in trainings]
    seconds = [training.lengths("seconds", "") for training in trainings]
    pictures: list[Picture] = [
        ("Length of its own answers", "tokens", lengths),
        ("Length of its spoken answers", "seconds", seconds),
        ("In the right order", "share of pairs", curves_of(trainings, "accuracy")),
        ("Margin", "reward of chosen − rejected", curves_of(trainings, "margin")),
        ("Implicit reward, chosen", "own units of each method", curves_of(trainings, "reward_chosen")),
        ("Implicit reward, rejected", "own units of each method", curves_of(trainings, "reward_rejected")),
        ("KL from the reference", "nats per token", curves_of(trainings, "kl_per_token")),
        ("Gradient norm", "before clipping", curves_of(trainings, "gradient_norm")),
    ]
    return compare_trainings(context, trainings, pictures, "method", ABOUT_METHODS)


def policy_charts(training: Training) -> list[Chart]:
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


def _implicit_rewards(training: Training) -> list[Chart]:
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
