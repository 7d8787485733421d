"""The command `sweep`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from audiollm.commands.cluster import format_duration
from audiollm.commands.run import Name, Overrides, RecipeArgument, Runs, require_recipe, stage_seconds
from audiollm.errors import ConfigError, suggestion
from audiollm.hub_models.options import Download
from audiollm.processes import available_cpus
from audiollm.recipe.stages import load_recipe
from audiollm.sweep.figures import Figure, parse_evaluation, parse_figure
from audiollm.sweep.page import NO_HELD_OUT, write_sweep_page
from audiollm.sweep.study import PRUNINGS, SAMPLERS, Pruning, grid_of, require_optuna
from audiollm.sweep.sweeping import Sweep, SweepOptions
from audiollm.sweep.trial_recipes import SweepRecipes, plan_recipes, upstream_closure

Choice = TypeVar("Choice", bound=str)
DEFAULT_TRIALS = 20


def sweep(
    recipe: RecipeArgument = None,
    overrides: Overrides = None,
    minimize: Annotated[
        list[str] | None, typer.Option(help="Figure that is to fall: STAGE.NAME, as in its stage.json.")
    ] = None,
    maximize: Annotated[list[str] | None, typer.Option(help="Figure that is to rise: STAGE.NAME.")] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of trials.", show_default=f"{DEFAULT_TRIALS}; grid: all combinations"
        ),
    ] = None,
    cpu_minutes: Annotated[
        float | None,
        typer.Option(min=0.0, help="CPU time of all trials together, after which no further trial begins."),
    ] = None,
    sampler: Annotated[
        str,
        typer.Option(
            help="random; grid (every combination of choices and whole numbers); tpe (learns from earlier trials)."
        ),
    ] = "tpe",
    prune: Annotated[
        str | None,
        typer.Option(
            help="End trials early that fall behind: median (worse than half of the finished trials), halving "
            "(not in the better half at evaluations 1, 2, 4, 8, ...), none.",
            show_default="median with --prune-by, else none",
        ),
    ] = None,
    prune_by: Annotated[
        str | None,
        typer.Option(
            help="Evaluation in the metrics.jsonl of a stage that pruning looks at, STAGE.NAME; with :max behind it, "
            "larger is better. With --prune and without this: the figure."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Trials that run at once.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampler.")] = 0,
    confirm: Annotated[
        int, typer.Option(min=0, help="Run the best settings again with so many further seeds.")
    ] = 0,
    final: Annotated[
        list[str] | None, typer.Option(help="Stage that runs once, at the end, for the winner alone.")
    ] = None,
    final_override: Annotated[
        list[str] | None,
        typer.Option(
            help="Change to the recipe for a run of the winner at the end: evaluate.samples=test.jsonl."
        ),
    ] = None,
    pick: Annotated[
        int | None, typer.Option(min=0, help="Trial to confirm and to score, in place of the best.")
    ] = None,
    name: Name = None,
    runs: Runs = Path("runs"),
    sweep_name: Annotated[str, typer.Option(help="Folder of this sweep in that of the run.")] = "sweep",
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run failed trials again, with their parameters.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show stages, trials and their time; nothing runs.")
    ] = False,
    download: Download = False,
) -> None:
    """Run a recipe many times with other settings, and say which are best.

    A setting gets a space in place of a value: log(1e-4,3e-3) and uniform(0,0.3) for real numbers, int(4,32) for whole
    ones, [true,false] for choices. key=value is fixed, as in `audiollm run`.

    Stages that no space changes run once, in the folder of the run, where a finished `audiollm run` has them already.
    The other stages that the figures depend on run in each trial. The page with the trials, the importance of the
    parameters and the best settings is runs/NAME/sweep/report.html; best.yaml beside it is a recipe.

    The same command goes on after a kill, and with more --trials. The best of many trials is partly luck:
    --confirm 3 measures how much, and --final STAGE scores data that no trial has seen, once.

    Example: audiollm sweep recipes/align/tiny.yaml --minimize train_preference.evaluation/loss
    'train_preference.learning_rate=log(1e-5,1e-3)' 'objective=[dpo,simpo]' --dry-run

    Example: audiollm sweep my.yaml --maximize evaluate.words_right 'train.dropout=uniform(0,0.3)'
    --prune-by train.evaluation/loss --trials 40 --workers 2 --confirm 3 --final evaluate_test
    """
    require_optuna()
    console = Console()
    figures = _figures(minimize, maximize)
    pruning, pruned_by = _pruning(prune, prune_by, figures)
    options = SweepOptions(
        figures=figures,
        sampler=_require_choice(sampler, SAMPLERS, "--sampler"),
        pruning=pruning,
        prune_by=pruned_by,
        seed=seed,
        trials=DEFAULT_TRIALS if trials is None and cpu_minutes is None and sampler != "grid" else trials,
        cpu_minutes=cpu_minutes,
        workers=workers,
        confirm=confirm,
        pick=pick,
        final_stages=tuple(final or ()),
        final_overrides=tuple(final_override or ()),
        retry_failed=retry_failed,
        download=download,
    )
    read = (*figures, *([pruned_by] if pruned_by else []))
    recipes = plan_recipes(require_recipe(recipe), overrides or [], read, name, runs, sweep_name)
    _refuse_options(recipes, options)
    if dry_run:
        print_sweep_plan(recipes, options, console)
        return
    if not options.has_final:
        console.print(NO_HELD_OUT, style="yellow", highlight=False)
    page = Sweep(recipes, options, console, write_sweep_page).run()
    console.print(f"[bold green]report:[/bold green] {page}", highlight=False, soft_wrap=True)


def print_sweep_plan(recipes: SweepRecipes, options: SweepOptions, console: Console) -> None:
    """Say which stages run once and which in each trial, how many trials there are, and how long they take."""
    seconds = stage_seconds(recipes.base)
    shared, trial_stages = list(recipes.shared), recipes.trial_stages
    lines = [f"space: {space.key}={space.text}" for space in recipes.spaces]
    lines += [
        f"shared stages, once, in {recipes.base.folder}: {_list_stages(shared, seconds)}",
        f"stages of each trial, in {recipes.folder}: {_list_stages(trial_stages, seconds)}",
    ]
    final = upstream_closure(recipes.base, options.final_stages)
    idle = [stage for stage in recipes.idle_stages if stage not in final]
    if options.has_final:
        stages = [stage for stage in final if stage in recipes.idle_stages] or trial_stages
        lines.append(
            f"for the winner alone: {_list_stages(stages, seconds)} {' '.join(options.final_overrides)}"
        )
    if idle:
        lines.append(f"not run, no figure depends on them: {', '.join(idle)}")
    lines.append(_estimate(recipes, options, sum(seconds[stage] or 0.0 for stage in trial_stages)))
    if options.confirm:
        lines.append(f"then {options.confirm} runs of the best with further seeds")
    for line in lines:
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def _estimate(recipes: SweepRecipes, options: SweepOptions, trial_seconds: float) -> str:
    """A line on the number of trials and their time."""
    count = options.trials
    if options.sampler == "grid":
        size = len(grid_of(recipes.spaces, options.seed))
        count = size if count is None else min(size, count)
    workers = f"{options.workers} at a time"
    if count is not None:
        time = f", about {format_duration(count * trial_seconds / options.workers)}" if trial_seconds else ""
        budget = f", at most {options.cpu_minutes:g} CPU-minutes" if options.cpu_minutes is not None else ""
        return f"{count} trials by {options.sampler}, {workers}{time}{budget}"
    assert options.cpu_minutes is not None
    if not trial_seconds:
        return f"trials by {options.sampler}, {workers}, for {options.cpu_minutes:g} CPU-minutes"
    trials = math.ceil(60 * options.cpu_minutes / (trial_seconds * available_cpus()))
    text = f"at least {trials} trials by {options.sampler}, {workers}: {options.cpu_minutes:g} CPU-minutes"
    return f"{text} of {format_duration(trial_seconds)} on {available_cpus()} CPUs a trial"


def _list_stages(stages: Sequence[str], seconds: Mapping[str, float | None]) -> str:
    times = [value for stage in stages if (value := seconds[stage]) is not None]
    return f"{', '.join(stages) or 'none'}{f', about {format_duration(sum(times))}' if times else ''}"


def _figures(minimize: Sequence[str] | None, maximize: Sequence[str] | None) -> tuple[Figure, ...]:
    figures = [parse_figure(text, "--minimize") for text in minimize or ()]
    figures += [parse_figure(text, "--maximize", is_larger_better=True) for text in maximize or ()]
    names = [str(figure) for figure in figures]
    if not figures:
        remedy = "--minimize STAGE.NAME or --maximize STAGE.NAME, for example train.evaluation/loss"
        raise ConfigError("no figure to choose by", "command line", remedy)
    if len(set(names)) < len(names):
        raise ConfigError("a figure is given twice", "command line", "keep one of them")
    return tuple(figures)


def _pruning(
    prune: str | None, prune_by: str | None, figures: Sequence[Figure]
) -> tuple[Pruning, Figure | None]:
    """How trials are pruned, and by which evaluations."""
    evaluation = parse_evaluation(prune_by, "--prune-by") if prune_by else None
    pruning = _require_choice(prune or ("median" if evaluation else "none"), PRUNINGS, "--prune")
    if pruning == "none":
        if evaluation is not None:
            raise ConfigError("goes with median or halving", "--prune-by", "leave --prune none out")
        return pruning, None
    if len(figures) > 1:
        raise ConfigError("trials with several figures are not pruned", "--prune", "name one figure")
    return pruning, evaluation or figures[0]


def _refuse_options(recipes: SweepRecipes, options: SweepOptions) -> None:
    """
    Raises:
        ConfigError: options that the recipe cannot follow.
    """
    if options.sampler == "grid":
        grid_of(recipes.spaces, options.seed)
    if len(options.figures) > 1 and (options.confirm or options.has_final) and options.pick is None:
        remedy = "run without --confirm and --final, look at the page, then add --pick NUMBER"
        raise ConfigError("several figures have a front of trials, and no winner", "command line", remedy)
    if options.confirm and not recipes.seeded_stages():
        problem = f"no stage of the trials has a seed ({', '.join(recipes.trial_stages)})"
        raise ConfigError(problem, "--confirm", "leave it out")
    names = [stage.name for stage in recipes.base.stages]
    for stage in options.final_stages:
        if stage not in names:
            raise ConfigError(f"{stage}: this recipe has no such stage", "--final", suggestion(stage, names))
        if stage in recipes.needed and not options.final_overrides:
            remedy = (
                "name a stage of its own for held-out data, or change this one: --final-override key=value"
            )
            raise ConfigError(f"{stage}: the figures depend on it, so every trial runs it", "--final", remedy)
    if options.final_overrides:
        first = {space.key: space.probes()[0] for space in recipes.spaces}
        overrides = recipes.overrides(first, options.final_overrides)
        load_recipe(recipes.path, overrides, recipes.base.name, recipes.base.folder.parent)


def _require_choice(word: str, words: Sequence[Choice], option: str) -> Choice:
    for candidate in words:
        if candidate == word:
            return candidate
    raise ConfigError(f"no such choice: {word!r}", option, suggestion(word, words))
