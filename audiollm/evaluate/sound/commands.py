"""The command `evaluate sound`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from audiollm.errors import ConfigError
from audiollm.evaluate.options import Examples, Limit, Out
from audiollm.evaluate.report.suite import bar, conclude, spread_items, step
from audiollm.hub_models.options import Download, source_option

if TYPE_CHECKING:
    from audiollm.evaluate.sound.suite import SuiteJudges

ClassesOption = Annotated[
    str | None,
    source_option(
        "Judge of what is heard: auto (YAMNet), a .tflite or .onnx tagger, a folder (an audio classifier of "
        "transformers, or our own), or package.module:factory."
    ),
]
SpaceOption = Annotated[
    str | None,
    source_option(
        "Space of the Fréchet distance: the folder of a ClapModel, a judge as --classes, or "
        "package.module:factory. By default the logits of --classes."
    ),
]
ClapOption = Annotated[
    str | None,
    source_option("Space of sounds and texts: a ClapModel's folder, or package.module:factory."),
]
SynchronyOption = Annotated[
    str | None, typer.Option(help="Judge of synchrony with the video (Synchformer): package.module:factory.")
]


def sound(
    listing: Annotated[
        Path,
        typer.Argument(
            help="generated.jsonl of the stage generate_sound, or a list of your own: a JSON object per line "
            "with audio, and if known reference, video, caption, thought, events.",
            metavar="LIST",
        ),
    ],
    out: Out,
    classes: ClassesOption = None,
    space: SpaceOption = None,
    clap: ClapOption = None,
    synchrony: SynchronyOption = None,
    training: Annotated[
        Path | None,
        typer.Option(
            help="Training sounds, to find copies of them: a folder, or samples (.jsonl) with their splits."
        ),
    ] = None,
    edits: Annotated[
        Path | None, typer.Option(help="edited.jsonl of the stage edit_sounds, judged beside the sounds.")
    ] = None,
    limit: Limit = None,
    examples: Examples = 8,
    download: Download = False,
) -> None:
    """Score generated sounds: Fréchet distance, KL of classes, inception score, CLAP, DeSync, onsets, copies.

    Example: audiollm evaluate sound runs/sound/generate_sound/generated.jsonl --classes auto -o scores
    """
    from audiollm.evaluate.sound.edited_sounds import judge_edits, read_edited
    from audiollm.evaluate.sound.generated_sounds import read_generated
    from audiollm.evaluate.sound.suite import evaluate_sounds, with_edits

    console = Console()
    sounds = spread_items(read_generated(listing), limit)
    if not sounds:
        raise ConfigError("no sound to score", str(listing), "generate sounds first")
    training_paths = training_sounds(training, "--training") if training is not None else []
    edited = spread_items(read_edited(edits), limit) if edits is not None else []
    judges = load_judges(classes, space, clap, synchrony)
    with bar(console, "scoring", len(sounds) + len(training_paths) + len(edited)) as progress:
        outcome = evaluate_sounds(sounds, judges, training_paths, lambda what: step(progress, what))
        if edited:
            edits_outcome = judge_edits(edited, judges.classes, lambda what: step(progress, what))
            outcome = with_edits(outcome, edits_outcome)
    conclude(outcome, out, examples, console)


def training_sounds(source: Path, key: str) -> list[Path]:
    """The sounds of a folder, or those that samples (.jsonl) outside of their held-out splits want.

    Args:
        key: the option or setting that gives them, for errors.

    Raises:
        ConfigError: there are none.
    """
    from audiollm.audio import AudioError, find_audio
    from audiollm.audio.discovery import links_note
    from audiollm.data.records.manifest import read_samples

    try:
        if source.is_dir():
            paths = find_audio(source)[0]
        else:
            target_parts = [
                sample.audio("assistant") for sample in read_samples(source)[0] if not sample.is_held_out
            ]
            paths = [Path(parts[-1].path) for parts in target_parts if parts]
    except AudioError as error:
        raise ConfigError(error.reason, key, "give a folder of sound, or samples") from None
    if not paths:
        raise ConfigError(
            f"{source} has no sound to train on{links_note(source)}",
            key,
            "give a folder of sound, or samples",
        )
    return paths


def load_judges(
    classes: str | None, space: str | None, clap: str | None, synchrony: str | None
) -> SuiteJudges:
    """Load the judges of the suite.

    Raises:
        ConfigError: one of them cannot be loaded.
    """
    from audiollm.evaluate.judges.yamnet import AUTO, checked_tagger
    from audiollm.evaluate.sound.sound_judges import (
        ClassSpace,
        load_sound_classes,
        load_sound_space,
        load_text_space,
    )
    from audiollm.evaluate.sound.suite import SuiteJudges
    from audiollm.recipe.plug_ins import import_named

    classes, space = (str(checked_tagger(AUTO)) if judge == AUTO else judge for judge in (classes, space))
    judge_names = {"classes": classes, "space": space or classes, "texts": clap, "synchrony": synchrony}
    named = load_sound_classes(classes) if classes else None
    places = load_sound_space(space) if space else (ClassSpace(named) if named else None)
    return SuiteJudges(
        classes=named,
        space=places,
        texts=load_text_space(clap) if clap else None,
        synchrony=import_named(synchrony, "name a function that returns a judge with offsets")()
        if synchrony
        else None,
        names={role: name for role, name in judge_names.items() if name},
    )
