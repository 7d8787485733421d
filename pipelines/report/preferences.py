"""The sections on preferences: curves, methods in one picture and one table, and pairs to read and hear.

One section is for every stage `train_preference`, one for every stage `train_reward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from audiollm.evaluate.report.formats import percent_or_dash
from pipelines.report.curves import alarms_of, chart_of, drawn, facts_of, spread_places
from pipelines.report.figures import (
    MAX_COMPARED,
    Series,
    compared_chart,
    line_style,
    reliability_chart,
    series_of,
)
from pipelines.report.material import Material, Row, Trace
from pipelines.report.media import Gallery, PageClip, shares
from pipelines.report.record_sounds import RecordSounds

POLICIES, REWARD_MODELS = "train_preference", "train_reward"
PAIRS_SHOWN, PROMPTS_SHOWN, STEPS_SHOWN = 12, 4, 4
"""Pairs and prompts that a section shows, over all stages together, and answers to each prompt."""
LEAST_PAIRS, LEAST_PROMPTS = 2, 1
"""Those that each of many stages shows."""
PROMPTS_COMPARED = 3
"""Prompts whose answers by all methods stand side by side."""
MAX_CHARACTERS = 600
"""A longer text is cut on the page."""
REWARDS = (("reward_chosen", "chosen"), ("reward_rejected", "rejected"))
VERDICTS = (("reward_desirable", "desirable"), ("reward_undesirable", "undesirable"))
INSTEAD = {better: single for (better, _), (single, _) in zip(REWARDS, VERDICTS, strict=True)}
"""Where answers were judged one at a time, the figures that stand for those of pairs."""
NO_PAIRS = (
    "It left no pairs (pairs.jsonl): no records are held out, or its objective has no implicit rewards."
)
BRIEF = ("objective", "in order, held out", "margin, held out")
"""The facts that stand beside the name of one of several stages."""


@dataclass(frozen=True)
class Training:
    """A stage that was trained on preferences, and what it left behind."""

    stage: Trace

    @cached_property
    def rows(self) -> list[Row]:
        """Figures of the steps and of the evaluations."""
        return self.stage.rows("metrics.jsonl")

    @cached_property
    def answers(self) -> list[Row]:
        """The policy's own answers to held-out prompts at every evaluation."""
        return [row for row in self.stage.rows("answers.jsonl") if isinstance(row.get("step"), int)]

    @cached_property
    def pairs(self) -> list[Row]:
        """Held-out groups, the worst ordered first."""
        return [row for row in self.stage.rows("pairs.jsonl") if isinstance(row.get("answers"), list)]

    def answers_to(self, id: str) -> list[Row]:
        """The own answers to a prompt, by step."""
        return sorted(
            (row for row in self.answers if str(row.get("id")) == id), key=lambda row: int(row["step"])
        )

    @property
    def objective(self) -> str:
        """The objectives with their weights and settings, as they are written in a recipe."""
        told = self.stage.result.settings.get("objective") if self.stage.result is not None else None
        listed = told if isinstance(told, list) else [told] if told else []
        each = [_objective(one, len(listed) > 1) for one in listed]
        return " + ".join(filter(None, each))

    def key(self, name: str) -> str:
        """The name of a figure in the rows: in a mix of objectives, the later ones' have theirs before it."""
        known = {key.removeprefix("evaluation/") for row in self.rows for key in row}
        return name if name in known else min((k for k in known if k.endswith(f"/{name}")), default=name)

    @cached_property
    def judges_single(self) -> bool:
        """Whether answers were judged one at a time, and not against one another."""
        return any(key.rpartition("/")[2] == "reward_desirable" for row in self.rows for key in row)

    def figure(self, name: str) -> float | None:
        """A held-out figure of the finished stage; of single answers, the margin is between the means of both kinds."""
        figures = self.stage.figures or {}
        if name == "margin" and self.judges_single:
            better, worse = (self.figure(key) for key, _ in VERDICTS)
            return None if better is None or worse is None else better - worse
        found = figures.get(name, figures.get(self.key(name)))
        return float(found) if isinstance(found, int | float) else None

    def series(self, key: str, name: str) -> Series:
        """The held-out values of a figure, else those in training."""
        if self.judges_single and key in INSTEAD:
            return self.series(INSTEAD[key], name)
        if self.judges_single and key == "margin":
            better, worse = (dict(self.series(each, name).points) for each, _ in VERDICTS)
            return Series(
                name, [(step, better[step] - worse[step]) for step in better if step in worse], True
            )
        held_out = series_of(self.rows, f"evaluation/{self.key(key)}", name, dotted=True)
        return held_out if held_out.points else series_of(self.rows, self.key(key), name)

    def lengths(self, key: str, name: str) -> Series:
        """The mean of `tokens` or `seconds` over the policy's own answers, by step."""
        by_step: dict[int, list[float]] = {}
        for row in self.answers:
            if isinstance(row.get(key), int | float):
                by_step.setdefault(row["step"], []).append(float(row[key]))
        return Series(name, sorted((step, fmean(values)) for step, values in by_step.items()), dotted=True)


