"""Several stages of a kind side by side: pictures with one legend, a table, answers to the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from markupsafe import Markup

from audiollm.pages.blocks import (
    Chart,
    Content,
    bold,
    cell,
    charts,
    element,
    heading,
    join,
    note,
    small,
    table,
)
from audiollm.pages.charts import MAX_COMPARED, Series, compared_chart, line_style
from audiollm.pages.formats import decimals, percent_or_dash
from audiollm.pages.run_record import Row, RunRecord, StageRecord
from audiollm.pages.sections import ReportContext
from audiollm.rl.report.cases import answer_cards, own_answer, parts_of_messages, prompt_card, words_and_clips
from audiollm.rl.report.record_sounds import RecordSounds
from audiollm.rl.report.trainings import Training, origin

PROMPTS_COMPARED = 3
"""Prompts whose answers by all methods stand side by side."""
Picture = tuple[str, str, Sequence[Series]]
"""Title, unit and curves."""


def swatch(place: int | None) -> Markup | None:
    """The colour and the kind of line of the stage at a place, in pictures of several; None beyond `MAX_COMPARED`."""
    if place is None or place >= MAX_COMPARED:
        return None
    colour, dashes = line_style(place)
    return join(element("i", class_=f"swatch d{dashes}", style=f"--line-colour:var(--m{colour})"), " ")


def compared_pictures(stages: Sequence[StageRecord], about: str, pictures: Iterable[Picture]) -> Markup:
    """The pictures of several trainings with one legend."""
    listed = [element("li", swatch(place), stage.name) for place, stage in enumerate(stages[:MAX_COMPARED])]
    left_out = len(stages) - MAX_COMPARED
    return join(
        heading("All in one picture", about),
        element("ul", listed, class_="legend"),
        note(f"And {left_out} more, which are in the table alone.") if left_out > 0 else None,
        charts(
            (
                Chart(title, compared_chart(series, unit, f"{title} over the training steps, by stage"))
                for title, unit, series in pictures
            ),
            "two",
        ),
    )


def curves_of(trainings: Sequence[Training], key: str) -> list[Series]:
    """A curve of each training."""
    return [training.series(key, training.stage.name) for training in trainings]


def compare_trainings(
    context: ReportContext,
    trainings: Sequence[Training],
    pictures: Sequence[Picture],
    unit: str,
    about: str = "",
) -> Markup:
    """Trainings on preferences side by side: pictures, a table, answers to the same prompts.

    Args:
        unit: heading of the first column: what is compared.
        about: how to read the table.
    """
    run, of_policies = context.run, unit == "method"
    methods = [*(_starts(run, trainings) if of_policies else []), *_methods(run, trainings)]
    is_evaluated = any(method["answered"] for method in methods)
    columns = ["KL per token", "length of its answers"] if of_policies else ["calibration error"]
    headings = [
        unit,
        "objective",
        "in order",
        "margin",
        *columns,
        *(["right answers"] if is_evaluated else []),
    ]
    rows = [_method_row(method, of_policies, is_evaluated, len(headings) - 2) for method in methods]
    where = "held-out pairs where they were evaluated, else those of the training"
    return join(
        compared_pictures([training.stage for training in trainings], where, pictures),
        table(headings, rows, "numbers methods"),
        element("p", about, class_="small note") if about else None,
        answer_cards("The same questions, answered by each", "", same_prompts(context, trainings)),
    )


def _method_row(method: Row, of_policies: bool, is_evaluated: bool, width: int) -> list[Content]:
    head = [[swatch(method["place"]), method["name"]], cell(method["objective"], class_="text")]
    if method["absent"]:
        return [*head, cell(method["absent"], colspan=width, class_="text")]
    accuracy, length = method["accuracy"], method["length"]
    cells: list[Content] = [
        "–" if accuracy is None else bold(percent_or_dash(accuracy)),
        decimals(method["margin"], 3),
    ]
    if of_policies:
        cells += [decimals(method["kl"], 4), f"{length[0]:.1f} → {length[1]:.1f}" if length else "–"]
    else:
        cells.append(decimals(method["error"], 3))
    return [*head, *cells, *([right_answers_cell(method["answered"])] if is_evaluated else [])]


def _methods(run: RunRecord, trainings: Sequence[Training]) -> list[Row]:
    """What each method reached on held-out pairs, and in the answers of its model."""
    rows = []
    for place, training in enumerate(trainings):
        lengths = [value for _, value in training.lengths("tokens", "").points]
        rows.append(
            {
                "place": place,
                "name": training.stage.name,
                "objective": training.objective,
                "absent": training.stage.absent,
                "accuracy": training.figure("accuracy"),
                "margin": training.figure("margin"),
                "kl": training.figure("kl_per_token"),
                "error": training.calibration_error,
                "length": (lengths[0], lengths[-1]) if lengths else None,
                "answered": right_answers(run, _is_below(training.stage)),
            }
        )
    return rows


def _is_below(stage: StageRecord) -> Callable[[Path], bool]:
    return lambda model: model.is_relative_to(stage.folder)


def same_prompts(context: ReportContext, trainings: Sequence[Training]) -> list[Markup]:
    """Prompts that all trainings answered: the answer before the training, and the last one of each."""
    answering = [(place, training) for place, training in enumerate(trainings) if training.answers]
    if len(answering) < 2:
        return []
    ids = [list(dict.fromkeys(str(row.get("id")) for row in training.answers)) for _, training in answering]
    shared = [id for id in ids[0] if all(id in stage_ids for stage_ids in ids)][:PROMPTS_COMPARED]
    sounds = RecordSounds(context, answering[0][1].stage)
    sounds.find(shared)
    prompts = []
    for id in shared:
        of_id = [(place, training.stage.name, training.answers_to(id)) for place, training in answering]
        first = of_id[0][2][0]
        answers: list[tuple[Content, Content]] = [] if first["step"] else [("before", own_answer(first))]
        answers += [([swatch(place), name], own_answer(rows[-1])) for place, name, rows in of_id]
        question = words_and_clips(parts_of_messages(first), first, sounds)
        prompts.append(prompt_card(id, question, answers))
    return prompts


def _starts(run: RunRecord, trainings: Sequence[Training]) -> list[Row]:
    """A row for each model that trainings begin from, where a stage evaluated its answers."""
    models = {
        str(training.stage.result.settings["start"]): training.stage
        for training in trainings
        if training.stage.result is not None and isinstance(training.stage.result.settings.get("start"), str)
    }
    rows = [
        {
            "name": origin(run, stage),
            "objective": "before the training",
            "absent": "",
            **dict.fromkeys(("place", "accuracy", "margin", "kl", "error", "length")),
            "answered": right_answers(run, Path(model).__eq__),
        }
        for model, stage in models.items()
    ]
    return [row for row in rows if row["answered"]]


def right_answers(run: RunRecord, is_model: Callable[[Path], bool]) -> list[Row]:
    """The right answers that stages `evaluate_listening` counted, of the models that are asked for."""
    rows = []
    for stage in run.stages("evaluate_listening"):
        model = stage.result.settings.get("model") if stage.result is not None else None
        figures = stage.figures or {}
        if isinstance(model, str) and is_model(Path(model)) and figures.get("accuracy") is not None:
            table = {key: figures.get(key) for key in ("low", "high")}
            rows.append(
                {"name": stage.name, "value": figures["accuracy"], "n": figures.get("questions"), **table}
            )
    return rows


def right_answers_cell(rows: Sequence[Row]) -> Markup:
    """The right answers that stages counted, below one another."""
    listed: list[Content] = []
    for row in rows:
        low, high = row["low"], row["high"]
        interval = (
            f"{percent_or_dash(low)} to {percent_or_dash(high)}, " if isinstance(low, int | float) else ""
        )
        listed += [element("br")] if listed else []
        listed += [bold(percent_or_dash(row["value"])), " ", small(f"{interval}{row['name']}")]
    return join(listed or "–")
