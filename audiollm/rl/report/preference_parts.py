"""The parts of the sections on preferences and on reward models: a part for each stage, and its facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from audiollm.pages.blocks import Chart, Content, join, stage_parts
from audiollm.pages.formats import percent_or_dash
from audiollm.pages.page import Tile
from audiollm.pages.run_record import RunRecord
from audiollm.pages.sections import ReportContext
from audiollm.pages.stage_parts import FROZEN_FACTS, Facts, allot, facts_of, training_part
from audiollm.rl.report.cases import prompts_and_pairs
from audiollm.rl.report.trainings import Training, origin

PAIRS_SHOWN, PROMPTS_SHOWN = 12, 4
"""Pairs and prompts that a section shows, over all stages together."""
LEAST_PAIRS, LEAST_PROMPTS = 2, 1
"""Those that each of many stages shows."""
BRIEF = ("objective", "in order, held out", "margin, held out")
"""The facts that stand beside the name of one of several stages."""


def preference_parts(
    context: ReportContext,
    trainings: Sequence[Training],
    draw: Callable[[Training], Sequence[Chart]],
    beside: Callable[[Training], Content] = lambda training: None,
) -> Markup:
    """Facts, charts, own answers and pairs of each stage.

    Args:
        beside: what follows the charts.
    """
    pairs = allot(PAIRS_SHOWN, [training.stage for training in trainings if training.pairs], LEAST_PAIRS)
    prompts = allot(
        PROMPTS_SHOWN, [training.stage for training in trainings if training.answers], LEAST_PROMPTS
    )
    parts = []
    for training in reversed(
        trainings
    ):  # where the page has its fill of sound, that of the first is left out
        name = training.stage.name
        cases = prompts_and_pairs(context, training, pairs.get(name, 0), prompts.get(name, 0))
        listed = _collect_preference_facts(context.run, training)
        parts.append(training_part(training.stage, listed, BRIEF, draw(training), beside(training), cases))
    return join(stage_parts(parts[::-1]))


def order_tiles(trainings: Sequence[Training], before: str = "") -> list[Tile]:
    """Held-out pairs in the right order, of the best training."""
    done = [training for training in trainings if training.stage.figures is not None]
    scored = [
        (accuracy, training) for training in done if (accuracy := training.figure("accuracy")) is not None
    ]
    if not scored:
        return []
    accuracy, best = max(scored, key=lambda pair: pair[0])
    about = best.objective if len(scored) == 1 else f"{best.stage.name}, the best of {len(scored)} trainings"
    error = best.calibration_error
    notes = [about, *([f"calibration error {error:.3f}"] if error is not None else [])]
    return [Tile(percent_or_dash(accuracy), f"{before}held-out pairs in order", "; ".join(notes))]


def _collect_preference_facts(run: RunRecord, training: Training) -> Facts:
    stage = training.stage
    if stage.figures is None or stage.result is None:
        return []
    named = ("accuracy", "margin")
    held_out = {name: value for name in named if (value := training.figure(name)) is not None}
    error = training.calibration_error
    begins = {"begins": origin(run, stage)}
    return facts_of(
        {**stage.figures, **held_out, **begins, "objective": training.objective or None, "error": error},
        ("begins", "begins from", str),
        ("objective", "objective", str),
        ("records", "records", lambda v: f"{v:,}"),
        ("held_out_records", "held-out records", lambda v: f"{v:,}"),
        ("set_aside", "set aside", lambda v: f"{v:,}"),
        ("steps", "training steps", lambda v: f"{v:,}"),
        ("accuracy", "in order, held out", percent_or_dash),
        ("margin", "margin, held out", lambda v: f"{v:.3f}"),
        ("error", "calibration error", lambda v: f"{v:.3f}"),
        ("kl_per_token", "KL from the reference, per token", lambda v: f"{v:.4f}"),
        ("answer_length", "length of its own answers", lambda v: f"{v:.1f} tokens"),
        ("answer_seconds", "seconds of its own answers", lambda v: f"{v:.2f} s"),
        *FROZEN_FACTS,
    )