def preferences_section(material: Material, gallery: Gallery) -> Row:
    """Every stage `train_preference` in the order of the recipe; `absent` where it has none."""
    return _section(material, gallery, POLICIES, _policy_charts, _policy_comparison)


def rewards_section(material: Material, gallery: Gallery) -> Row:
    """Every stage `train_reward` in the order of the recipe; `absent` where it has none."""
    return _section(material, gallery, REWARD_MODELS, _reward_charts, _reward_comparison)


def preference_tiles(material: Material) -> list[Row]:
    """The large figures of a run: held-out pairs in the right order, of the best policy and the best reward model."""
    tiles = []
    for kind, before in ((POLICIES, ""), (REWARD_MODELS, "reward model: ")):
        done = [Training(stage) for stage in material.stages(kind) if stage.figures is not None]
        scored = [(accuracy, each) for each in done if (accuracy := each.figure("accuracy")) is not None]
        if not scored:
            continue
        accuracy, best = max(scored, key=lambda pair: pair[0])
        notes = [
            best.objective if len(scored) == 1 else f"{best.stage.name}, the best of {len(scored)} trainings"
        ]
        error = _calibration_error(best)
        notes += [f"calibration error {error:.3f}"] if error is not None else []
        title = f"{before}held-out pairs in order"
        tiles.append({"value": percent_or_dash(accuracy), "title": title, "note": "; ".join(notes)})
    return tiles


def _section(material: Material, gallery: Gallery, kind: str, charts: Any, comparison: Any) -> Row:
    trainings = [Training(stage) for stage in material.stages(kind)]
    if not trainings:
        return {"absent": f"This recipe has no stage {kind}.", "stages": [], "compared": None}
    pairs = _shared(PAIRS_SHOWN, LEAST_PAIRS, [each for each in trainings if each.pairs])
    prompts = _shared(PROMPTS_SHOWN, LEAST_PROMPTS, [each for each in trainings if each.answers])
    # the last first: where the page has its fill of sound, that of the earlier ones is left out
    stages = [
        {
            **_stage(material, each, charts(each)),
            "reliability": _reliability(each),
            **_cases(material, each, gallery, pairs.get(each.stage.name, 0), prompts.get(each.stage.name, 0)),
        }
        for each in reversed(trainings)
    ]
    compared = None
    if len(trainings) > 1:
        compared = comparison(material, trainings) | {"prompts": _same_prompts(material, trainings, gallery)}
    return {"absent": "", "stages": stages[::-1], "compared": compared}


def _shared(total: int, least: int, trainings: Sequence[Training]) -> dict[str, int]:
    counts = shares(total, len(trainings))
    return {each.stage.name: max(least, count) for each, count in zip(trainings, counts, strict=True)}


def _stage(material: Material, training: Training, charts: Sequence[Row]) -> Row:
    stage = training.stage
    facts = _facts(material, training)
    return {
        "name": stage.name,
        "absent": stage.absent,
        "brief": stage.absent or " · ".join(f"{title} {value}" for title, value in facts if title in BRIEF),
        "facts": facts,
        "charts": [chart for chart in charts if chart["svg"]],
        "alarms": alarms_of(stage),
    }


