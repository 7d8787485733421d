"""The folder that a training ends with: the model with its vocabulary, card, and what generation needs to know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from audiollm.data.records.sample import PHRASE_WORDS, PRONUNCIATION, Sample, TextPart
from audiollm.data.records.source import Source
from audiollm.data.text.tokenizer import SPEAKERS_FILE, TRAINED_FILE
from audiollm.errors import BadSample
from audiollm.families.packed_training import PackedModel, PackedTraining
from audiollm.files.atomic import write_json
from audiollm.generation.engine.defaults import Teaching, read_trained
from audiollm.hub_models.names import folder_label
from audiollm.models.model_card import ModelCard
from audiollm.models.pretrained import model_folder
from audiollm.supervised.corpus.sources import TrainingCorpus
from audiollm.supervised.corpus.survey import SourceSurvey
from audiollm.train.loop.checkpoint import trained_weights
from audiollm.train.supervised_settings import TrainConfig


def save_trained(
    config: TrainConfig, training: PackedTraining, corpus: TrainingCorpus, folder: Path
) -> PackedModel | None:
    """Write the weights that the loop left in `folder` to `folder/model`, and an adapter to `folder/adapter`.

    Called on the first rank alone.

    Returns:
        The model as it was written, as `PackedTraining.save` gives it.
    """
    survey = corpus.survey
    codec_folders = corpus.codec_folders if config.codec is None else [str(model_folder(config.codec))]
    saved = training.save(
        trained_weights(folder, "model"), corpus.template, folder, _make_card(config, corpus), codec_folders
    )
    write_json(folder / "model" / SPEAKERS_FILE, list(survey.speakers))
    longest = max(int(rows.max(initial=0)) for rows in survey.rows)
    trained = {
        "longest_positions": longest,
        "text_dropout": config.text_dropout,
        "speaker_dropout": config.speaker_dropout,
        "codec_digest": corpus.codec.get("digest"),
        "words": _read_trained_words(config, survey),
        "recognizers": _read_teaching(config, survey),
        "tasks": _read_tasks(config, survey),
        **_phrase_facts(corpus.sources, survey),
        **_stream_facts(corpus.sources, survey),
    }
    write_json(folder / "model" / TRAINED_FILE, trained)
    return saved


def _read_trained_words(config: TrainConfig, survey: SourceSurvey) -> list[str] | None:
    """The words that the model was trained to say, those of its start included; None: not known, or many."""
    before = read_trained(model_folder(config.start)).words if config.start else []
    return None if before is None or survey.words is None else sorted({*before, *survey.words})


def _read_tasks(config: TrainConfig, survey: SourceSurvey) -> list[str] | None:
    """The tasks that the model has learned, those of its start included; None: those of its start are not known."""
    before = read_trained(model_folder(config.start)).tasks if config.start else []
    return None if before is None else sorted({*before, *survey.tasks})


def _read_teaching(config: TrainConfig, survey: SourceSurvey) -> Teaching:
    """The recognizers that taught the model that it begins from, and those that wrote its texts."""
    before = read_trained(model_folder(config.start)).recognizers if config.start else None
    return {**dict.fromkeys(survey.recognizers, "transcripts"), **(before or {})}


def _phrase_facts(sources: Sequence[Source], survey: SourceSurvey) -> dict[str, Any]:
    """Most words of a phrase and whose phonemes it is read in, of the first source that has phrases; None: none has."""
    for place, source in enumerate(sources):
        sample = _first_sample(source, survey.used(place, held_out=False))
        if sample is not None and sample.messages[-1].phrases:
            return {key: sample.metadata.get(key) for key in (PHRASE_WORDS, PRONUNCIATION)}
    return dict.fromkeys((PHRASE_WORDS, PRONUNCIATION))


def _stream_facts(sources: Sequence[Source], survey: SourceSurvey) -> dict[str, Any]:
    """Code frames of a chunk, the system message, and whether actions are spoken, of the first source of streams; None:
    none is."""
    for place, source in enumerate(sources):
        sample = _first_sample(source, survey.used(place, held_out=False))
        messages = [] if sample is None else sample.messages
        if not messages or messages[-1].chunk_frames is None:
            continue
        system_texts = [
            content_part.text for content_part in messages[0].content if isinstance(content_part, TextPart)
        ]
        system = "".join(system_texts) if messages[0].role == "system" else ""
        speaks = any(content_part.type == "audio" for content_part in messages[-1].content)
        return {
            "chunk_frames": messages[-1].chunk_frames, "stream_prompt": system, "stream_speaks": speaks,
        }  # fmt: skip
    return dict.fromkeys(("chunk_frames", "stream_prompt", "stream_speaks"))


def _first_sample(source: Source, numbers: Iterable[int]) -> Sample | None:
    """The first of these samples that can still be read; None where none can."""
    for number in numbers:
        with suppress(BadSample):
            return source[int(number)].sample
    return None


def _make_card(config: TrainConfig, corpus: TrainingCorpus) -> ModelCard:
    codec = corpus.codec
    return ModelCard(
        codec=f"{codec['num_codebooks']} codebooks of {codec['codebook_size']} codes"
        + (f", SHA-256 of its folder {codec['fingerprint']}" if "fingerprint" in codec else ""),
        data=f"{corpus.num_samples:,} samples of "
        f"{', '.join(sorted({Path(source.name).name for source in corpus.sources}))}",
        recipe=f"stage `train`, {config.budget_text()}, {config.batch_size} sequences a step, seed {config.seed}",
        base=folder_label(Path(config.start)) if config.start else "random weights",
    )
