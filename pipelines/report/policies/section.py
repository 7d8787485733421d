"""The section on policies: curves, rewards before and after, answers as they change, and a browser of rollouts.

It shows every stage `train_policy` and `train_interpreter`, and several of them side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

from audiollm.evaluate.report.clips import Gallery, shares
from audiollm.evaluate.report.formats import percent_or_dash
from pipelines.report.curves import alarms_of, facts_of, spread_places
from pipelines.report.figures import MAX_COMPARED, Series, compared_chart, series_of
from pipelines.report.material import Material, Row
from pipelines.report.policies.browser import STEPS_SHOWN, AnswerSounds, rollout_browser, signed
from pipelines.report.policies.charts import policy_training_charts
from pipelines.report.policies.history import KINDS, REWARD, FreshTraining, choice_words, short_name
from pipelines.report.preferences.cases import given_answer, words_and_clips
from pipelines.report.preferences.comparison import legend_entry, right_answers
from pipelines.report.preferences.history import origin
from pipelines.report.preferences.sounds import RecordSounds

PROMPTS_SHOWN, ANSWERS_SHOWN = 3, 4
"""Held-out prompts over all stages together, and answers to each."""
BRIEF = ("method", "reward, held out")
"""The facts that stand beside the name of one of several stages."""


def policies_section(material: Material, gallery: Gallery) -> Row:
    """Every stage that is trained on its own answers, in the order of the recipe; `absent` where it has none."""
    trainings = [FreshTraining(stage) for stage in material.stages(*KINDS)]
    if not trainings:
        return {"absent": f"This recipe has no stage {KINDS[0]}.", "stages": [], "compared": None}
    steps = _allot_policy_slots(
        STEPS_SHOWN, 2, [training for training in trainings if training.stage.result is not None]
    )
    prompts = _allot_policy_slots(PROMPTS_SHOWN, 1, [training for training in trainings if training.answers])
    # the last first: where the page has its fill of sound, that of the earlier ones is left out
    stages = [
        _build_policy_stage(
            material,
            training,
            gallery,
            steps.get(training.stage.name, 0),
            prompts.get(training.stage.name, 0),
        )
        for training in reversed(trainings)
    ]
    compared = _compare_policies(material, trainings) if len(trainings) > 1 else None
    return {"absent": "", "stages": stages[::-1], "compared": compared}


def policy_tiles(material: Material) -> list[Row]:
    """The large figure of a run: what the best training made of the held-out answers."""
    candidates = []
    for training in (FreshTraining(stage) for stage in material.stages(*KINDS) if stage.figures is not None):
        name = "accuracy" if training.tables("accuracy") else REWARD
        tables = training.before_and_after(name)
        if tables:
            candidates.append((tables[-1]["mean"], name, tables[0], tables[-1], training))
    if not candidates:
        return []
    _, name, before, after, training = max(
        candidates, key=lambda candidate: (candidate[1] == "accuracy", candidate[0])
    )
    note = f"before {training.stage.name}: {shown_value(before, before['mean'])}; greedy, n = {after['n']}"
    title = "right answers, held out" if name == "accuracy" else "reward, held out"
    return [{"value": shown_value(after, after["mean"]), "title": title, "note": note}]


def shown_value(table: Row, value: float | None) -> str:
    """A mean of a table as a percentage where it is a share, else as a number."""
    if value is None:
        return "–"
    return percent_or_dash(value) if table["is_share"] else f"{value:.3f}".replace("-", "−")


def _allot_policy_slots(total: int, minimum: int, trainings: Sequence[FreshTraining]) -> dict[str, int]:
    counts = shares(total, len(trainings))
    return {
        training.stage.name: max(minimum, count) for training, count in zip(trainings, counts, strict=True)
    }


def _build_policy_stage(
    material: Material, training: FreshTraining, gallery: Gallery, steps: int, prompts: int
) -> Row:
    stage = training.stage
    facts = _collect_policy_facts(material, training)
    return {
        "name": stage.name,
        "absent": stage.absent,
        "brief": stage.absent or " · ".join(f"{title} {value}" for title, value in facts if title in BRIEF),
        "facts": facts,
        "charts": [chart for chart in policy_training_charts(training) if chart["svg"]],
        "alarms": alarms_of(stage),
        "scores": _compare_rewards(training),
        "evaluated": _evaluated(material, training),
        "browser": rollout_browser(material, training, gallery, steps),
        **_own_answers(material, training, gallery, prompts),
    }


def _collect_policy_facts(material: Material, training: FreshTraining) -> list[tuple[str, str]]:
    stage = training.stage
    if stage.figures is None or stage.result is None:
        return []
    settings = training.settings
    rewards = settings.get("rewards") or {}
    weights = ", ".join(
        f"{short_name(str(name))} {_format_reward_weight(setting)}" for name, setting in rewards.items()
    )
    settings_facts = {
        "begins": origin(material, stage),
        "method": training.method,
        "rewards": weights,
        "kl": _kl_words(training),
        "group_size": settings.get("group_size"),
        "batch_size": settings.get("batch_size"),
        "critic": "yes" if settings.get("critic") else None,
    }
    return facts_of(
        {**stage.figures, **settings_facts},
        ("begins", "begins from", str),
        ("method", "method", str),
        ("rewards", "rewards, by weight", str),
        ("kl", "KL", str),
        ("critic", "critic", str),
        ("prompts", "prompts", lambda v: f"{v:,}"),
        ("held_out_prompts", "held-out prompts", lambda v: f"{v:,}"),
        ("set_aside", "set aside", lambda v: f"{v:,}"),
        ("batch_size", "prompts per step", lambda v: f"{v:,}"),
        ("group_size", "answers per prompt", lambda v: f"{v:,}"),
        ("steps", "training steps", lambda v: f"{v:,}"),
        (REWARD, "reward, held out", lambda v: f"{v:.3f}"),
        ("answer_length", "length of held-out answers", lambda v: f"{v:.1f} tokens"),
    )


def _format_reward_weight(setting: object) -> str:
    value = setting.get("weight", 1.0) if isinstance(setting, dict) else setting
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _kl_words(training: FreshTraining) -> str | None:
    kl = training.settings.get("kl")
    if not isinstance(kl, dict):
        return None
    return f"{kl.get('estimator')} in the {kl.get('place')}, {choice_words(kl.get('controller'))}"


def _compare_rewards(training: FreshTraining) -> list[Row]:
    """Rewards of the greedy answers before and after, and their change."""
    names = training.reward_names
    rows = []
    for name in [*names, *([REWARD] if len(names) != 1 else [])]:
        tables = training.before_and_after(name)
        if not tables:
            continue
        gain = training.gain(name)
        rows.append(
            {
                "name": "weighted sum" if name == REWARD else short_name(name),
                "cells": [_format_mean_cell(table) for table in tables],
                "gain": None if gain is None else _gain_text(gain),
            }
        )
    return rows


def _format_mean_cell(table: Row) -> Row:
    """A mean with its interval; a share is drawn by the page's own table, any other mean is text."""
    if table["is_share"]:
        return {"share": {"value": table["mean"], **{key: table[key] for key in ("low", "high", "n")}}}
    interval = ""
    if table["low"] is not None:
        interval = f"{shown_value(table, table['low'])} to {shown_value(table, table['high'])}, "
    return {"text": shown_value(table, table["mean"]), "interval": f"{interval}n = {table['n']}"}


