"""What the commands `annotate` and `audiocot` share: options, their settings, the printed plan, and the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import yaml
from pydantic import BaseModel, ValidationError
from rich.console import Console

from audiollm.errors import ConfigError
from audiollm.hub_models.downloads import HubError
from audiollm.recipe.config import load_document, show_path
from audiollm.recipe.stages import plain_problem
from audiollm.terminal import print_table

if TYPE_CHECKING:
    from audiollm.recipe.stages import Stage, StagePlan
    from pipelines.steps.settings import StepsConfig


class EngineName(StrEnum):
    """Place of the work: processes of this machine or a Ray cluster."""

    local = "local"
    ray = "ray"


Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.", show_default=False)]
SettingsFile = Annotated[Path | None, typer.Option(help="A YAML file with any settings of the stage.")]
MissingScorer = Annotated[
    str | None,
    typer.Option(help="If a model is missing: fail, or skip (go on without it).", show_default="fail"),
]
Engine = Annotated[
    EngineName | None,
    typer.Option(help="Processes of this machine, or a Ray cluster.", show_default="local"),
]
RayAddress = Annotated[
    str | None, typer.Option(help="Address of the Ray cluster.", show_default="one on this machine")
]
Workers = Annotated[int | None, typer.Option(min=1, help="Worker processes.", show_default="one per CPU")]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Try the failed calls of an earlier run again.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and what is missing, and exit.")]

Config = TypeVar("Config", bound="StepsConfig")


def merge_settings(
    file: Path | None, options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of a file over the defaults, and over both the options that are given (not None)."""
    raw_settings = {**defaults, **(load_document(file).data if file else {})}
    return raw_settings | {name: value for name, value in options.items() if value is not None}


def validate_settings(
    config_class: type[Config],
    raw_settings: dict[str, Any],
    overrides: Sequence[str],
    options: Mapping[str, str],
    thresholds: type[BaseModel],
) -> Config:
    """The settings of a stage, typed.

    Args:
        overrides: `key=value` in nested settings.
        options: setting -> the option of the command line that it was given by, empty where it was not.

    Raises:
        ConfigError: naming the setting.
    """
    for text in overrides:
        _override_setting(raw_settings, text)
    try:
        return config_class.model_validate(raw_settings)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
    stage = config_class.catalog.stage
    key, listing = show_path(tuple(problem["loc"])), f"audiollm run --help-stage {stage} lists the settings"
    if problem["type"] == "extra_forbidden":
        inside = problem["input"] if isinstance(problem["input"], dict) else {}
        wrong = ".".join([key, *list(inside)[:1]])
        nearest = _nearest_setting(wrong, config_class, thresholds)
        raise ConfigError(
            f"{wrong}: no such setting", "", f"did you mean {nearest!r}?" if nearest else listing
        )
    message = plain_problem(problem)
    cause = problem.get("ctx", {}).get("error")
    option = next((option for setting, option in options.items() if key.startswith(setting)), "")
    remedy = "check the path" if "no such file" in message else listing
    if isinstance(cause, HubError):
        message, remedy = cause.message, cause.remedy
    raise ConfigError(f"{key}: {message}" if key else message, option, remedy)


def print_steps_plan(
    console: Console, preset: str, limits: BaseModel, steps: Iterable[str], amount: str, plan: StagePlan
) -> None:
    """Print preset, thresholds, steps, the amount of audio, and the estimated time."""
    console.print(f"  preset {preset}", highlight=False)
    rows = [
        [name, ", ".join(value) if isinstance(value, list) else f"{value}"]
        for name, value in limits.model_dump().items()
        if value is not None
    ]
    print_table(console, ["threshold", "value"], rows, figures=False)
    console.print(f"  steps: {', '.join(steps)}", highlight=False)
    minutes = (plan.core_seconds or 0.0) / 60
    console.print(f"  {amount}, about {minutes:.1f} minutes with these workers; {plan.note}", highlight=False)


def run_stage(stage: Stage, config: StepsConfig, out: Path, console: Console) -> None:
    """Run a stage outside of a recipe, with its settings in OUT/config.yaml."""
    from audiollm.recipe.runner import Context
    from audiollm.recipe.stages import Recipe

    out.mkdir(parents=True, exist_ok=True)
    settings = {stage.kind: config.model_dump(mode="json")}
    (out / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    stage.run(config, Context(out, Recipe(out.name, out, "tiny", config.seed, out, (), {}), console, {}))
    console.print(f"  {out / 'report.html'}", highlight=False, soft_wrap=True)


def _nearest_setting(wrong: str, config_class: type[StepsConfig], thresholds: type[BaseModel]) -> str | None:
    """Guess the setting that was meant: one that ends so, one with the same last name, or the most similar one."""
    catalog = config_class.catalog
    setting_names = [name for name in config_class.model_fields if name not in ("steps", "thresholds")]
    setting_names += [f"thresholds.{name}" for name in thresholds.model_fields]
    for step in catalog.built_in:
        setting_names += [f"steps.{step}.{name}" for name in catalog.step_class(step).settings.model_fields]
    ending = [key for key in setting_names if f".{key}".endswith(f".{wrong}")]
    by_last_name = {key.rpartition(".")[2]: key for key in reversed(setting_names)}
    similar = get_close_matches(wrong.rpartition(".")[2], by_last_name, n=1, cutoff=0.6)
    return next(iter([*ending, *(by_last_name[name] for name in similar)]), None)


def _override_setting(settings: dict[str, Any], text: str) -> None:
    """Set what `key=value` says in nested settings.

    Raises:
        ConfigError: it says nothing of the kind.
    """
    key, equals, value = text.partition("=")
    *parents, last = key.split(".")
    if not equals or not last or not all(parents):
        raise ConfigError(f"{text!r} is not key=value", "--set", "example: --set thresholds.min_duration_s=1")
    place = settings
    for name in parents:
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{key}: {name} is not a group of settings", "--set", "set its whole value")
    try:
        place[last] = yaml.safe_load(value)
    except yaml.YAMLError:
        place[last] = value
