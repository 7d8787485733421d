"""The commands `run` and `plan`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
import yaml
from pydantic_core import to_jsonable_python
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from audiollm.commands.cluster import (
    GPU_REDUCTION_BYTES,
    H100_TFLOPS,
    cluster_lines,
    format_duration,
    reduction_seconds,
)
from audiollm.commands.machine_speed import MachineSpeed
from audiollm.errors import ConfigError
from audiollm.hub_models.folders import hub_access
from audiollm.hub_models.names import hub_id
from audiollm.hub_models.options import Download
from audiollm.recipe.ranks import Ranks, join_ranks, launch, leave
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import ON_THIS_MACHINE, Recipe, StagePlan, find_stage, load_recipe

NOTE_WIDTH = 28
"""The narrowest column for what a stage does."""
TRAINING_EXTRA, TRAINING_EXTRA_S = 1.2, 10.0
"""Evaluations and checkpoints of such a training, as a factor; loading, in seconds."""
MEASURED_DISK_MB = 100
"""Files of a recipe, from which on the time to write them counts."""

RecipeArgument = Annotated[
    Path | None, typer.Argument(help="The recipe, for example recipes/quickstart.yaml.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Changes to the recipe: key=value, stage.key=value.",
        metavar="[KEY=VALUE]...",
        show_default=False,
    ),
]
Name = Annotated[str | None, typer.Option(help="Name of the run, instead of the recipe's.")]
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
        typer.Option("--launch", min=1, help="Number of training processes on this machine, one per GPU."),
    ] = None,
    help_stage: Annotated[str | None, typer.Option(help="List a stage's settings and exit.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Run nothing: as `audiollm plan`.")] = False,
    download: Download = False,
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
    if dry_run:
        plan(recipe, overrides, name, runs, processes or 1, None, download)
        return
    loaded = load_recipe(require_recipe(recipe), overrides or [], name, runs)
    if processes and processes > 1:
        arguments = sys.argv[1:]
        raise typer.Exit(launch(processes, "audiollm.commands.cli", without_option(arguments, "--launch")))
    ranks = _join_launched_ranks()
    run_recipe(loaded, console if ranks.first else Console(quiet=True), start, only, ranks)
    leave(ranks)
    if not ranks.first:
        return
    for report in sorted(loaded.folder.glob("*.html")):
        console.print(f"[bold green]report:[/bold green] {report}", highlight=False, soft_wrap=True)


def plan(
    recipe: RecipeArgument = None,
    overrides: Overrides = None,
    name: Name = None,
    runs: Runs = Path("runs"),
    devices: Annotated[
        int, typer.Option("--launch", min=1, help="Number of devices that train together, as for `run`.")
    ] = 1,
    tflops: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            help="Training throughput of one device, in 10^12 operations per second.",
            show_default="for tiny and small what this machine does, measured, else 400 (H100)",
        ),
    ] = None,
    download: Download = False,
) -> None:
    """Show what a recipe would do: stages, parameters, tokens, memory of a device, time and disk. Nothing runs.

    The figures are estimates from the settings and from the headers of files; inputs need not be there yet.

    Example: audiollm plan recipes/tts/full.yaml language_model=~/models/Llama-3.2-3B --launch 64
    """
    absent: list[Path] = []
    console = Console()
    with hub_access(config_alone=True, may_lack=True):
        loaded = load_recipe(require_recipe(recipe), overrides or [], name, runs, absent)
        untimed = untimed_plans(loaded)
    speed = _speed(loaded, untimed, devices, tflops)
    plans = {name: timed(plan, loaded.size, devices, speed) for name, plan in untimed.items()}
    print_plan(plan_table(loaded, plans), console)
    notes = [
        f"{name}: {line}"
        for name, stage_plan in plans.items()
        for line in (stage_plan.details(devices, speed.tflops) if stage_plan.details else ())
    ]
    notes += [
        f"run folder: {loaded.folder}   seed {loaded.seed}   size {loaded.size}",
        f"trained on {devices} device{'s' * (devices > 1)} that reach{'es' * (devices == 1)} {speed.tflops:.3g} "
        "TFLOP/s (--launch, --tflops); an empty cell is not known",
    ]
    if speed.notes:
        notes.append(f"measured here: {', '.join(speed.notes)}")
    if loaded.size not in ON_THIS_MACHINE:
        notes += cluster_lines(plans, devices, speed.tflops, is_assumed=tflops is None)
    notes += [f"not there yet: {path}{_hub_remark(path)}" for path in dict.fromkeys(absent)]
    for note in notes:
        console.print(f"  {note}", highlight=False, markup=False, soft_wrap=True)


def _hub_remark(path: Path) -> str:
    """Tell how a plan sees a model that may be one of the hub."""
    return "; for a model of the hub: --download plans by its config.json" if hub_id(str(path)) else ""


def without_option(arguments: Sequence[str], option: str) -> list[str]:
    """The arguments of a command without an option and its value, written either way."""
    other_arguments: list[str] = []
    argument_iterator = iter(arguments)
    for argument in argument_iterator:
        if argument == option:
            next(argument_iterator, None)
        elif not argument.startswith(f"{option}="):
            other_arguments.append(argument)
    return other_arguments


def _speed(
    recipe: Recipe, plans: Mapping[str, StagePlan], devices: int, tflops: float | None
) -> MachineSpeed:
    """The speed by which times are computed: for tiny and small this machine's, measured as far as a stage needs it."""
    if recipe.size not in ON_THIS_MACHINE:
        return MachineSpeed(tflops or H100_TFLOPS, gradient_bytes=GPU_REDUCTION_BYTES)
    from audiollm.commands.measuring import measure_machine  # here: it loads torch

    known = [plan for plan in plans.values() if plan.seconds is None]
    speed = measure_machine(
        recipe.folder,
        devices,
        products=tflops is None and any(plan.flops or plan.seconds_on for plan in known),
        sound=any(plan.core_seconds is not None for plan in known),
        disk=sum(plan.disk_mb for plan in plans.values()) >= MEASURED_DISK_MB,
    )
    return replace(speed, tflops=tflops or speed.tflops)