def _gain_text(gain: Row) -> str:
    scale, unit = (100, " points") if gain["is_share"] else (1, "")

    def text(value: float) -> str:
        return signed(value) if not gain["is_share"] else f"{scale * value:+.1f}".replace("-", "−")

    low, high = gain["low"], gain["high"]
    if gain["is_share"] and low is not None:
        low, high = max(-1.0, low), min(1.0, high)
    interval = "" if low is None else f" ({text(low)} to {text(high)})"
    return f"{text(gain['mean'])}{unit}{interval}"


def _evaluated(material: Material, training: FreshTraining) -> Row:
    """Right answers that stages `evaluate_listening` counted before and after the training."""
    model = training.settings.get("start")
    return {
        "before": right_answers(material, lambda path: str(path) == str(model)),
        "after": right_answers(material, lambda path: path.is_relative_to(training.stage.folder)),
    }


def _own_answers(material: Material, training: FreshTraining, gallery: Gallery, count: int) -> Row:
    """Greedy answers to the same held-out prompts as the training goes on: those that change most first."""
    ids = list(dict.fromkeys(str(row.get("id")) for row in training.answers))
    by_id = {id: training.answers_to(id) for id in ids}
    ids.sort(key=lambda id: -len({row.get("reward") for row in by_id[id]}))
    sounds = RecordSounds(material, training.stage, gallery)
    answer_sounds = AnswerSounds(training, gallery)
    sounds.find(ids[:count])
    return {
        "prompts": [
            _build_policy_prompt(id, by_id[id], training, sounds, answer_sounds) for id in ids[:count]
        ],
        "num_prompts": len(ids),
    }


