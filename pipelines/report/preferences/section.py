"""The sections on preferences: curves, methods in one picture and one table, and pairs to read and hear.

One section is for every stage `train_preference`, one for every stage `train_reward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from audiollm.evaluate.report.clips import Gallery, shares
from audiollm.evaluate.report.formats import percent_or_dash
from pipelines.report.curves import alarms_of, facts_of
from pipelines.report.material import Material, Row
from pipelines.report.preferences.cases import cases
from pipelines.report.preferences.charts import policy_charts, reliability, reward_charts
from pipelines.report.preferences.comparison import policy_comparison, reward_comparison, same_prompts
from pipelines.report.preferences.history import POLICIES, REWARD_MODELS, Training, origin

PAIRS_SHOWN, PROMPTS_SHOWN = 12, 4
"""Pairs and prompts that a section shows, over all stages together."""
LEAST_PAIRS, LEAST_PROMPTS = 2, 1
"""Those that each of many stages shows."""
BRIEF = ("objective", "in order, held out", "margin, held out")
"""The facts that stand beside the name of one of several stages."""


def preferences_section(material: Material, gallery: Gallery) -> Row:
    """Every stage `train_preference` in the order of the recipe; `absent` where it has none."""
    return _build_preferences_section(material, gallery, POLICIES, policy_charts, policy_comparison)


def rewards_section(material: Material, gallery: Gallery) -> Row:
    """Every stage `train_reward` in the order of the recipe; `absent` where it has none."""
    return _build_preferences_section(material, gallery, REWARD_MODELS, reward_charts, reward_comparison)


def preference_tiles(material: Material) -> list[Row]:
    """The large figures of a run: held-out pairs in the right order, of the best policy and the best reward model."""
    tiles = []
    for kind, before in ((POLICIES, ""), (REWARD_MODELS, "reward model: ")):
        done = [Training(stage) for stage in material.stages(kind) if stage.figures is not None]
        scored = [
            (accuracy, training) for training in done if (accuracy := training.figure("accuracy")) is not None
        ]
        if not scored:
            continue
        accuracy, best = max(scored, key=lambda pair: pair[0])
        notes = [
            best.objective if len(scored) == 1 else f"{best.stage.name}, the best of {len(scored)} trainings"
        ]
        error = best.calibration_error
        notes += [f"calibration error {error:.3f}"] if error is not None else []
        title = f"{before}held-out pairs in order"
        tiles.append({"value": percent_or_dash(accuracy), "title": title, "note": "; ".join(notes)})
    return tiles


def _build_preferences_section(
    material: Material,
    gallery: Gallery,
    kind: str,
    charts: Callable[[Training], list[Row]],
    comparison: Callable[[Material, Sequence[Training]], Row],
) -> Row:
    trainings = [Training(stage) for stage in material.stages(kind)]
    if not trainings:
        return {"absent": f"This recipe has no stage {kind}.", "stages": [], "compared": None}
    pairs = _allot_preference_slots(
        PAIRS_SHOWN, LEAST_PAIRS, [training for training in trainings if training.pairs]
    )
    prompts = _allot_preference_slots(
        PROMPTS_SHOWN, LEAST_PROMPTS, [training for training in trainings if training.answers]
    )
    # the last first: where the page has its fill of sound, that of the earlier ones is left out
    stages = [
        {
            **_build_preference_stage(material, training, charts(training)),
            "reliability": reliability(training),
            **cases(
                material,
                training,
                gallery,
                pairs.get(training.stage.name, 0),
                prompts.get(training.stage.name, 0),
            ),
        }
        for training in reversed(trainings)
    ]
    compared = None
    if len(trainings) > 1:
        compared = comparison(material, trainings) | {"prompts": same_prompts(material, trainings, gallery)}
    return {"absent": "", "stages": stages[::-1], "compared": compared}


def _allot_preference_slots(total: int, minimum: int, trainings: Sequence[Training]) -> dict[str, int]:
    counts = shares(total, len(trainings))
    return {
        training.stage.name: max(minimum, count) for training, count in zip(trainings, counts, strict=True)
    }


def _build_preference_stage(material: Material, training: Training, charts: Sequence[Row]) -> Row:
    stage = training.stage
    facts = _collect_preference_facts(material, training)
    return {
        "name": stage.name,
        "absent": stage.absent,
        "brief": stage.absent or " · ".join(f"{title} {value}" for title, value in facts if title in BRIEF),
        "facts": facts,
        "charts": [chart for chart in charts if chart["svg"]],
        "alarms": alarms_of(stage),
    }


def _collect_preference_facts(material: Material, training: Training) -> list[tuple[str, str]]:
    stage = training.stage
    if stage.figures is None or stage.result is None:
        return []
    named = ("accuracy", "margin")
    held_out = {name: value for name in named if (value := training.figure(name)) is not None}
    error = training.calibration_error
    begins = {"begins": origin(material, stage)}
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
    )
