"""The sources of a training: opened, checked for one codec, surveyed once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from audiollm.data.chat.template import Template
from audiollm.data.hearing.features import FeatureShape
from audiollm.data.records.opening import open_source
from audiollm.data.records.source import Source
from audiollm.errors import StageError
from audiollm.families.dual_ffn.start import start_codec
from audiollm.files.atomic import DamagedFile
from audiollm.files.set_aside import SetAside, read_set_aside
from audiollm.recipe.ranks import Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.supervised.corpus.survey import SourceSurvey, load_survey, save_survey, survey_sources
from audiollm.supervised.settings import PackingSettings, SourceConfig


def open_sources(samples: Sequence[SourceConfig], max_codes_mb: float) -> list[Source]:
    """The sources of a recipe, in its order.

    Raises:
        ConfigError: one cannot be opened.
    """
    return [open_source(source.path, max_codes_mb) for source in samples]


def set_aside_of(folder: Path, stage: str, ranks: Ranks, strict: bool) -> SetAside:
    """The list of bad samples of a stage, one file for each rank; an earlier attempt's entries stay."""
    path = folder / f"set_aside{'' if ranks.first else f'-{ranks.rank}'}.jsonl"
    return SetAside(path, stage, read_set_aside(path), strict)


def codec_facts(sources: Sequence[Source], start: Path | None) -> dict[str, Any]:
    """The number and size of codebooks that all coded sources agree on, and what else is known of their codec.

    Where no source is coded, the codec of the model to begin from.

    Raises:
        StageError: two sources were coded by different codecs, or not by the codec of the model to begin from.
    """
    keys = ("num_codebooks", "codebook_size", "digest", "fingerprint")
    source_codecs = {source.name: getattr(source, "facts", {}).get("codec") or {} for source in sources}
    codecs = {
        name: {key: codec[key] for key in keys if key in codec}
        for name, codec in source_codecs.items()
        if codec
    }
    for (first, first_codec), (second, second_codec) in combinations(codecs.items(), 2):
        shared = first_codec.keys() & second_codec.keys()
        if "digest" in shared:  # the same codes, whatever else is in the codec's folder
            shared -= {"fingerprint"}
        if any(first_codec[key] != second_codec[key] for key in shared):
            raise StageError(
                f"{first} and {second} were coded by different codecs: {first_codec}, {second_codec}",
                "tokenize them with the same one",
                2,
            )
    agreed = {key: value for codec in codecs.values() for key, value in codec.items()}
    of_start = start_codec(start)
    if "digest" in agreed and of_start.get("digest", agreed["digest"]) != agreed["digest"]:
        raise StageError(
            f"{' and '.join(codecs)}: coded by another codec than the one whose codes {start} was trained on",
            "tokenize with the codec of that model, or start from another one",
            2,
        )
    return agreed or of_start


def survey_once(
    sources: Sequence[Source],
    template: Template,
    settings: PackingSettings,
    features: FeatureShape | None,
    set_aside: SetAside,
    context: Context,
) -> SourceSurvey:
    """The survey of all samples: made by the first rank, kept in the stage's folder, read by all.

    Args:
        features: the shape in which recordings are given to the model's audio encoder; None: they are given as codes.

    Raises:
        StageError: the sources have changed since the training began, or no training sample can be used.
        BadSample: the first bad sample, where `set_aside` is strict.
    """
    path = context.folder / "survey.safetensors"
    if context.ranks.first and not _is_whole_survey(path, context):
        with context.progress("measuring samples", sum(map(len, sources))) as bar:
            survey = survey_sources(
                sources, template, required(settings.max_length), settings.too_long, set_aside,
                lambda: bar.advance(bar.task_ids[0]), features,
            )  # fmt: skip
        save_survey(path, survey)
    context.ranks.barrier()
    survey = load_survey(path)
    if survey.digests != tuple(source.digest for source in sources):
        raise StageError(
            "the samples are not those that this training was begun with: some were added, removed, moved or changed",
            f"put them back, or remove {context.folder} to start afresh",
            2,
        )
    if not any(len(survey.used(place, held_out=False)) for place in range(len(sources))):
        raise StageError("no sample of the train split can be used", "see set_aside.jsonl, and `compose`", 2)
    unusual = {kind: count for kind, count in survey.counts().items() if kind != "whole"}
    if unusual:
        listed = ", ".join(f"{count} {kind}" for kind, count in unusual.items())
        context.say(f"of {sum(map(len, sources))} samples: {listed} (too_long: {settings.too_long})")
    return survey


def _is_whole_survey(path: Path, context: Context) -> bool:
    if not path.exists():
        return False
    try:
        load_survey(path)
    except DamagedFile as error:
        context.say(f"{error.path} is damaged: {error.reason}; measuring the samples again")
        return False
    return True
