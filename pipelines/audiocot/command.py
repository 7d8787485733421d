"""The command `audiocot`: videos and recordings to chains of thought about their sound, with a report."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console

from audiollm.errors import ConfigError
from audiollm.hub_models.folders import hub_access
from audiollm.hub_models.options import Download
from pipelines.audiocot.rules import PRESETS
from pipelines.steps.command import (
    DryRun,
    Engine,
    MissingScorer,
    Out,
    RayAddress,
    RetryFailed,
    SettingsFile,
    Workers,
    merge_settings,
    print_steps_plan,
    run_stage,
    validate_settings,
)

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
    out: Out,
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
    settings: SettingsFile = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="One setting: clip_s=3, steps.tags.top=3, thresholds.max_voice=null.",
            show_default=False,
        ),
    ] = None,
    missing_scorer: MissingScorer = None,
    engine: Engine = None,
    ray_address: RayAddress = None,
    workers: Workers = None,
    retry_failed: RetryFailed = False,
    dry_run: DryRun = False,
    download: Download = False,
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
    from pipelines.audiocot.rules import ClipThresholds
    from pipelines.audiocot.settings import AudioCotConfig
    from pipelines.audiocot.stage import STAGE, plan_audiocot

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
    raw_settings = merge_settings(settings, cli_settings, {})
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
    overrides = (*tagging, *(set_ or ()))
    console = Console(stderr=True)
    with hub_access(config_alone=dry_run):
        config = validate_settings(AudioCotConfig, raw_settings, overrides, options, ClipThresholds)
        plan = plan_audiocot(config, {}) if dry_run else None
        steps = config.step_settings()
    if plan is None:
        run_stage(STAGE, config, out, console)
        return
    amount = f"{plan.facts['seconds'] / 3600:.2f} hours of sound"
    about = f"{config.preset}: {config.chosen_preset.about}"
    print_steps_plan(console, about, config.limits, steps, amount, plan)


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
