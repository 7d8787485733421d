"""Several stages that were trained on preferences, side by side: pictures, a table, answers to the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from audiollm.evaluate.report.clips import Gallery
from pipelines.report.figures import MAX_COMPARED, Series, compared_chart, line_style
from pipelines.report.material import Material, Row, Trace
from pipelines.report.preferences.cases import (
    PROMPTS_COMPARED,
    given_answer,
    parts_of_messages,
    words_and_clips,
)
from pipelines.report.preferences.history import Training, origin
from pipelines.report.preferences.sounds import RecordSounds


def policy_comparison(material: Material, trainings: Sequence[Training]) -> Row:
    pictures = [
        (
            "Length of its own answers",
            "tokens",
            [training.lengths("tokens", training.stage.name) for training in trainings],
        ),
        (
            "Length of its spoken answers",
            "seconds",
            [training.lengths("seconds", "") for training in trainings],
        ),
        ("In the right order", "share of pairs", _collect_preference_curves(trainings, "accuracy")),
        ("Margin", "reward of chosen − rejected", _collect_preference_curves(trainings, "margin")),
        (
            "Implicit reward, chosen",
            "own units of each method",
            _collect_preference_curves(trainings, "reward_chosen"),
        ),
        (
            "Implicit reward, rejected",
            "own units of each method",
            _collect_preference_curves(trainings, "reward_rejected"),
        ),
        ("KL from the reference", "nats per token", _collect_preference_curves(trainings, "kl_per_token")),
        ("Gradient norm", "before clipping", _collect_preference_curves(trainings, "gradient_norm")),
    ]
    rows = [_method(material, training, place) for place, training in enumerate(trainings)]
    return {
        **_compare_preferences(trainings, pictures, [*_starts(material, trainings), *rows]),
        "of_policies": True,
    }


def reward_comparison(material: Material, trainings: Sequence[Training]) -> Row:
    pictures = [
        ("In the right order", "share of pairs", _collect_preference_curves(trainings, "accuracy")),
        ("Margin", "score of chosen − rejected", _collect_preference_curves(trainings, "margin")),
        ("Gradient norm", "before clipping", _collect_preference_curves(trainings, "gradient_norm")),
    ]
    rows = [_method(material, training, place) for place, training in enumerate(trainings)]
    return {**_compare_preferences(trainings, pictures, rows), "of_policies": False}


def _compare_preferences(
    trainings: Sequence[Training],
    pictures: Sequence[tuple[str, str, Sequence[Series]]],
    rows: Sequence[Row],
) -> Row:
    return {
        "charts": _draw_compared_charts(pictures),
        "legend": _legend(trainings),
        "left_out": max(0, len(trainings) - MAX_COMPARED),
        "rows": rows,
        "answered": any(row["answered"] for row in rows),
    }


def _collect_preference_curves(trainings: Sequence[Training], key: str) -> list[Series]:
    return [training.series(key, training.stage.name) for training in trainings]


def _draw_compared_charts(pictures: Sequence[tuple[str, str, Sequence[Series]]]) -> list[Row]:
    charts = [
        {"title": title, "svg": compared_chart(series, unit, f"{title} over the training steps, by stage")}
        for title, unit, series in pictures
    ]
    return [chart for chart in charts if chart["svg"]]


def _legend(trainings: Sequence[Training]) -> list[Row]:
    return [legend_entry(place, training.stage) for place, training in enumerate(trainings[:MAX_COMPARED])]


def legend_entry(place: int, stage: Trace) -> Row:
    """The name of a stage, and its colour and kind of line in pictures of several."""
    colour, dashes = line_style(place)
    return {"name": stage.name, "colour": colour if place < MAX_COMPARED else None, "dashes": dashes}


def _method(material: Material, training: Training, place: int) -> Row:
    """A row of the table: what the method reached on held-out pairs, and in the answers of its model."""
    lengths = [value for _, value in training.lengths("tokens", "").points]
    return {
        **legend_entry(place, training.stage),
        "objective": training.objective,
        "absent": training.stage.absent,
        "accuracy": training.figure("accuracy"),
        "margin": training.figure("margin"),
        "kl": training.figure("kl_per_token"),
        "error": training.calibration_error,
        "length": (lengths[0], lengths[-1]) if lengths else None,
        "answered": right_answers(material, lambda model: model.is_relative_to(training.stage.folder)),
    }


def same_prompts(material: Material, trainings: Sequence[Training], gallery: Gallery) -> list[Row]:
    """Prompts that all trainings answered: the answer before the training, and the last one of each."""
    answering = [(place, training) for place, training in enumerate(trainings) if training.answers]
    if len(answering) < 2:
        return []
    ids = [list(dict.fromkeys(str(row.get("id")) for row in training.answers)) for _, training in answering]
    shared = [id for id in ids[0] if all(id in stage_ids for stage_ids in ids)][:PROMPTS_COMPARED]
    sounds = RecordSounds(material, answering[0][1].stage, gallery)
    sounds.find(shared)
    prompts = []
    for id in shared:
        of_id = [(place, training, training.answers_to(id)) for place, training in answering]
        first = of_id[0][2][0]
        before = (
            [{"name": "before", "colour": None, "dashes": 0, **given_answer(first)}]
            if not first["step"]
            else []
        )
        after = [
            {**legend_entry(place, training.stage), **given_answer(rows[-1])}
            for place, training, rows in of_id
        ]
        prompts.append(
            {
                "id": id,
                "asked": words_and_clips(parts_of_messages(first), first, sounds),
                "answers": [*before, *after],
            }
        )
    return prompts


def _starts(material: Material, trainings: Sequence[Training]) -> list[Row]:
    """A row for each model that trainings begin from, where a stage evaluated its answers."""
    settings = [
        (training, training.stage.result.settings)
        for training in trainings
        if training.stage.result is not None
    ]
    models = {
        str(values["start"]): training.stage
        for training, values in settings
        if isinstance(values.get("start"), str)
    }
    rows = [
        {
            "name": origin(material, stage),
            "colour": None,
            "dashes": 0,
            "objective": "before the training",
            "absent": "",
            **dict.fromkeys(("accuracy", "margin", "kl", "error", "length")),
            "answered": right_answers(material, Path(model).__eq__),
        }
        for model, stage in models.items()
    ]
    return [row for row in rows if row["answered"]]


def right_answers(material: Material, is_model: Callable[[Path], bool]) -> list[Row]:
    """The right answers that stages `evaluate_listening` counted, of the models that are asked for."""
    rows = []
    for stage in material.stages("evaluate_listening"):
        model = stage.result.settings.get("model") if stage.result is not None else None
        figures = stage.figures or {}
        if isinstance(model, str) and is_model(Path(model)) and figures.get("accuracy") is not None:
            table = {key: figures.get(key) for key in ("low", "high")}
            rows.append(
                {"name": stage.name, "value": figures["accuracy"], "n": figures.get("questions"), **table}
            )
    return rows
