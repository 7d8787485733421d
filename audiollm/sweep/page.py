"""The page of a sweep: its best settings, the trials, and which parameters mattered."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from audiollm.files.atomic import write_text
from audiollm.pages.blocks import (
    Chart,
    Content,
    bold,
    charts,
    element,
    facts,
    heading,
    join,
    note,
    notice,
    paragraph,
    scrolled,
    share_bar,
    small,
    table,
)  # fmt: skip
from audiollm.pages.charts import scatter_chart
from audiollm.pages.formats import duration, without_home
from audiollm.pages.page import Page, Section, Tile
from audiollm.sweep.figures import Figure
from audiollm.sweep.ledger import Trial
from audiollm.sweep.spaces import CHOICES, Parameter, Space
from audiollm.sweep.study import MIN_IMPORTANCE_TRIALS, front
from audiollm.sweep.sweeping import Sweep
from audiollm.sweep.trial_recipes import recipe_text

PAGE, BEST = "report.html", "best.yaml"
NO_HELD_OUT = (
    "The figure that chose is no held-out figure: of many trials the best is partly luck on this very data. Hold data"
    " back for the winner alone: --final STAGE, or --final-override key=value."
)
FEW_IMPORTANCE_TRIALS = 20
"""Trials below which the importance of parameters is a rough estimate."""
MAX_TICK_CHARACTERS = 12
"""Characters of a choice that stand below a chart; where one is longer, numbers stand there."""


def write_sweep_page(sweep: Sweep) -> Path:
    """Write the page, and the winner's recipe beside it."""
    winner = sweep.winner
    if winner is not None and winner.state == "done":
        write_text(sweep.recipes.folder / BEST, best_recipe(sweep, winner))
    record = sweep.ledger.record
    counts = {state: len(record.in_state(state)) for state in ("done", "pruned", "failed", "running")}
    about = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    cpu_seconds = record.cpu_seconds
    sections = [_best_section(sweep, winner), _trials_section(sweep), _parameters_section(sweep)]
    page = Page(
        "audiollm sweep",
        f"{sweep.recipes.base.name} / {sweep.recipes.folder.name}",
        [*sections, _sweep_section(sweep)],
        [
            *_figure_tiles(sweep, winner),
            Tile(str(len(record.trials)), "trials", about),
            Tile(duration(cpu_seconds), "CPU time of the trials"),
        ],
        [] if sweep.options.has_final or record.final else [{"stage": "sweep", "text": NO_HELD_OUT}],
        about=element("p", element("span", f"recipe {sweep.recipes.path.name}"), class_="about"),
    )
    return page.write(sweep.recipes.folder / PAGE)


def best_recipe(sweep: Sweep, winner: Trial) -> str:
    """The winner's recipe as YAML, with the command that runs it."""
    figures = ", ".join(f"{name} = {value:.6g}" for name, value in winner.figures.items())
    head = [
        f"# Trial {winner.number} of a sweep of {sweep.recipes.path}: {figures}.",
        f"#   {repeat_command(sweep)}",
    ]
    text = recipe_text(sweep.recipes.path, sweep.recipes.overrides(winner.parameters))
    return "\n".join([*head, text])


def repeat_command(sweep: Sweep) -> str:
    """The command that runs the winner's recipe."""
    recipes = sweep.recipes
    runs = recipes.base.folder.parent
    options = [] if runs == Path("runs") else ["--runs", str(runs)]
    best = str(recipes.folder / BEST)
    return shlex.join(
        ["audiollm", "run", best, "--name", f"{recipes.base.name}-{recipes.folder.name}-best", *options]
    )


