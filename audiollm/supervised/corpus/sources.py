"""The sources of a training: opened, checked for one codec, given a vocabulary, surveyed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from audiollm.data.chat.template import Template
from audiollm.data.hearing.features import FeatureShape
from audiollm.data.records.opening import open_source
from audiollm.data.records.source import Source
from audiollm.data.text.tokenizer import FILE_NAME, header_style_of, load_text_tokenizer, train_text_tokenizer
from audiollm.errors import ConfigError, StageError
from audiollm.families.packed_training import PackedTraining
from audiollm.files.atomic import DamagedFile, atomic_path, file_digest, read_record, write_json
from audiollm.files.set_aside import SetAside, read_set_aside
from audiollm.recipe.ranks import Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.supervised.corpus.survey import SourceSurvey, load_survey, save_survey, survey_sources, texts_of
from audiollm.train.supervised_settings import SIZES, PackingSettings, SourceConfig, TrainConfig

DIGEST_FILE = "digest.json"
"""Name of the file beside a learned vocabulary that holds its SHA-256."""


@dataclass(frozen=True)
class TrainingCorpus:
    """The samples of a training on packs, opened and surveyed."""

    sources: list[Source]
    codec: Mapping[str, Any]
    """Number and size of the codebooks, and what else is known of their codec."""
    template: Template
    encoder: FeatureShape | None
    """The features in which the model hears recordings; None: as codes."""
    survey: SourceSurvey
    set_aside: SetAside

    @property
    def is_coded(self) -> bool:
        """Whether a source has codes."""
        return any(_source_codec(source) for source in self.sources)

    @property
    def num_samples(self) -> int:
        """Samples that are trained on."""
        return sum(len(self.survey.used(place, held_out=False)) for place in range(len(self.sources)))

    @property
    def codec_folders(self) -> list[str | None]:
        """Folders that the sources name as their codec's."""
        return [_source_codec(source).get("path") for source in self.sources]


def open_training_corpus(config: TrainConfig, training: PackedTraining, context: Context) -> TrainingCorpus:
    """Open the sources, and survey them once.

    Raises:
        StageError: nothing to train on, sources of different codecs, or a learned vocabulary that was changed.
        BadSample: the first bad sample, where `strict` is set.
    """
    sources = open_sources(config.samples, config.max_codes_mb)
    set_aside = set_aside_of(context.folder, "train", context.ranks, config.strict)
    codec = codec_facts(sources, config.start, training.codec)
    tokenizer = _vocabulary(config, training, sources, set_aside, context)
    template = Template(tokenizer, codec["num_codebooks"], codec["codebook_size"], header_style_of(tokenizer))
    encoder = training.encoder
    survey = survey_once(sources, template, config, encoder, set_aside, context)
    return TrainingCorpus(sources, codec, template, encoder, survey, set_aside)


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


def codec_facts(sources: Sequence[Source], start: Path | None, of_start: Mapping[str, Any]) -> dict[str, Any]:
    """The number and size of codebooks that all coded sources agree on, and what else is known of their codec.

    Args:
        of_start: the codec of the model to begin from, which holds where no source is coded.

    Raises:
        StageError: two sources were coded by different codecs, or not by the codec of the model to begin from.
    """
    keys = ("num_codebooks", "codebook_size", "digest", "fingerprint")
    source_codecs = {source.name: _source_codec(source) for source in sources}
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
    if "digest" in agreed and of_start.get("digest", agreed["digest"]) != agreed["digest"]:
        raise StageError(
            f"{' and '.join(codecs)}: coded by another codec than the one whose codes {start} was trained on",
            "tokenize with the codec of that model, or start from another one",
            2,
        )
    return agreed or dict(of_start)


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
        raise StageError("no sample of the train split can be used", set_aside.remedy(), 2)
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


def _source_codec(source: Source) -> dict[str, Any]:
    """What shards tell of their codec; nothing where a source has no codes."""
    return getattr(source, "facts", {}).get("codec") or {}


def _vocabulary(
    config: TrainConfig,
    training: PackedTraining,
    sources: Sequence[Source],
    set_aside: SetAside,
    context: Context,
) -> Tokenizer:
    """`text_tokenizer`, else the vocabulary of `start`, else one learned from the texts, kept in the stage's folder.

    Raises:
        StageError: no text to learn from, or a learned vocabulary that was changed.
    """
    if config.text_tokenizer:
        return load_text_tokenizer(config.text_tokenizer)
    if config.start:
        return training.start_vocabulary()
    folder = context.folder / "vocabulary"
    if context.ranks.first and not (folder / FILE_NAME).exists():
        with context.progress("reading texts", sum(map(len, sources))) as bar:
            texts = texts_of(sources, set_aside, lambda: bar.advance(bar.task_ids[0]))
            first = next(texts, None)
            if first is None:
                raise StageError("no sample of the train split", "see `compose`", 2)
            learned = train_text_tokenizer(chain([first], texts), SIZES[config.size].vocab_size)
        _save_vocabulary(learned, folder)
    context.ranks.barrier()
    return _learned_vocabulary(folder)


def _save_vocabulary(learned: Tokenizer, folder: Path) -> None:
    with atomic_path(folder / FILE_NAME) as temporary:
        learned.save(str(temporary))
        digest = file_digest(temporary)
    write_json(folder / DIGEST_FILE, {"sha256": digest})


def _learned_vocabulary(folder: Path) -> Tokenizer:
    """The learned vocabulary, checked by its digest: in a changed one the trained numbers would stand for other words.

    Raises:
        StageError: the file is not the one that was written.
    """
    path, remedy = folder / FILE_NAME, "restore it, or remove it: it is learned again from the same texts"
    if (folder / DIGEST_FILE).exists() and file_digest(path) != read_record(folder / DIGEST_FILE).get(
        "sha256"
    ):
        raise StageError(f"{path} is damaged: its SHA-256 is not the one in {DIGEST_FILE} beside it", remedy)
    try:
        return load_text_tokenizer(folder)
    except ConfigError as error:
        raise StageError(f"{path} is damaged: {error.message}", remedy) from None
