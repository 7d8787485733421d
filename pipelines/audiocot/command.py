"""The command `audiocot`: videos and recordings to chains of thought about their sound, with a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from pydantic import ValidationError
from rich.console import Console

from audiollm.errors import ConfigError
from audiollm.recipe.config import load_document
from audiollm.terminal import print_table
from pipelines.annotate.command import EngineName, override_setting, setting_error
from pipelines.audiocot.rules import PRESETS

if TYPE_CHECKING:
    from pipelines.audiocot.settings import AudioCotConfig

PresetChoice = Enum("PresetChoice", {name: name for name in PRESETS}, type=str)  # type: ignore[misc]
_ANSWERER_HELP = "measured, transformers=FOLDER, endpoint=MODEL@URL."


def audiocot(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Folders, files, globs in quotes, tars, lists (a .csv or .jsonl with a column path, or samples such "
            "as scenes.jsonl), or addresses.",
            metavar="INPUT...",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.", show_default=False)],
    preset: Annotated[
        PresetChoice | None, typer.Option(help="Steps and thresholds by name.", show_default="thinksound")
    ] = None,
    video: Annotated[
        str | None, typer.Option(help=f"Who says what is seen: {_ANSWERER_HELP}", show_default="measured")
    ] = None,
    audio: Annotated[
        str | None, typer.Option(help=f"Who says what is heard: {_ANSWERER_HELP}", show_default="measured")
    ] = None,
    writer: Annotated[
        str | None, typer.Option(help=f"Who joins both: {_ANSWERER_HELP}", show_default="measured")
    ] = None,
    max_calls: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Budget of new answers of models, over all runs into OUT. A request that nobody answers "
            "(no connection, a time-out, an error of the server) does not count.",
            show_default="no limit",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Budget of tokens, as endpoints count them, over all runs into OUT.",
            show_default="no limit",
        ),
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=0.99,
            help="Share of the files without a split that become the split test, which no training learns from.",
            show_default="0",
        ),
    ] = None,
    tagger: Annotated[
        str | None,
        typer.Option(
            help="A tagger of sounds for the step tags: auto (YAMNet, where it is on this machine), or a path.",
            show_default="none",
        ),
    ] = None,
    settings: Annotated[
        Path | None, typer.Option(help="A YAML file with any settings of the stage audiocot.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="One setting: clip_s=3, steps.tags.top=3, thresholds.max_voice=null.",
            show_default=False,
        ),
    ] = None,
    missing_scorer: Annotated[
        str | None,
        typer.Option(help="If a model is missing: fail, or skip (go on without it).", show_default="fail"),
    ] = None,
    engine: Annotated[
        EngineName | None,
        typer.Option(help="Processes of this machine, or a Ray cluster.", show_default="local"),
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster.", show_default="one on this machine")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes.", show_default="one per CPU")
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try the failed calls of an earlier run again.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and what is missing, and exit.")
    ] = False,
) -> None:
    """Write chains of thought (CoT) about the sound of videos and recordings.

    Every file ends as kept, filtered (with the reason) or failed (with the reason). Killed
    and run again, it goes on where it was, and pays for no answer twice. OUT/cot.jsonl is
    what sound models are trained on, OUT/report.html shows what became of everything.

    Presets: thinksound, everything.

    Examples:

    audiollm audiocot videos -o cot --tagger auto     # YAMNet's file: docs/models.md

    audiollm audiocot runs/thinksound-tiny/compose_scenes/scenes.jsonl -o cot --preset everything

    audiollm audiocot videos -o cot --tagger yamnet.tflite \\
        --video endpoint=qwen-vl@http://localhost:8000/v1 --max-calls 10000
    """
    from audiollm.recipe.runner import Context
    from audiollm.recipe.stages import Recipe
    from pipelines.audiocot.stage import STAGE

    raw_settings: dict[str, Any] = dict(load_document(settings).data) if settings else {}
    cli_settings = {
        "input": inputs,
        "preset": preset.value if preset else None,
        "missing_scorer": missing_scorer,
        "held_out": held_out,
        "workers": workers,
        "ray_address": ray_address,
        "engine": engine.value if engine else None,
        "retry_failed": retry_failed or None,
    }
    raw_settings |= {name: value for name, value in cli_settings.items() if value is not None}
    for step, text in (("watch", video), ("listen", audio), ("think", writer)):
        if text is not None:
            _settings_group(_settings_group(raw_settings, "steps"), step).update(
                answerer_settings(text, step)
            )
    for name, value in (("calls", max_calls), ("tokens", max_tokens)):
        if value is not None:
            _settings_group(raw_settings, "budget")[name] = value
    tagging = () if tagger is None else (f"steps.tags.model={tagger}",)
    options = {"input": "INPUT", "steps.tags.model": "--tagger" if tagger else ""}
    answered = {"watch": ("--video", video), "listen": ("--audio", audio), "think": ("--writer", writer)}
    options |= {f"steps.{step}.": option for step, (option, text) in answered.items() if text}
    config = _validate_audiocot_config(raw_settings, (*tagging, *(set_ or ())), options)
    console = Console(stderr=True)
    if dry_run:
        _print_audiocot_estimate(config, console)
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.yaml").write_text(
        yaml.safe_dump({"audiocot": config.model_dump(mode="json")}, sort_keys=False, allow_unicode=True)
    )
    recipe = Recipe(out.name, out, "tiny", config.seed, out, (), {})
    STAGE.run(config, Context(out, recipe, console, {}))
    console.print(f"  {out / 'report.html'}", highlight=False, soft_wrap=True)


def answerer_settings(text: str, step: str) -> dict[str, str]:
    """Parse `measured`, `transformers=FOLDER` or `endpoint=MODEL@URL` into settings of a step.

    Raises:
        ConfigError: it is none of these.
    """
    kind, _, where = text.partition("=")
    if kind == "measured" and not where:
        return {"by": kind}
    if kind == "transformers" and where:
        return {"by": kind, "model": where}
    model, at, url = where.partition("@")
    if kind == "endpoint" and model and at and "://" in url:
        return {"by": kind, "endpoint_model": model, "url": url}
    raise ConfigError(
        f"{text!r} names no answerer of the step {step}", "command line", f"give {_ANSWERER_HELP}"
    )


def _settings_group(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """A group of settings, to be added to; one that is absent or null becomes an empty one.

    Raises:
        ConfigError: it is something else.
    """
    group = settings.get(name)
    if group is None:
        group = settings[name] = {}
    if not isinstance(group, dict):
        raise ConfigError(
            f"{name} is not a group of settings", "--settings", f"write `{name}:` with names below"
        )
    return group


def _validate_audiocot_config(
    raw_settings: dict[str, Any], overrides: Sequence[str], options: Mapping[str, str]
) -> AudioCotConfig:
    """
    Raises:
        ConfigError: naming the setting.
    """
    from pipelines.audiocot.settings import AudioCotConfig

    for text in overrides:
        override_setting(raw_settings, text, "clip_s=3")
    try:
        return AudioCotConfig.model_validate(raw_settings)
    except ValidationError as error:
        raise setting_error(error, "audiocot", options) from None


def _print_audiocot_estimate(config: AudioCotConfig, console: Console) -> None:
    """Print the steps, the thresholds, the amount of audio, and the estimated time."""
    from pipelines.audiocot.stage import plan_audiocot

    estimate = plan_audiocot(config, {})
    console.print(f"  preset {config.preset}: {config.chosen_preset.about}", highlight=False)
    limits = {name: value for name, value in config.limits.model_dump().items() if value is not None}
    rows = [[name, f"{value}"] for name, value in limits.items()]
    print_table(console, ["threshold", "value"], rows, figures=False)
    console.print(f"  steps: {', '.join(config.step_settings())}", highlight=False)
    minutes = (estimate.core_seconds or 0) / 60
    console.print(
        f"  {estimate.facts['seconds'] / 3600:.2f} hours of sound, about {minutes:.1f} minutes "
        f"with these workers; {estimate.note}",
        highlight=False,
    )