def stage_plans(recipe: Recipe, devices: int, speed: MachineSpeed) -> dict[str, StagePlan]:
    """Plan the stages, by name, with memory and time on so many devices that train together."""
    return {name: timed(plan, recipe.size, devices, speed) for name, plan in untimed_plans(recipe).items()}


def stage_seconds(recipe: Recipe) -> dict[str, float | None]:
    """Seconds of each stage on this machine, by its plan; None: not known."""
    with hub_access(config_alone=True, may_lack=True):
        plans = untimed_plans(recipe)
    speed = _speed(recipe, plans, 1, None)
    return {name: timed(plan, recipe.size, 1, speed).seconds for name, plan in plans.items()}


def untimed_plans(recipe: Recipe) -> dict[str, StagePlan]:
    """The stages' own plans, by name."""
    plans: dict[str, StagePlan] = {}
    for stage in recipe.stages:
        planned = stage.stage.plan(stage.config, plans) if stage.stage.plan else StagePlan()
        plans[stage.name] = replace(planned, artifacts=stage.artifacts)
    return plans


def timed(plan: StagePlan, size: str, devices: int, speed: MachineSpeed) -> StagePlan:
    """A stage's plan with memory and time on devices of this speed."""
    memory_mb = plan.memory_mb if plan.memory_mb_on is None else plan.memory_mb_on(devices)
    seconds = plan.seconds
    if seconds is None and plan.core_seconds is not None:
        seconds = plan.core_seconds / speed.core
    elif seconds is None and (plan.seconds_on is not None or plan.flops):
        seconds = _training_seconds(plan, devices, speed)
        if size in ON_THIS_MACHINE:
            seconds = seconds * TRAINING_EXTRA + TRAINING_EXTRA_S / speed.core
    if seconds is not None and plan.seconds is None:
        seconds += plan.disk_mb / speed.disk_mb
    return replace(plan, seconds=seconds, memory_mb=memory_mb)


def _training_seconds(plan: StagePlan, devices: int, speed: MachineSpeed) -> float:
    if plan.seconds_on is not None:
        return plan.seconds_on(devices, speed.tflops)
    work_s = plan.flops / (devices * speed.tflops * 1e12)
    return work_s + reduction_seconds(plan.gradient_bytes, devices, speed.gradient_bytes)