def _facts(material: Material, training: Training) -> list[tuple[str, str]]:
    stage = training.stage
    if stage.figures is None or stage.result is None:
        return []
    named = ("accuracy", "margin")
    found = {name: value for name in named if (value := training.figure(name)) is not None}
    error = _calibration_error(training)
    begins = {"begins": origin(material, stage)}
    return facts_of(
        {**stage.figures, **found, **begins, "objective": training.objective or None, "error": error},
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


def origin(material: Material, stage: Trace) -> str | None:
    """The stage that made the model that a training begins from, else the folder that it is in."""
    model = stage.result.settings.get("model") if stage.result is not None else None
    if not isinstance(model, str):
        return None
    below = [name for name in stage.upstream if Path(model).is_relative_to(material.recipe.folder / name)]
    if below:
        return below[0]
    path = Path(model)
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def _objective(told: object, weighted: bool) -> str:
    if not isinstance(told, dict):
        return str(told)
    settings = {key: value for key, value in told.items() if key not in ("name", "weight")}
    weight = f"{told['weight']:g} " if weighted and isinstance(told.get("weight"), int | float) else ""
    text = ", ".join(f"{key} {value}" for key, value in settings.items())
    return f"{weight}{told.get('name')}" + (f" ({text})" if text else "")


# ------------------------------------------------------------------------------------------------ charts


def _policy_charts(training: Training) -> list[Row]:
    rows, key = training.rows, training.key
    own = [
        training.lengths("tokens", "its own"),
        series_of(rows, f"evaluation/{key('length_chosen')}", "chosen"),
        series_of(rows, f"evaluation/{key('length_rejected')}", "rejected"),
    ]
    return [
        chart_of(rows, "Margin", "reward of chosen − rejected", key("margin")),
        *_implicit_rewards(training),
        chart_of(rows, "In the right order", "share of pairs", key("accuracy")),
        drawn(
            "KL from the reference",
            "nats per token",
            [series_of(rows, "evaluation/kl_per_token", "KL", True)],
        ),
        drawn("Length of answers", "tokens", own),
        drawn("Length of spoken answers", "seconds", [training.lengths("seconds", "its own")]),
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
        drawn("Implicit reward, held out", unit, held_out),
        drawn("Implicit reward, training", unit, trained),
    ]


def _reward_charts(training: Training) -> list[Row]:
    rows, key = training.rows, training.key
    return [
        chart_of(rows, "In the right order", "share of pairs", key("accuracy")),
        chart_of(rows, "Margin", "score of chosen − rejected", key("margin")),
        chart_of(rows, "Loss", "mean over pairs", "loss"),
        chart_of(rows, "Gradient norm", "before clipping", "gradient_norm"),
    ]


def _reliability(training: Training) -> list[Row]:
    """The picture of a reward model's calibration, where it left one."""
    told = training.stage.json("reliability.json")
    bins = told.get("bins") if isinstance(told, dict) else None
    known = [
        (float(row["confidence"]), float(row["accuracy"]), int(row["count"]))
        for row in (bins if isinstance(bins, list) else [])
        if isinstance(row, dict)
        and all(isinstance(row.get(key), int | float) for key in ("confidence", "accuracy", "count"))
    ]
    svg = reliability_chart(known, "share of pairs in the right order over the model's confidence")
    note = "A bar that ends at the dashed line: as often right as sure. In each bar: its held-out pairs."
    return [{"title": "Reliability", "svg": svg, "note": note}] if svg else []


def _calibration_error(training: Training) -> float | None:
    told = training.stage.json("reliability.json")
    error = told.get("error") if isinstance(told, dict) else None
    return float(error) if isinstance(error, int | float) else training.figure("calibration_error")


# -------------------------------------------------------------------------------------- several trainings


def _policy_comparison(material: Material, trainings: Sequence[Training]) -> Row:
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


def _reward_comparison(material: Material, trainings: Sequence[Training]) -> Row:
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
    return [_legend_entry(place, each) for place, each in enumerate(trainings[:MAX_COMPARED])]


def _legend_entry(place: int, training: Training) -> Row:
    colour, dashes = line_style(place)
    return {"name": training.stage.name, "colour": colour if place < MAX_COMPARED else None, "dashes": dashes}


def _method(material: Material, training: Training, place: int) -> Row:
    """A row of the table: what the method reached on held-out pairs, and in the answers of its model."""
    lengths = [value for _, value in training.lengths("tokens", "").points]
    return {
        **_legend_entry(place, training),
        "objective": training.objective,
        "absent": training.stage.absent,
        "accuracy": training.figure("accuracy"),
        "margin": training.figure("margin"),
        "kl": training.figure("kl_per_token"),
        "error": _calibration_error(training),
        "length": (lengths[0], lengths[-1]) if lengths else None,
        "answered": _answered(material, lambda model: model.is_relative_to(training.stage.folder)),
    }


def _same_prompts(material: Material, trainings: Sequence[Training], gallery: Gallery) -> list[Row]:
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
            [{"name": "before", "colour": None, "dashes": 0, **_given(first)}] if not first["step"] else []
        )
        after = [{**_legend_entry(place, each), **_given(rows[-1])} for place, each, rows in of_id]
        prompts.append(
            {"id": id, "asked": _spoken(_messages(first), first, sounds), "answers": [*before, *after]}
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
            "answered": _answered(material, lambda asked, model=model: asked == Path(model)),
        }
        for model, stage in models.items()
    ]
    return [row for row in rows if row["answered"]]


