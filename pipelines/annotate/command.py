"""The command `annotate`: raw audio to segments, with a report on the kept ones and the reasons of all drops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from enum import Enum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from pydantic import ValidationError
from rich.console import Console

from audiollm.errors import ConfigError
from audiollm.models.recognition.recognizer import folder_recognizer
from audiollm.recipe.config import load_document, show_path
from audiollm.recipe.stages import plain_problem
from audiollm.terminal import print_table
from pipelines.annotate.execution.presets import PRESETS

if TYPE_CHECKING:
    from pipelines.annotate.execution.config import AnnotationConfig

PresetName = Enum("PresetName", {name: name for name in PRESETS}, type=str)  # type: ignore[misc]


class EngineName(StrEnum):
    """Place of the work: processes of this machine or a Ray cluster."""

    local = "local"
    ray = "ray"


def annotate(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Folders, files, globs in quotes, tars, lists (a .csv or .jsonl with a column path), or addresses "
            "(s3://..., https://...).",
            metavar="INPUT...",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.", show_default=False)],
    preset: Annotated[
        PresetName | None, typer.Option(help="Steps and thresholds by name.", show_default="quickstart")
    ] = None,
    transcripts: Annotated[
        str | None,
        typer.Option(
            help="Transcripts, where they are known: a .csv or .jsonl of path,text[,speaker,split,language], or a "
            "pattern over file names such as '{text}_{speaker}_{take}.wav'."
        ),
    ] = None,
    recognizer: Annotated[
        list[str] | None,
        typer.Option(
            help="A recognizer; repeat for several: pocketsphinx, faster_whisper=FOLDER, transformers=FOLDER (either "
            "folder alone, too), audio_llm=FOLDER, endpoint=MODEL@URL, none.",
            show_default="pocketsphinx",
        ),
    ] = None,
    tagger: Annotated[
        str | None,
        typer.Option(
            help="A tagger of sounds for the step events: auto (YAMNet, where it is on this machine), or a path.",
            show_default="none",
        ),
    ] = None,
    settings: Annotated[
        Path | None, typer.Option(help="A YAML file with any settings of the stage annotate.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="One setting: thresholds.min_duration_s=1, steps.events.top=3, steps.speakers=null.",
            show_default=False,
        ),
    ] = None,
    missing_scorer: Annotated[
        str | None,
        typer.Option(help="If a model is missing: fail, or skip (go on without it).", show_default="fail"),
    ] = None,
    shards: Annotated[
        bool | None, typer.Option("--shards/--no-shards", help="Write webdataset shards.", show_default="yes")
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
    """Annotate raw audio: who says what, the sound quality, and other sounds.

    Every file ends as kept, filtered (with the reason) or failed (with the reason). Killed
    and run again, it goes on where it was; with other settings it does again only what
    depends on them. OUT/report.html shows what became of everything.

    Presets: quickstart, emilia, granary, curator-asr, curator-tts, audioverse.

    Examples:

    audiollm annotate recordings -o corpus

    audiollm annotate 'raw/**/*.mp3' more.tar -o corpus --preset emilia --workers 8

    audiollm annotate s3://bucket/raw -o corpus --recognizer faster_whisper=large-v3   # pip install 'audiollm[whisper]'

    audiollm annotate raw -o corpus --preset audioverse --tagger auto --missing-scorer skip
    """
    from audiollm.recipe.runner import Context
    from audiollm.recipe.stages import Recipe
    from pipelines.annotate.stage import STAGE

    cli_settings = {
        "input": inputs,
        "preset": preset.value if preset else None,
        "transcripts": transcripts,
        "recognizers": _parse_recognizers(recognizer),
        "missing_scorer": missing_scorer,
        "shards": shards,
        "workers": workers,
        "ray_address": ray_address,
        "engine": engine.value if engine else None,
        "retry_failed": retry_failed or None,
    }
    raw_settings: dict[str, Any] = {"shards": True, **(load_document(settings).data if settings else {})}
    raw_settings |= {name: value for name, value in cli_settings.items() if value is not None}
    tagging = () if tagger is None else (f"steps.events.model={tagger}",)
    options = {
        "input": "INPUT",
        "transcripts": "--transcripts" if transcripts else "",
        "recognizers": "--recognizer" if recognizer else "",
        "steps.events.model": "--tagger" if tagger else "",
    }
    config = _validate_annotation_config(raw_settings, (*tagging, *(set_ or ())), options)
    console = Console(stderr=True)
    if dry_run:
        _print_annotation_estimate(config, console)
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.yaml").write_text(
        yaml.safe_dump({"annotate": config.model_dump(mode="json")}, sort_keys=False, allow_unicode=True)
    )
    recipe = Recipe(out.name, out, "tiny", config.seed, out, (), {})
    STAGE.run(config, Context(out, recipe, console, {}))
    console.print(f"  {out / 'report.html'}", highlight=False, soft_wrap=True)


def _parse_recognizers(arguments: Sequence[str] | None) -> list[dict[str, str]] | None:
    """Parse `kind=where`, or a folder alone, into settings; `none` alone: no recognizer."""
    if arguments is None or list(arguments) == ["none"]:
        return None if arguments is None else []
    recognizers: list[dict[str, str]] = []
    for text in arguments:
        if Path(text).is_dir():
            recognizers.append({"kind": folder_recognizer(text)[0], "model": text})
            continue
        kind, _, where = text.partition("=")
        settings = {"kind": kind}
        model, at, url = where.partition("@")
        if at and "://" in url:
            settings |= {"model": model, "url": url}
        elif where:
            settings["model"] = where
        recognizers.append(settings)
    return recognizers


def _validate_annotation_config(
    raw_settings: dict[str, Any], overrides: Sequence[str], options: Mapping[str, str]
) -> AnnotationConfig:
    """
    Raises:
        ConfigError: naming the setting.
    """
    from pipelines.annotate.execution.config import AnnotationConfig

    for text in overrides:
        override_setting(raw_settings, text, "thresholds.min_duration_s=1")
    try:
        return AnnotationConfig.model_validate(raw_settings)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        if problem["type"] == "extra_forbidden":
            inside = problem["input"] if isinstance(problem["input"], dict) else {}
            wrong = ".".join([show_path(tuple(problem["loc"])), *list(inside)[:1]])
            raise ConfigError(f"{wrong}: no such setting", "", _nearest_setting(wrong)) from None
        raise setting_error(error, "annotate", options) from None


def setting_error(error: ValidationError, stage: str, options: Mapping[str, str]) -> ConfigError:
    """The first of pydantic's complaints about the settings of a command.

    Args:
        options: setting -> the option of the command line that it was given by, empty where it was not.
    """
    problem = error.errors(include_url=False)[0]
    key, message = show_path(tuple(problem["loc"])), plain_problem(problem)
    option = next((option for setting, option in options.items() if key.startswith(setting)), "")
    listing = f"audiollm run --help-stage {stage} lists the settings"
    remedy = "check the path" if "no such file" in message else listing
    return ConfigError(f"{key}: {message}" if key else message, option, remedy)


def _nearest_setting(wrong: str) -> str:
    """Guess the setting that was meant: one that ends so, one with the same last name, or the most similar one."""
    from pipelines.annotate.execution.chain import STEPS
    from pipelines.annotate.execution.config import AnnotationConfig
    from pipelines.annotate.execution.rules import Thresholds

    setting_names = [name for name in AnnotationConfig.model_fields if name not in ("steps", "thresholds")]
    setting_names += [f"thresholds.{name}" for name in Thresholds.model_fields]
    setting_names += [
        f"steps.{step}.{name}"
        for step in STEPS.built_in
        for name in STEPS.step_class(step).settings.model_fields
    ]
    ending = [key for key in setting_names if f".{key}".endswith(f".{wrong}")]
    by_last_name = {key.rpartition(".")[2]: key for key in reversed(setting_names)}
    similar = get_close_matches(wrong.rpartition(".")[2], by_last_name, n=1, cutoff=0.6)
    suggestions = [*ending, *(by_last_name[name] for name in similar)]
    return (
        f"did you mean {suggestions[0]!r}?"
        if suggestions
        else "audiollm run --help-stage annotate lists the settings"
    )


def override_setting(settings: dict[str, Any], text: str, example: str) -> None:
    """Set what `key=value` says in nested settings.

    Args:
        example: for errors.

    Raises:
        ConfigError: it says nothing of the kind.
    """
    key, equals, value = text.partition("=")
    *parents, last = key.split(".")
    if not equals or not last or not all(parents):
        raise ConfigError(f"{text!r} is not key=value", "--set", f"example: --set {example}")
    place = settings
    for name in parents:
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{key}: {name} is not a group of settings", "--set", "set its whole value")
    try:
        place[last] = yaml.safe_load(value)
    except yaml.YAMLError:
        place[last] = value


def _print_annotation_estimate(config: AnnotationConfig, console: Console) -> None:
    """Print the steps, the thresholds, the amount of audio, and the estimated time."""
    from pipelines.annotate.execution import chain as chains
    from pipelines.annotate.execution.plan import plan_annotation

    estimate = plan_annotation(config, {})
    console.print(f"  preset {config.preset}: {config.chosen_preset.about}", highlight=False)
    limits = {name: value for name, value in config.limits.model_dump().items() if value is not None}
    rows = [
        [name, ", ".join(value) if isinstance(value, list) else f"{value}"] for name, value in limits.items()
    ]
    print_table(console, ["threshold", "value"], rows, figures=False)
    steps = chains.build(config.step_settings(), config.recognizer_settings(), {}).steps
    console.print(f"  steps: {', '.join(steps)}", highlight=False)
    seconds = estimate.core_seconds or 0.0
    console.print(
        f"  {estimate.facts['audio_s'] / 3600:.2f} hours of audio in {estimate.facts['clips']:.0f} files, "
        f"about {seconds / 60:.1f} minutes with these workers; {estimate.note}",
        highlight=False,
    )