def show_parameter(value: Parameter) -> str:
    """A parameter for a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------ the winner


def _figure_tiles(sweep: Sweep, winner: Trial | None) -> list[Tile]:
    if winner is None or winner.state != "done":
        return []
    return [
        Tile(f"{value:.5g}", name, f"trial {winner.number}, on the data that chose it")
        for name, value in winner.figures.items()
    ]


def _best_section(sweep: Sweep, winner: Trial | None) -> Section:
    if winner is None or winner.state != "done":
        if len(sweep.options.figures) > 1 and sweep.front:
            advice = "Several figures have a front of trials, and no winner: --pick NUMBER names it."
            return Section("best", "Best", paragraph(advice), "The best settings")
        return Section("best", "Best", notice("No trial has finished."), "The best settings")
    spaces = sweep.recipes.spaces
    pairs = [(space.key, show_parameter(winner.parameters[space.key])) for space in spaces]
    equals = [trial for trial in sweep.ledger.record.in_state("done") if trial.figures == winner.figures]
    tie = f" {len(equals)} trials have the same figures: the first is taken." if len(equals) > 1 else ""
    overrides = " ".join(map(shlex.quote, sweep.recipes.overrides(winner.parameters)))
    again = shlex.join(["audiollm", "run", str(sweep.recipes.path)])
    content = join(
        paragraph(f"Trial {winner.number} of {len(sweep.ledger.record.trials)}.{tie}"),
        facts(pairs),
        _seed_spread(sweep, winner),
        _final(sweep),
        heading("To repeat it"),
        scrolled(element("pre", without_home(f"{repeat_command(sweep)}\n{again} {overrides}"))),
        note(f"{BEST} beside this page is the whole recipe with these settings."),
    )
    return Section("best", "Best", content, "The best settings")


def _seed_spread(sweep: Sweep, winner: Trial) -> Markup:
    """The winner's figures with further seeds."""
    runs = sweep.ledger.record.confirmations.get(winner.number, {})
    title = heading("With further seeds", "of the stages that the trials run")
    if not runs:
        return join(title, notice("Not run: --confirm 3 says how far the figure depends on the seed alone."))
    rows: list[Sequence[Content]] = []
    for figure in sweep.options.figures:
        values = [run["figures"][str(figure)] for run in runs.values() if str(figure) in run["figures"]]
        spread = f"{statistics.stdev(values):.3g}" if len(values) > 1 else "–"
        mean = f"{statistics.mean(values):.5g}" if values else "–"
        listed = ", ".join(f"{value:.5g}" for value in values)
        rows.append((str(figure), f"{winner.figures[str(figure)]:.5g}", mean, spread, listed))
    failures = [note(f"Seed {seed} failed: {run['error']}") for seed, run in runs.items() if run["error"]]
    head = ("figure", f"trial {winner.number}", "mean of further seeds", "standard deviation", "values")
    remark = "The trial's own value was chosen as the best of many; the mean of further seeds was not."
    return join(title, table(head, rows), note(remark), note(_untold_trials(sweep, winner)), failures)


def _untold_trials(sweep: Sweep, winner: Trial) -> str:
    """Count the trials that differ from the winner by no more than seeds do; empty for several figures."""
    name = str(sweep.options.figures[0])
    runs = sweep.ledger.record.confirmations[winner.number].values()
    values = [run["figures"][name] for run in runs if name in run["figures"]]
    if len(sweep.options.figures) > 1 or len(values) < 2:
        return ""
    reach = 2 * statistics.stdev(values)
    near = [
        trial
        for trial in sweep.ledger.record.in_state("done")
        if trial.number != winner.number and abs(trial.figures[name] - winner.figures[name]) <= reach
    ]
    if not near:
        return "No other trial lies within twice the standard deviation of the seeds."
    return f"{len(near)} of the other trials lie within twice the standard deviation of the seeds: not told apart."


def _final(sweep: Sweep) -> Markup | None:
    final = sweep.ledger.record.final
    if final is None:
        return None
    listed = [
        (f"{stage}.{name}", f"{value:.5g}")
        for stage, figures in final["figures"].items()
        for name, value in figures.items()
    ]
    changes = f" with {' '.join(final['overrides'])}" if final["overrides"] else ""
    about = f"trial {final['trial']} alone, once, after it was chosen{changes}"
    return join(heading("Final figures", about), facts(listed))


# ------------------------------------------------------------------------------------------ the trials


def _trials_section(sweep: Sweep) -> Section:
    trials, options = list(sweep.ledger.record.trials.values()), sweep.options
    done = [trial for trial in trials if trial.state == "done"]
    drawn = [_curve(figure, done) for figure in options.figures if done]
    if len(options.figures) > 1 and done:
        drawn.append(_front_chart(sweep, done))
    if options.prune_by is not None:
        drawn.append(_evaluations_chart(options.prune_by, trials))
    spaces = sweep.recipes.spaces
    best = {trial.number for trial in sweep.front}
    head = ("trial", *map(str, options.figures), *(space.key for space in spaces), "state", "CPU time")
    rows = []
    for trial in _in_order(trials, options.figures):
        figures = [trial.figures.get(str(figure)) for figure in options.figures]
        numbers = ["–" if value is None else f"{value:.5g}" for value in figures]
        rows.append(
            [
                bold(f"{trial.number}\N{NO-BREAK SPACE}★") if trial.number in best else trial.number,
                *([bold(number) for number in numbers] if trial.number in best else numbers),
                *(show_parameter(trial.parameters[space.key]) for space in spaces),
                [trial.state, trial.error and [" ", small(without_home(trial.error.splitlines()[0]))]],
                duration(trial.cpu_seconds),
            ]
        )
    star = "the best" if len(options.figures) == 1 else "the Pareto front: none is better by all figures"
    return Section(
        "trials", "Trials", join(charts(drawn), table(head, rows), note(f"★ {star}.")), "The trials"
    )


def _in_order(trials: Sequence[Trial], figures: Sequence[Figure]) -> list[Trial]:
    """By the first figure, the best first; trials without figures last."""

    def key(trial: Trial) -> tuple[bool, float, int]:
        value = trial.figures.get(str(figures[0]))
        return value is None, figures[0].sign * (value or 0.0), trial.number

    return sorted(trials, key=key)


