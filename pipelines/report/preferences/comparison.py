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
            [each.lengths("tokens", each.stage.name) for each in trainings],
        ),
        ("Length of its spoken answers", "seconds", [each.lengths("seconds", "") for each in trainings]),
        ("In the right order", "share of pairs", _each(trainings, "accuracy")),
        ("Margin", "reward of chosen − rejected", _each(trainings, "margin")),
        ("Implicit reward, chosen", "own units of each method", _each(trainings, "reward_chosen")),
        ("Implicit reward, rejected", "own units of each method", _each(trainings, "reward_rejected")),
        ("KL from the reference", "nats per token", _each(trainings, "kl_per_token")),
        ("Gradient norm", "before clipping", _each(trainings, "gradient_norm")),
    ]
    rows = [_method(material, each, place) for place, each in enumerate(trainings)]
    return {**_comparison(trainings, pictures, [*_starts(material, trainings), *rows]), "of_policies": True}


def reward_comparison(material: Material, trainings: Sequence[Training]) -> Row:
    pictures = [
        ("In the right order", "share of pairs", _each(trainings, "accuracy")),
        ("Margin", "score of chosen − rejected", _each(trainings, "margin")),
        ("Gradient norm", "before clipping", _each(trainings, "gradient_norm")),
    ]
    rows = [_method(material, each, place) for place, each in enumerate(trainings)]
    return {**_comparison(trainings, pictures, rows), "of_policies": False}


def _comparison(
    trainings: Sequence[Training],
    pictures: Sequence[tuple[str, str, Sequence[Series]]],
    rows: Sequence[Row],
) -> Row:
    return {
        "charts": _compared(pictures),
        "legend": _legend(trainings),
        "left_out": max(0, len(trainings) - MAX_COMPARED),
        "rows": rows,
        "answered": any(row["answered"] for row in rows),
    }


def _each(trainings: Sequence[Training], key: str) -> list[Series]:
    return [each.series(key, each.stage.name) for each in trainings]


def _compared(pictures: Sequence[tuple[str, str, Sequence[Series]]]) -> list[Row]:
    drawn_ones = [
        {"title": title, "svg": compared_chart(series, unit, f"{title} over the training steps, by stage")}
        for title, unit, series in pictures
    ]
    return [chart for chart in drawn_ones if chart["svg"]]


def _legend(trainings: Sequence[Training]) -> list[Row]:
    return [legend_entry(place, each.stage) for place, each in enumerate(trainings[:MAX_COMPARED])]


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
    answering = [(place, each) for place, each in enumerate(trainings) if each.answers]
    if len(answering) < 2:
        return []
    ids = [list(dict.fromkeys(str(row.get("id")) for row in each.answers)) for _, each in answering]
    shared = [id for id in ids[0] if all(id in others for others in ids)][:PROMPTS_COMPARED]
    sounds = RecordSounds(material, answering[0][1].stage, gallery)
    sounds.find(shared)
    prompts = []
    for id in shared:
        of_id = [(place, each, each.answers_to(id)) for place, each in answering]
        first = of_id[0][2][0]
        before = (
            [{"name": "before", "colour": None, "dashes": 0, **given_answer(first)}]
            if not first["step"]
            else []
        )
        after = [{**legend_entry(place, each.stage), **given_answer(rows[-1])} for place, each, rows in of_id]
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
    settings = [(each, each.stage.result.settings) for each in trainings if each.stage.result is not None]
    models = {str(told["model"]): each.stage for each, told in settings if isinstance(told.get("model"), str)}
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
    found = []
    for stage in material.stages("evaluate_listening"):
        model = stage.result.settings.get("model") if stage.result is not None else None
        figures = stage.figures or {}
        if isinstance(model, str) and is_model(Path(model)) and figures.get("accuracy") is not None:
            table = {key: figures.get(key) for key in ("low", "high")}
            found.append(
                {"name": stage.name, "value": figures["accuracy"], "n": figures.get("questions"), **table}
            )
    return found
