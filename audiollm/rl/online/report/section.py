"""The section on policies: curves, rewards before and after, answers as they change, and a browser of rollouts.

It shows every stage `train_policy` and `train_interpreter`, and several of them side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from audiollm.pages.blocks import (
    Content,
    StagePart,
    bold,
    cell,
    element,
    heading,
    join,
    score_cell,
    small,
    stage_parts,
    table,
)  # fmt: skip
from audiollm.pages.charts import Series, series_of
from audiollm.pages.formats import decimals, percent_or_dash
from audiollm.pages.page import Section, Tile
from audiollm.pages.run_record import Row, RunRecord
from audiollm.pages.sections import ReportContext
from audiollm.pages.stage_parts import FROZEN_FACTS, Facts, allot, facts_of, spread_places, training_part
from audiollm.rl.online.report.browser import STEPS_SHOWN, AnswerCases, AnswerSounds, rollout_browser, signed
from audiollm.rl.online.report.charts import policy_training_charts
from audiollm.rl.online.report.history import KINDS, REWARD, FreshTraining, choice_words, short_name
from audiollm.rl.report.cases import answer_cards, own_answer, prompt_card
from audiollm.rl.report.comparison import (
    Picture,
    compared_pictures,
    right_answers,
    right_answers_cell,
    swatch,
)
from audiollm.rl.report.record_sounds import RecordSounds
from audiollm.rl.report.trainings import origin

PROMPTS_SHOWN, ANSWERS_SHOWN = 3, 4
"""Held-out prompts over all stages together, and answers to each."""
BRIEF = ("method", "reward, held out")
"""The facts that stand beside the name of one of several stages."""
ABOUT_BEFORE_AND_AFTER = (
    "greedy answers to held-out prompts; intervals: 95 %, Wilson for shares, else by the normal distribution; the "
    "change is measured answer by answer"
)


def policies_section(context: ReportContext) -> Section | None:
    """Every stage that is trained on its own answers, in the order of the recipe."""
    trainings = [FreshTraining(stage) for stage in context.stages(*KINDS)]
    if not trainings:
        return None
    steps = allot(STEPS_SHOWN, [of.stage for of in trainings if of.stage.result is not None], 2)
    prompts = allot(PROMPTS_SHOWN, [of.stage for of in trainings if of.answers], 1)
    # the last first: where the page has its fill of sound, that of the earlier ones is left out
    parts = [
        _policy_part(context, of, steps.get(of.stage.name, 0), prompts.get(of.stage.name, 0))
        for of in reversed(trainings)
    ]
    compared = _compare_policies(context.run, trainings) if len(trainings) > 1 else None
    return Section(
        "policies", "Policies", join(compared, stage_parts(parts[::-1])), tiles=_policy_tiles(trainings)
    )


def _policy_tiles(trainings: Sequence[FreshTraining]) -> list[Tile]:
    """What the best training made of the held-out answers."""
    candidates = []
    for training in trainings:
        name = "accuracy" if training.tables("accuracy") else REWARD
        tables = training.before_and_after(name)
        if tables and training.stage.figures is not None:
            candidates.append((tables[-1]["mean"], name, tables[0], tables[-1], training))
    if not candidates:
        return []
    _, name, before, after, training = max(
        candidates, key=lambda candidate: (candidate[1] == "accuracy", candidate[0])
    )
    note = f"before {training.stage.name}: {shown_value(before, before['mean'])}; greedy, n = {after['n']}"
    title = "right answers, held out" if name == "accuracy" else "reward, held out"
    return [Tile(shown_value(after, after["mean"]), title, note)]


def shown_value(table: Row, value: float | None) -> str:
    """A mean of a table as a percentage where it is a share, else as a number."""
    if value is None:
        return "–"
    return percent_or_dash(value) if table["is_share"] else f"{value:.3f}".replace("-", "−")


def _policy_part(context: ReportContext, training: FreshTraining, steps: int, prompts: int) -> StagePart:
    return training_part(
        training.stage,
        _collect_policy_facts(context.run, training),
        BRIEF,
        policy_training_charts(training),
        _own_answers(context, training, prompts),
        rollout_browser(context, training, steps),
        before_charts=before_and_after(context.run, training),
    )


def _collect_policy_facts(run: RunRecord, training: FreshTraining) -> Facts:
    stage = training.stage
    if stage.figures is None or stage.result is None:
        return []
    settings = training.settings
    rewards = settings.get("rewards") or {}
    weights = ", ".join(
        f"{short_name(str(name))} {_format_reward_weight(setting)}" for name, setting in rewards.items()
    )
    settings_facts = {
        "begins": origin(run, stage),
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
        *FROZEN_FACTS,
    )


def _format_reward_weight(setting: object) -> str:
    value = setting.get("weight", 1.0) if isinstance(setting, dict) else setting
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _kl_words(training: FreshTraining) -> str | None:
    kl = training.settings.get("kl")
    if not isinstance(kl, dict):
        return None
    return f"{kl.get('estimator')} in the {kl.get('place')}, {choice_words(kl.get('controller'))}"


def before_and_after(run: RunRecord, training: FreshTraining) -> Markup | None:
    """Rewards of the greedy answers before and after, their change, and right answers that stages counted."""
    names = training.reward_names
    rows: list[list[Content]] = []
    for name in [*names, *([REWARD] if len(names) != 1 else [])]:
        tables = training.before_and_after(name)
        if tables:
            gain = training.gain(name)
            cells = [_mean_cell(of) for of in tables] + ["–"] * (len(tables) == 1)
            title = "weighted sum" if name == REWARD else short_name(name)
            rows.append([title, *cells, "–" if gain is None else _gain_text(gain)])
    if not rows:
        return None
    after = _evaluated_after(run, training)
    if after:
        start = Path(str(training.settings.get("start")))
        before = right_answers(run, start.__eq__)
        title = join("right answers ", small("by stages evaluate_listening"))
        rows.append([title, right_answers_cell(before), right_answers_cell(after), None])
    headings = ("reward", "before", "after", "change")
    return join(heading("Before and after", ABOUT_BEFORE_AND_AFTER), table(headings, rows, "scores"))


def _mean_cell(of: Row) -> Markup:
    """A mean with its interval; a share is drawn, any other mean is text."""
    if of["is_share"]:
        return score_cell({**of, "value": of["mean"]})
    interval = ""
    if of["low"] is not None:
        interval = f"{shown_value(of, of['low'])} to {shown_value(of, of['high'])}, "
    return join(bold(shown_value(of, of["mean"])), small(f"{interval}n = {of['n']}"))


def _gain_text(gain: Row) -> str:
    scale, unit = (100, " points") if gain["is_share"] else (1, "")

    def text(value: float) -> str:
        return signed(value) if not gain["is_share"] else f"{scale * value:+.1f}".replace("-", "−")

    low, high = gain["low"], gain["high"]
    if gain["is_share"] and low is not None:
        low, high = max(-1.0, low), min(1.0, high)
    interval = "" if low is None else f" ({text(low)} to {text(high)})"
    if low == high == 0:  # an interval of no width would look certain
        interval = f" (none of {gain['n']} changed)"
    return f"{text(gain['mean'])}{unit}{interval}"


def _evaluated_after(run: RunRecord, training: FreshTraining) -> list[Row]:
    """Right answers that stages `evaluate_listening` counted after the training."""
    return right_answers(run, lambda path: path.is_relative_to(training.stage.folder))


def _own_answers(context: ReportContext, training: FreshTraining, count: int) -> Markup | None:
    """Greedy answers to the same held-out prompts as the training goes on: those that change most first."""
    ids = list(dict.fromkeys(str(row.get("id")) for row in training.answers))
    by_id = {id: training.answers_to(id) for id in ids}
    ids.sort(key=lambda id: -len({row.get("reward") for row in by_id[id]}))
    cases = AnswerCases(RecordSounds(context, training.stage), AnswerSounds(training, context))
    cases.sounds.find(ids[:count])
    about = (
        f"{min(count, len(ids))} of {len(ids)} held-out prompts, greedy, those whose reward changes most; step 0 is "
        "the model that it began from"
    )
    listed = [policy_prompt(id, by_id[id], training, cases) for id in ids[:count]]
    return answer_cards("What it answers as it learns", about, listed)


def policy_prompt(id: str, rows: Sequence[Row], training: FreshTraining, cases: AnswerCases) -> Markup:
    """A prompt with the answers at some evaluations; the first and the last can be heard."""
    from audiollm.rl.rollouts.records import groups_of_rows

    selected_rows = [rows[place] for place in spread_places(len(rows), ANSWERS_SHOWN)]
    groups = groups_of_rows(selected_rows, training.stage.folder / "answers")
    answers = []
    for place, (row, group) in enumerate(zip(selected_rows, groups, strict=True)):
        answer, name = group.answers[0], f"step {row['step']:,}"
        is_heard = place in (0, len(selected_rows) - 1)
        note = "" if answer.reward is None else f"reward {decimals(answer.reward)}"
        drawn = own_answer(
            {**row, "stopped": not answer.is_truncated},
            note,
            cases.answer_sounds.clips(answer) if is_heard else [],
            name,
            is_speech=answer.speech_file is not None,
        )
        answers.append((name, drawn))
    return prompt_card(id, cases.question(groups[0]), answers, cases.right_answer(groups[0]))


def _compare_policies(run: RunRecord, trainings: Sequence[FreshTraining]) -> Markup:
    held_out = [
        (f"{short_name(name)}, held out", "greedy answers", [of.held_out(name) for of in trainings])
        for name in _shared_rewards(trainings)
    ]
    pictures: list[Picture] = [
        ("Reward, held out", "weighted sum", [of.held_out(REWARD) for of in trainings]),
        *held_out,
        ("KL from the reference", "nats per answer", _collect_policy_curves(trainings, "kl")),
        ("Entropy", "nats per token", _collect_policy_curves(trainings, "entropy")),
        ("Length of answers", "tokens", _collect_policy_curves(trainings, "answer_length")),
        ("Groups without variance", "share", _collect_policy_curves(trainings, "groups_without_variance")),
    ]
    headings = ("stage", "method", "held out, before → after", "KL at the end", "length", "right answers")
    rows = [_compared_row(run, training, place) for place, training in enumerate(trainings)]
    about = "held-out prompts where it says so, else the answers of the training"
    return join(
        compared_pictures([training.stage for training in trainings], about, pictures),
        table(headings, rows, "numbers methods"),
    )


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


def _compared_row(run: RunRecord, training: FreshTraining, place: int) -> list[Content]:
    stage = training.stage
    head = [[swatch(place), stage.name], cell(training.method, class_="text")]
    if stage.absent:
        return [*head, cell(stage.absent, colspan=4, class_="text")]
    means: list[Content] = []
    for name in [*_shared_rewards([training]), REWARD]:
        tables = training.before_and_after(name)
        if tables:
            before, after = (shown_value(tables[end], tables[end]["mean"]) for end in (0, -1))
            means += [element("br")] if means else []
            means += [small(short_name(name)), f" {before} → ", bold(after)]
    kl = [value for _, value in series_of(training.rows, "kl", "").points]
    length = decimals((stage.figures or {}).get("answer_length"), 1)
    answered = right_answers_cell(_evaluated_after(run, training))
    return [*head, means or "–", decimals(kl[-1] if kl else None, 3), length, answered]