def _answered(material: Material, is_model: Any) -> list[Row]:
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


# ------------------------------------------------------------------------------------------ pairs, answers


def _cases(material: Material, training: Training, gallery: Gallery, pairs: int, prompts: int) -> Row:
    """Pairs and own answers with their sound, and a sentence where there are none."""
    sounds = RecordSounds(material, training.stage, gallery)
    shown = training.pairs[:pairs]
    ids = list(dict.fromkeys(str(row.get("id")) for row in training.answers))
    sounds.find([*(str(row.get("id")) for row in shown), *ids[:prompts]])
    done = training.stage.figures is not None
    return {
        "pairs": [_pair(row, sounds) for row in shown],
        "wrong": sum(row.get("right") is False for row in training.pairs),
        "num_pairs": len(training.pairs),
        "pairs_absent": NO_PAIRS if done and not training.pairs and training.stage.kind == POLICIES else "",
        "prompts": [_prompt(id, training.answers_to(id), sounds) for id in ids[:prompts]],
        "num_prompts": len(ids),
        "answers_absent": _answers_absent(training) if done else "",
    }


def _answers_absent(training: Training) -> str:
    if training.answers or training.stage.kind != POLICIES:
        return ""
    settings = training.stage.result.settings if training.stage.result is not None else {}
    if settings.get("eval_answers") == 0:
        return "Its own answers were not asked for (eval_answers: 0)."
    return "It left no answers of its own (answers.jsonl)."


def _pair(row: Row, sounds: RecordSounds) -> Row:
    answers = [answer for answer in row["answers"] if isinstance(answer, dict)]
    return {
        "id": str(row.get("id")),
        "right": row.get("right") is True,
        "margin": row.get("margin"),
        "asked": _spoken(_messages(row), row, sounds),
        "answers": [
            {
                "role": str(answer.get("role")),
                "good": answer.get("role") in ("chosen", "desirable"),
                "reward": answer.get("reward"),
                "tokens": answer.get("tokens"),
                **_spoken(
                    [part for part in answer.get("content") or [] if isinstance(part, dict)], row, sounds
                ),
            }
            for answer in answers
        ],
    }


def _prompt(id: str, rows: Sequence[Row], sounds: RecordSounds) -> Row:
    answers = [rows[place] for place in spread_places(len(rows), STEPS_SHOWN)]
    return {
        "id": id,
        "asked": _spoken(_messages(rows[0]), rows[0], sounds),
        "answers": [{"name": f"step {row['step']:,}", **_given(row)} for row in answers],
    }


def _given(row: Row) -> Row:
    """An answer of the policy's own."""
    return {
        "text": _short(str(row.get("answer") or "")),
        "tokens": row.get("tokens"),
        "seconds": row.get("seconds"),
        "stopped": row.get("stopped") is not False,
    }


def _messages(row: Mapping[str, Any]) -> list[Row]:
    """The parts of all messages, in order."""
    messages = row.get("messages")
    listed = (
        [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    )
    return [part for message in listed for part in message.get("content") or [] if isinstance(part, dict)]


def _spoken(parts: Sequence[Row], row: Row, sounds: RecordSounds) -> Row:
    """The words of parts, and a clip for each recording."""
    text = " ".join(str(part.get("text")) for part in parts if part.get("type") == "text")
    clips: list[PageClip] = [
        sounds.clip(str(row.get("id")), part) for part in parts if part.get("type") == "audio"
    ]
    return {"text": _short(text), "clips": clips}


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"