def plan_table(recipe: Recipe, plans: Mapping[str, StagePlan]) -> Table:
    """Build the plan's table: one row per stage, then the totals."""
    table = Table(title=f"{recipe.name} ({recipe.path})", title_justify="left")
    table.add_column("stage", no_wrap=True)
    for heading in ("parameters", "tokens", "memory a device", "time", "disk"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("what", min_width=NOTE_WIDTH)
    for stage in recipe.stages:
        stage_plan = plans[stage.name]
        table.add_row(stage.name, *_cells(stage_plan), stage_plan.note or stage.stage.help)
    known_seconds = [plan.seconds for plan in plans.values() if plan.seconds is not None]
    total = StagePlan(
        tokens=sum(p.tokens for p in plans.values()),
        memory_mb=max(p.memory_mb for p in plans.values()),
        seconds=sum(known_seconds) if known_seconds else None,
        disk_mb=sum(p.disk_mb for p in plans.values()),
    )
    table.add_section()
    table.add_row("all", *_cells(total), "peak memory, summed tokens, known times and disk")
    return table


def print_plan(table: Table, console: Console) -> None:
    """The table where it fits; on a narrower terminal, a few lines for each stage. Nothing is cut."""
    widths = [max(map(len, map(str, (column.header, *column.cells)))) for column in table.columns[:-1]]
    if sum(widths) + NOTE_WIDTH + 3 * len(table.columns) + 1 <= console.width:
        console.print(table)
        return
    console.print(str(table.title), highlight=False, soft_wrap=True)
    names, *figures, what = ([str(cell) for cell in column.cells] for column in table.columns)
    headings = [str(column.header) for column in table.columns][1:-1]
    for row, name in enumerate(names):
        labelled_cells = [
            f"{head} {cells[row]}" for head, cells in zip(headings, figures, strict=True) if cells[row]
        ]
        console.print(f"[bold]{name}[/bold]: {what[row]}", highlight=False)
        if labelled_cells:
            console.print(Padding(", ".join(labelled_cells), (0, 0, 0, 2)), highlight=False)


def _cells(plan: StagePlan) -> list[str]:
    def number(value: float, unit: str = "") -> str:
        if not value:
            return ""
        for factor, suffix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
            if value >= factor:
                return f"{value / factor:.1f}{suffix}{unit}"
        return f"{value:.0f} {unit}".rstrip()

    memory, disk = (number(mb * 2**20, "B") if mb else "" for mb in (plan.memory_mb, plan.disk_mb))
    time = "" if plan.seconds is None else format_duration(plan.seconds)
    return [number(plan.parameters), number(plan.tokens), memory, time, disk]


def _join_launched_ranks() -> Ranks:
    try:
        return join_ranks()
    except ValueError as error:
        raise ConfigError(str(error), "environment", "start it with --launch, torchrun or srun") from None


def require_recipe(recipe: Path | None) -> Path:
    """The recipe's file; outside of a checkout, that which was installed with the package.

    Raises:
        ConfigError: there is none.
    """
    if recipe is None:
        raise ConfigError("no recipe given", "command line", "example: audiollm run recipes/quickstart.yaml")
    if not recipe.exists() and recipe.parts[0] == "recipes":
        installed = files("recipes").joinpath(*recipe.parts[1:])
        if installed.is_file():
            return Path(str(installed))
    return recipe


def _print_settings(kind: str, console: Console) -> None:
    """A stage's settings, each with its type, its default and its meaning."""
    stage = find_stage(kind, "--help-stage")
    console.print(f"[bold]{kind}[/bold]: {stage.help}", highlight=False)
    for key, field in stage.config.model_fields.items():
        line = Text.assemble((key, "bold"), f"  {type_name(field.annotation)}  ")
        default: Any = field.get_default(call_default_factory=True)
        line.append("required" if field.is_required() else f"default {yaml_text(default)}", "dim")
        console.print(line, soft_wrap=True)
        if field.description:
            console.print(Padding(Text(" ".join(field.description.split())), (0, 0, 0, 6)))
    console.print(f"makes: {', '.join(stage.artifacts)}", highlight=False, soft_wrap=True)


def yaml_text(value: Any) -> str:
    """The value as a recipe has it."""
    plain = to_jsonable_python(value)
    text = yaml.safe_dump(plain, default_flow_style=True, width=math.inf, sort_keys=False)
    return text.removesuffix("...\n").strip()


def type_name(annotation: Any) -> str:
    """The type of a setting in words of Python, without the checks that it is annotated with."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(type_name, arguments)))
    if annotation in (None, NoneType):
        return "null"
    name = getattr(origin or annotation, "__name__", str(annotation))
    inner = ", ".join("..." if argument is Ellipsis else type_name(argument) for argument in arguments)
    return f"{name}[{inner}]" if inner else name
