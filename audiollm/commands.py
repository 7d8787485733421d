"""The commands `run` and `plan`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from audiollm.config import ConfigError
from audiollm.recipe import Recipe, StagePlan, find_stage, load_recipe
from audiollm.runner import run_recipe
from audiollm.train.distributed import Ranks, join, launch, leave

RecipeArgument = Annotated[
    Path | None, typer.Argument(help="The recipe, for example recipes/quickstart.yaml.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Changes to it: key=value, stage.key=value.", metavar="[KEY=VALUE]...", show_default=False
    ),
]
Name = Annotated[str | None, typer.Option(help="Name of the run, in place of the recipe's.")]
Runs = Annotated[Path, typer.Option(help="Folder of all runs.")]


def run(
    recipe: RecipeArgument = None,
    overrides: Overrides = None,
    name: Name = None,
    runs: Runs = Path("runs"),
    start: Annotated[str | None, typer.Option("--from", help="Redo this stage and all after it.")] = None,
    only: Annotated[str | None, typer.Option(help="Run this stage alone.")] = None,
    processes: Annotated[
        int | None,
        typer.Option("--launch", min=1, help="Train on so many processes of this machine, one a GPU."),
    ] = None,
    help_stage: Annotated[str | None, typer.Option(help="List a stage's settings and end.")] = None,
) -> None:
    """Run a recipe, from its first unfinished stage on.

    What is done is skipped, what was cut short is resumed, and a stage whose settings or inputs changed is
    run afresh with all that depends on it.

    Several processes train together with --launch, or when torchrun or SLURM's srun starts them.

    Example: audiollm run recipes/quickstart.yaml --name mine audio=~/recordings transcripts=texts.csv
    """
    console = Console()
    if help_stage:
        _print_settings(help_stage, console)
        return
    loaded = load_recipe(_required(recipe), overrides or [], name, runs)
    if processes and processes > 1:
        arguments = sys.argv[1:]
        raise typer.Exit(launch(processes, "audiollm.cli", without_option(arguments, "--launch")))
    ranks = _joined()
    run_recipe(loaded, console if ranks.first else Console(quiet=True), start, only, ranks)
    leave(ranks)
    if not ranks.first:
        return
    for report in sorted(loaded.folder.glob("*.html")):
        console.print(f"[bold green]report:[/bold green] {report}", highlight=False, soft_wrap=True)


def plan(
    recipe: RecipeArgument = None, overrides: Overrides = None, name: Name = None, runs: Runs = Path("runs")
) -> None:
    """Show what a recipe would do: stages, parameters, tokens, memory and disk. Nothing runs.

    The figures are estimates from the settings and from the headers of the audio files.
    """
    loaded = load_recipe(_required(recipe), overrides or [], name, runs)
    console = Console()
    console.print(plan_table(loaded))
    console.print(f"  run folder: {loaded.folder}   seed {loaded.seed}   size {loaded.size}", highlight=False)


def without_option(arguments: Sequence[str], option: str) -> list[str]:
    """The arguments of a command without an option and its value, written either way."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == option:
            next(rest, None)
        elif not argument.startswith(f"{option}="):
            kept.append(argument)
    return kept


def plan_table(recipe: Recipe) -> Table:
    """One row a stage and one of totals."""
    plans: dict[str, StagePlan] = {}
    table = Table(title=f"{recipe.name} ({recipe.path})", title_justify="left")
    table.add_column("stage")
    for heading in ("parameters", "tokens", "memory", "disk"):
        table.add_column(heading, justify="right")
    table.add_column("what")
    for stage in recipe.stages:
        plans[stage.name] = made = stage.stage.plan(stage.config, plans) if stage.stage.plan else StagePlan()
        table.add_row(stage.name, *_cells(made), made.note or stage.stage.help)
    total = StagePlan(
        tokens=sum(p.tokens for p in plans.values()),
        memory_mb=max(p.memory_mb for p in plans.values()),
        disk_mb=sum(p.disk_mb for p in plans.values()),
    )
    table.add_section()
    table.add_row("all", *_cells(total), "peak memory, summed tokens and disk")
    return table


def _cells(plan: StagePlan) -> list[str]:
    def number(value: float, unit: str = "") -> str:
        if not value:
            return ""
        for factor, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
            if value >= factor:
                return f"{value / factor:.1f}{suffix}{unit}"
        return f"{value:.0f} {unit}".rstrip()

    memory, disk = (number(mb * 2**20, "B") if mb else "" for mb in (plan.memory_mb, plan.disk_mb))
    return [number(plan.parameters), number(plan.tokens), memory, disk]


def _joined() -> Ranks:
    try:
        return join()
    except ValueError as error:
        raise ConfigError(str(error), "environment", "start it with --launch, torchrun or srun") from None


def _required(recipe: Path | None) -> Path:
    if recipe is None:
        raise ConfigError("no recipe given", "command line", "example: audiollm run recipes/quickstart.yaml")
    if not recipe.exists() and recipe.parts[0] == "recipes":
        installed = files("recipes").joinpath(*recipe.parts[1:])
        if installed.is_file():  # outside of a checkout: the recipe that was installed with the package
            return Path(str(installed))
    return recipe


def _print_settings(kind: str, console: Console) -> None:
    stage = find_stage(kind, "--help-stage")
    console.print(f"[bold]{kind}[/bold]: {stage.help}", highlight=False)
    table = Table("setting", "type", "default", "meaning", box=None)
    for key, field in stage.config.model_fields.items():
        default: Any = "required" if field.is_required() else field.get_default(call_default_factory=True)
        table.add_row(key, _type_name(field.annotation), str(default), field.description or "")
    console.print(table)
    console.print(f"makes: {', '.join(stage.artifacts)}", highlight=False)


def _type_name(annotation: Any) -> str:
    name = getattr(annotation, "__name__", None) if isinstance(annotation, type) else None
    return name or str(annotation).replace("typing.", "").replace("pathlib.", "")