def _build_policy_prompt(
    id: str, rows: Sequence[Row], training: FreshTraining, sounds: RecordSounds, answer_sounds: AnswerSounds
) -> Row:
    from audiollm.rl.rollouts.records import groups_of_rows

    selected_rows = [rows[place] for place in spread_places(len(rows), ANSWERS_SHOWN)]
    folder = training.stage.folder / "answers"
    groups = groups_of_rows(selected_rows, folder)
    answers = []
    for row, group in zip(selected_rows, groups, strict=True):
        reward = group.answers[0].reward
        answer = given_answer({**row, "stopped": not group.answers[0].is_truncated})
        clips = answer_sounds.clips(group.answers[0]) if row in (selected_rows[0], selected_rows[-1]) else []
        note = "" if reward is None else f"reward {reward:.2f}".replace("-", "−")
        speaks = group.answers[0].speech_file is not None
        answers.append(
            {"name": f"step {row['step']:,}", **answer, "note": note, "clips": clips, "speaks": speaks}
        )
    question = words_and_clips(groups[0].question, {"id": id}, sounds)
    return {
        "id": id,
        "asked": question,
        "key": words_and_clips(groups[0].key, {"id": id}, sounds),
        "answers": answers,
    }


def _compare_policies(material: Material, trainings: Sequence[FreshTraining]) -> Row:
    pictures: list[tuple[str, str, list[Series]]] = [
        ("Reward, held out", "weighted sum", [training.held_out(REWARD) for training in trainings]),
        *(
            (
                f"{short_name(name)}, held out",
                "greedy answers",
                [training.held_out(name) for training in trainings],
            )
            for name in _shared_rewards(trainings)
        ),
        ("KL from the reference", "nats per answer", _collect_policy_curves(trainings, "kl")),
        ("Entropy", "nats per token", _collect_policy_curves(trainings, "entropy")),
        ("Length of answers", "tokens", _collect_policy_curves(trainings, "answer_length")),
        ("Groups without variance", "share", _collect_policy_curves(trainings, "groups_without_variance")),
    ]
    charts = [
        {"title": title, "svg": compared_chart(series, unit, f"{title} over the training steps, by stage")}
        for title, unit, series in pictures
    ]
    return {
        "charts": [chart for chart in charts if chart["svg"]],
        "legend": [
            legend_entry(place, training.stage) for place, training in enumerate(trainings[:MAX_COMPARED])
        ],
        "left_out": max(0, len(trainings) - MAX_COMPARED),
        "rows": [_compared_row(material, training, place) for place, training in enumerate(trainings)],
        "rewards": [short_name(name) for name in _shared_rewards(trainings)],
    }


def _shared_rewards(trainings: Sequence[FreshTraining]) -> list[str]:
    """Rewards that every training has, at most four."""
    names_by_training = [training.reward_names for training in trainings if training.rows]
    return [
        name
        for name in (names_by_training[0] if names_by_training else [])
        if all(name in names for names in names_by_training)
    ][:4]


def _collect_policy_curves(trainings: Sequence[FreshTraining], key: str) -> list[Series]:
    return [series_of(training.rows, key, training.stage.name) for training in trainings]


def _compared_row(material: Material, training: FreshTraining, place: int) -> Row:
    figures = training.stage.figures or {}
    cells = []
    for name in [*_shared_rewards([training]), REWARD]:
        tables = training.before_and_after(name)
        cells.append(
            (
                short_name(name),
                shown_value(tables[0], tables[0]["mean"]),
                shown_value(tables[-1], tables[-1]["mean"]),
            )
            if tables
            else None
        )
    kl = [value for _, value in series_of(training.rows, "kl", "").points]
    return {
        **legend_entry(place, training.stage),
        "method": training.method,
        "absent": training.stage.absent,
        "cells": [cell for cell in cells if cell is not None],
        "kl": kl[-1] if kl else None,
        "length": figures.get("answer_length"),
        "answered": _evaluated(material, training)["after"],
    }
