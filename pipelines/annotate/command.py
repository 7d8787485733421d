"""The command `annotate`: raw audio to segments, with a report on the kept ones and the reasons of all drops."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from audiollm.errors import ConfigError
from audiollm.hub_models.folders import hub_access
from audiollm.hub_models.options import Download, read_source
from audiollm.models.recognition.recognizer import folder_recognizer
from pipelines.annotate.execution.rules import PRESETS
from pipelines.annotate.input.annotated import annotated_corpus
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

PresetName = Enum("PresetName", {name: name for name in PRESETS}, type=str)  # type: ignore[misc]


def annotate(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders, files, globs in quotes, tars, lists (a .csv or .jsonl with a column path), or addresses "
            "(s3://..., https://...); none: speak a corpus of texts, by --set corpus.texts=FILE.",
            metavar="INPUT...",
            show_default=False,
        ),
    ] = None,
    *,
    out: Out,
    preset: Annotated[
        PresetName | None, typer.Option(help="Steps and thresholds by name.", show_default="quickstart")
    ] = None,
    transcripts: Annotated[
        str | None,
        typer.Option(
            help="Transcripts, where they are known: a .csv or .jsonl of path,text[,speaker,split,language], or a "
            "pattern over file names such as '{text}_{speaker}_{take}.wav'. Recordings without one are set aside, or "
            "recognized with --set untranscribed=recognize."
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
    speakers: Annotated[
        str | None,
        typer.Option(
            help="Who speaks when: pyannote=FOLDER (a pipeline; pip install 'audiollm[pyannote]'), or "
            "sortformer=FILE.nemo (pip install 'audiollm[sortformer]').",
            show_default="by the voices, where the preset has the step speakers",
        ),
    ] = None,
    voices: Annotated[
        str | None,
        typer.Option(
            help="The voice embedder of the step speakers: wespeaker=FILE.onnx, transformers=FOLDER (WavLM-SV).",
            show_default="resemblyzer",
        ),
    ] = None,
    aligner: Annotated[
        str | None,
        typer.Option(
            help="Times of words by a CTC model: transformers=FOLDER (wav2vec2, MMS), as the step alignment.",
            show_default="none",
        ),
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(
            help="The language by its sound, beside the text: transformers=FOLDER, a classifier such as MMS-LID.",
            show_default="by the text alone, where the preset has the step language",
        ),
    ] = None,
    quality: Annotated[
        str | None,
        typer.Option(
            help="A quality score of your own: module:Class (UTMOSv2 and others: docs/extending.md).",
            show_default="none",
        ),
    ] = None,
    settings: SettingsFile = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="One setting: thresholds.min_duration_s=1, steps.events.top=3, steps.speakers=null.",
            show_default=False,
        ),
    ] = None,
    missing_scorer: MissingScorer = None,
    shards: Annotated[
        bool | None, typer.Option("--shards/--no-shards", help="Write webdataset shards.", show_default="yes")
    ] = None,
    engine: Engine = None,
    ray_address: RayAddress = None,
    workers: Workers = None,
    retry_failed: RetryFailed = False,
    dry_run: DryRun = False,
    download: Download = False,
) -> None:
    """Annotate raw audio: who says what, the sound quality, and other sounds.

    Every file ends as kept, filtered (with the reason) or failed (with the reason). Killed
    and run again, it goes on where it was; with other settings it does again only what
    depends on them. OUT/report.html shows what became of everything.

    Presets: quickstart, small, emilia, granary, curator-asr, curator-tts, audioverse.

    Examples:

    audiollm annotate recordings -o corpus

    audiollm annotate 'raw/**/*.mp3' more.tar -o corpus --preset emilia --workers 8

    audiollm annotate s3://bucket/raw -o corpus --recognizer faster_whisper=large-v3   # pip install 'audiollm[whisper]'

    audiollm annotate raw -o corpus --recognizer transformers=openai/whisper-base --download

    audiollm annotate raw -o corpus --preset audioverse --tagger auto --missing-scorer skip

    audiollm annotate raw -o corpus --preset emilia --speakers pyannote=models/community-1

    audiollm annotate -o corpus --recognizer none --set corpus.synthesizer=hibari --set corpus.texts=sentences.txt
    """
    from pipelines.annotate.execution import chain as chains
    from pipelines.annotate.execution.config import AnnotationConfig
    from pipelines.annotate.execution.plan import plan_annotation
    from pipelines.annotate.execution.rules import Thresholds
    from pipelines.annotate.stage import STAGE

    cli_settings = {
        "input": inputs or None,
        "preset": preset.value if preset else None,
        "transcripts": transcripts,
        "recognizers": _parse_recognizers(recognizer, is_plan=dry_run),
        "missing_scorer": missing_scorer,
        "shards": shards,
        "workers": workers,
        "ray_address": ray_address,
        "engine": engine.value if engine else None,
        "retry_failed": retry_failed or None,
    }
    raw_settings = merge_settings(settings, cli_settings, {"shards": True})
    parts = {
        "steps.events.model": ("--tagger", tagger),
        "steps.speakers.diarizer": ("--speakers", speakers),
        "steps.speakers.embedder": ("--voices", voices),
        "steps.alignment.model": ("--aligner", aligner),
        "steps.language.model": ("--language", language),
        "steps.quality.scorer": ("--quality", quality),
    }
    options = {
        "input": "INPUT",
        "transcripts": "--transcripts" if transcripts else "",
        "recognizers": "--recognizer" if recognizer else "",
        **{key: option if value else "" for key, (option, value) in parts.items()},
    }
    overrides = (*(f"{key}={value}" for key, (_, value) in parts.items() if value), *(set_ or ()))
    if (
        not inputs
        and not raw_settings.keys() & {"input", "corpus"}
        and not any(map(_is_of_corpus, overrides))
    ):
        raise ConfigError(
            "INPUT is missing",
            "",
            "give recordings, or texts to speak: --set corpus.texts=FILE (one per line)",
        )
    if inputs and annotated_corpus(inputs) is not None:
        raise ConfigError(
            f"{inputs[0]} is an annotated corpus",
            "",
            f"give the recordings that it was made of, correct it with `audiollm review {inputs[0]}`, or train on it: "
            f"audiollm run recipes/quickstart.yaml --name mine audio={inputs[0]}",
        )
    console = Console(stderr=True)
    if not dry_run:
        config = validate_settings(AnnotationConfig, raw_settings, overrides, options, Thresholds)
        run_stage(STAGE, config, out, console)
        return
    with hub_access(config_alone=True):
        config = validate_settings(AnnotationConfig, raw_settings, overrides, options, Thresholds)
        plan = plan_annotation(config, {})
        steps = chains.build(config.step_settings(), config.recognizer_settings(), {}).steps
    amount = f"{plan.facts['audio_s'] / 3600:.2f} hours of audio in {plan.facts['clips']:.0f} files"
    print_steps_plan(
        console, f"{config.preset}: {config.chosen_preset.about}", config.limits, steps, amount, plan
    )


def _is_of_corpus(override: str) -> bool:
    return override.startswith("corpus")


def _parse_recognizers(arguments: Sequence[str] | None, is_plan: bool) -> list[dict[str, str]] | None:
    """Parse `kind=where`, or a folder alone, into settings; `none` alone: no recognizer.

    Args:
        is_plan: config.json is enough of a model of the hub.
    """
    if arguments is None or list(arguments) == ["none"]:
        return None if arguments is None else []
    recognizers: list[dict[str, str]] = []
    for argument in arguments:
        with hub_access(config_alone=is_plan):
            text = argument if "=" in argument else read_source(argument)
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