def _curve(figure: Figure, done: Sequence[Trial]) -> Chart:
    """A figure over the trials, with the best so far."""
    points = [(float(trial.number), trial.figures[str(figure)]) for trial in done]
    best_so_far = [(points[0][0], points[0][1])]
    for number, value in points[1:]:
        best = best_so_far[-1][1]
        best_so_far.append((number, value if figure.sign * value < figure.sign * best else best))
    svg = scatter_chart({"trials": points}, "trial", f"{figure} over the trials", steps=best_so_far)
    better = "larger is better" if figure.is_larger_better else "smaller is better"
    return Chart(_breakable(str(figure)), svg, f"Line: the best so far; {better}.")


def _front_chart(sweep: Sweep, done: Sequence[Trial]) -> Chart:
    first, second = sweep.options.figures[:2]
    best = front(done, sweep.options.figures)
    groups: dict[str, Sequence[tuple[float | str, float]]] = {
        "front": [(trial.figures[str(first)], trial.figures[str(second)]) for trial in best],
        "others": [
            (trial.figures[str(first)], trial.figures[str(second)]) for trial in done if trial not in best
        ],
    }
    title = f"{second} against {first}"
    return Chart(title, scatter_chart(groups, str(first), title))


def _evaluations_chart(prune_by: Figure, trials: Sequence[Trial]) -> Chart:
    groups: dict[str, Sequence[tuple[float | str, float]]] = {
        name: [row for trial in trials if (trial.state == "pruned") == is_pruned for row in trial.evaluations]
        for name, is_pruned in (("finished", False), ("pruned", True))
    }
    return Chart(
        _breakable(str(prune_by)), scatter_chart(groups, "training step", f"evaluations: {prune_by}")
    )


# -------------------------------------------------------------------------------------- the parameters


def _parameters_section(sweep: Sweep) -> Section:
    done = sweep.ledger.record.in_state("done")
    content = []
    for figure in sweep.options.figures:
        drawn = [_slice(space, figure, done) for space in sweep.recipes.spaces if done]
        content.append(join(heading(str(figure)), _importance(sweep, figure, len(done)), charts(drawn)))
    return Section("parameters", "Parameters", join(content), "Which parameters mattered")


def _breakable(key: str) -> str:
    """A key that may go on in the next line after a dot or an underscore."""
    return re.sub(r"([._/])", "\\1\N{ZERO WIDTH SPACE}", key)


def _importance(sweep: Sweep, figure: Figure, count: int) -> Markup:
    shares = sweep.study.importance(figure)
    if not shares:
        return notice(f"The importance of parameters needs {MIN_IMPORTANCE_TRIALS} trials that differ in it.")
    rows = [(key, [share_bar(100 * share), f" {share:.2f}"]) for key, share in shares.items()]
    remark = "How much a parameter decides whether a trial is among the best tenth, by optuna's PED-ANOVA."
    rough = f" {count} trials give a rough estimate." if count < FEW_IMPORTANCE_TRIALS else ""
    return join(table(("parameter", "importance"), rows, "stages"), note(remark + rough))


def _slice(space: Space, figure: Figure, done: Sequence[Trial]) -> Chart:
    """A figure over one parameter, whatever the others are."""
    order = {choice: place for place, choice in enumerate(space.choices)}
    points = [(trial.parameters[space.key], trial.figures[str(figure)]) for trial in done]
    caption = ""
    if space.kind == CHOICES:
        points.sort(key=lambda point: order[str(point[0])])
        if max(map(len, space.choices)) > MAX_TICK_CHARACTERS:  # longer names lie over each other
            numbers = {choice: str(number) for number, choice in enumerate(space.choices, start=1)}
            points = [(numbers[str(value)], result) for value, result in points]
            caption = "; ".join(f"{number}: {choice}" for choice, number in numbers.items())
    title = f"{figure} over {space.key}"
    picture = scatter_chart({"trials": points}, "", title, is_log=space.kind == "log")
    return Chart(_breakable(space.key), picture, caption)


# ------------------------------------------------------------------------------------------- the sweep


def _sweep_section(sweep: Sweep) -> Section:
    recipes, options = sweep.recipes, sweep.options
    pruning = f"{options.pruning}, by {options.prune_by}" if options.prune_by else "none"
    pairs: Mapping[str, Content] = {
        "spaces": [[f"{space.key}={space.text}", element("br")] for space in recipes.spaces],
        "fixed": without_home(" ".join(recipes.fixed)) or "–",
        "sampler": f"{options.sampler}, seed {options.seed}",
        "pruning": pruning,
        "shared stages": ", ".join(recipes.shared) or "–",
        "stages of each trial": ", ".join(recipes.trial_stages),
        "not run by trials": ", ".join(recipes.idle_stages) or "–",
    }
    return Section("sweep", "Sweep", table(("", ""), pairs.items(), "list"), "The sweep")
