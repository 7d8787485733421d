"""What the stage `train` does: sources, vocabulary, model, loop, saved checkpoint. Called on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from audiollm.codec import codec_digest, load_codec
from audiollm.data.chat.conditions import is_spoken
from audiollm.data.chat.template import Template
from audiollm.data.hearing.features import FeatureShape, PartAudio
from audiollm.data.records.loader import Loader
from audiollm.data.records.opening import open_source
from audiollm.data.records.source import LoadedSample, Source
from audiollm.data.text.tokenizer import (
    FILE_NAME,
    SPEAKERS_FILE,
    TRAINED_FILE,
    header_style_of,
    load_text_tokenizer,
    train_text_tokenizer,
)
from audiollm.devices import default_device
from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.files.atomic import DamagedFile, atomic_path, file_digest, read_record, write_json
from audiollm.files.set_aside import SetAside, read_set_aside
from audiollm.generation.engine.defaults import guidance_of
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.models.attention import attention_backend
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import is_language_model, read_config, save_pretrained
from audiollm.models.model_card import ModelCard
from audiollm.models.pretrained import model_folder
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.supervised.adapt import adapt, merge_adapter, save_adapter
from audiollm.supervised.batches import Batching, BatchMaker, evaluation_packs, evenly, read_usable
from audiollm.supervised.encoder import add_encoder, encoder_of, freeze_encoder
from audiollm.supervised.listening import Listening
from audiollm.supervised.losses import TokenLosses
from audiollm.supervised.settings import SIZES, PackingSettings, TrainConfig
from audiollm.supervised.sft import SFTTask
from audiollm.supervised.shape import shape_from_settings
from audiollm.supervised.start import (
    read_codebooks,
    start_codec,
    start_from_codebooks,
    start_generation,
    start_heads_from_embeddings,
    start_model,
    start_vocabulary,
)
from audiollm.supervised.survey import SourceSurvey, load_survey, save_survey, survey_sources, texts_of
from audiollm.train.loop.checkpoint import trained_weights
from audiollm.train.loop.loop import train
from audiollm.train.loop.optim import compute_dtype

DIGEST_FILE = "digest.json"
"""Beside a learned vocabulary: its SHA-256."""


def train_model(config: TrainConfig, context: Context) -> dict[str, Any]:
    """Train on the sources' train split and save to `model` (and to `adapter`, where one is trained).

    Raises:
        StageError: nothing to train on, sources of different codecs, or a bad sample where `strict` is set.
    """
    _check_attention(config)
    sources = [open_source(source.path, config.max_codes_mb) for source in config.shards]
    rank = "" if context.ranks.first else f"-{context.ranks.rank}"
    listing = context.folder / f"set_aside{rank}.jsonl"
    set_aside = SetAside(listing, "train", read_set_aside(listing), config.strict)
    try:
        template = _template(config, sources, set_aside, context)
        found = _survey(config, sources, template, set_aside, context)
        maker = _maker(config, sources, template, found, context)
        task = _task(config, sources, template, found, maker, set_aside, context)
        return _train(config, sources, template, found, maker, task, context)
    except BadSample as bad:
        raise StageError(str(bad), "mend or remove it, or leave `strict` out to set it aside", 2) from bad


def _train(
    config: TrainConfig,
    sources: Sequence[Source],
    template: Template,
    found: SourceSurvey,
    maker: BatchMaker,
    task: SFTTask,
    context: Context,
) -> dict[str, Any]:
    samples = sum(len(found.used(place, held_out=False)) for place in range(len(sources)))
    loop = config.loop_config(
        config.steps_for(samples / required(config.batch_size)),
        default_warmup_steps=50 if config.size == "tiny" else 1000,
        best=_best(config) if config.keep_best else "",
    )
    figures = train(task, loop, context.folder, context, task.device)
    if context.ranks.first:
        _save(config, template, sources, found, context.folder)
    context.ranks.barrier()
    kept = {f"samples_{kind.replace(' ', '_')}": count for kind, count in found.counts().items()}
    counts = {"vocabulary": template.tokenizer.get_vocab_size(), "sequences": samples}
    passes = zip(sources, maker.passes(figures["steps"]), strict=True)
    return {**figures, **kept, **counts, "passes": {source.name: round(n, 2) for source, n in passes}}


def _template(
    config: TrainConfig, sources: Sequence[Source], set_aside: SetAside, context: Context
) -> Template:
    """The vocabulary (given, of the model that is begun from, or trained here) and the codec's shape."""
    codec = codec_of(sources, config.start)
    folder = context.folder / "vocabulary"
    if config.text_tokenizer:
        tokenizer = load_text_tokenizer(config.text_tokenizer)
    elif config.start:
        tokenizer = start_vocabulary(config.start)
    else:
        if context.ranks.first and not (folder / FILE_NAME).exists():
            with context.progress("reading texts", sum(map(len, sources))) as bar:
                texts = texts_of(sources, set_aside, lambda: bar.advance(bar.task_ids[0]))
                first = next(texts, None)
                if first is None:
                    raise StageError("no sample of the train split in the shards", "see `compose`", 2)
                learned = train_text_tokenizer(chain([first], texts), SIZES[config.size].vocab_size)
            _save_vocabulary(learned, folder)
        context.ranks.barrier()
        tokenizer = _learned_vocabulary(folder)
    return Template(tokenizer, codec["num_codebooks"], codec["codebook_size"], header_style_of(tokenizer))


def _save_vocabulary(learned: Tokenizer, folder: Path) -> None:
    with atomic_path(folder / FILE_NAME) as temporary:
        learned.save(str(temporary))
        digest = file_digest(temporary)
    write_json(folder / DIGEST_FILE, {"sha256": digest})


def _learned_vocabulary(folder: Path) -> Tokenizer:
    """What `_save_vocabulary` wrote; other words would stand for the numbers that were trained on.

    Raises:
        StageError: it is something else.
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


def codec_of(sources: Sequence[Source], start: Path | None) -> dict[str, Any]:
    """Codebooks and their size that all coded sources agree on, and what else is known of their codec.

    Where none is coded that of the model that is begun from.

    Raises:
        StageError: two sources were coded by different codecs.
    """
    keys = ("num_codebooks", "codebook_size", "digest", "fingerprint")
    found = {source.name: getattr(source, "facts", {}).get("codec") or {} for source in sources}
    codecs = {
        name: {key: codec[key] for key in keys if key in codec} for name, codec in found.items() if codec
    }
    for (first, one), (second, other) in combinations(codecs.items(), 2):
        shared = one.keys() & other.keys()
        if "digest" in shared:  # the same codes, whatever else is in the codec's folder
            shared -= {"fingerprint"}
        if any(one[key] != other[key] for key in shared):
            raise StageError(
                f"{first} and {second} were coded by different codecs: {one}, {other}",
                "tokenize them with the same one",
                2,
            )
    agreed = {key: value for codec in codecs.values() for key, value in codec.items()}
    return agreed or start_codec(start)


def _survey(
    config: TrainConfig, sources: Sequence[Source], template: Template, set_aside: SetAside, context: Context
) -> SourceSurvey:
    """Made once, by the first rank; a resumed run and the other ranks read it."""
    path = context.folder / "survey.safetensors"
    if context.ranks.first and not _is_whole_survey(path, context):
        with context.progress("measuring samples", sum(map(len, sources))) as bar:
            found = survey_sources(
                sources, template, required(config.max_length), config.too_long, set_aside,
                lambda: bar.advance(bar.task_ids[0]), _features(config),
            )  # fmt: skip
        save_survey(path, found)
    context.ranks.barrier()
    found = load_survey(path)
    if found.digests != tuple(source.digest for source in sources):
        raise StageError(
            "the shards are not those that this training was begun with: samples were added, removed, moved or changed",
            f"put them back, or remove {context.folder} to start afresh",
            2,
        )
    if not any(len(found.used(place, held_out=False)) for place in range(len(sources))):
        raise StageError(
            "no sample of the train split in the shards can be used", "see set_aside.jsonl, and `compose`", 2
        )
    unusual = {kind: count for kind, count in found.counts().items() if kind != "whole"}
    if unusual:
        listed = ", ".join(f"{count} {kind}" for kind, count in unusual.items())
        context.say(f"of {sum(map(len, sources))} samples: {listed} (too_long: {config.too_long})")
    return found


def _is_whole_survey(path: Path, context: Context) -> bool:
    if not path.exists():
        return False
    try:
        load_survey(path)
    except DamagedFile as error:
        context.say(f"{error.path} is damaged: {error.reason}; measuring the samples again")
        return False
    return True


def _maker(
    config: TrainConfig, sources: Sequence[Source], template: Template, found: SourceSurvey, context: Context
) -> BatchMaker:
    rank, world = context.ranks.rank, context.ranks.world
    try:
        return BatchMaker(
            sources, config.weights, found, template, _batching(config), config.seed, rank, world
        )
    except ValueError as error:  # weights that the sources cannot have
        raise StageError(str(error), "see the weights of `shards`", 2) from error


def _task(
    config: TrainConfig,
    sources: Sequence[Source],
    template: Template,
    found: SourceSurvey,
    maker: BatchMaker,
    set_aside: SetAside,
    context: Context,
) -> SFTTask:
    ranks, batching = context.ranks, _batching(config)
    torch.manual_seed(config.seed)
    model = _model(config, template, sources).to(default_device())
    _check_attention(config, model.config.head_dim)
    try:
        adapt(model, config.trained, config.lora)  # in place
    except ValueError as error:  # a pattern that fits nothing
        raise StageError(str(error), "see `trained` and `lora`", 2) from error
    freeze_encoder(model, config)
    held_out = evaluation_packs(sources, found, template, batching, set_aside, ranks.rank, ranks.world)
    task = SFTTask(
        TokenLosses(model),
        Loader(maker, config.workers),
        held_out,
        {"text": config.text_weight, "audio": config.audio_weight},
        set_aside,
        ranks,
        _listening(config, model, sources, template, found, set_aside, context),
        config.audio_reduction,
    )
    return task


def _model(config: TrainConfig, template: Template, sources: Sequence[Source]) -> DualFFN:
    if config.start is not None:
        model = start_model(config.start, template, config.model.audio_ffn_layers)
    else:
        vocabulary = template.tokenizer.get_vocab_size()
        shape = shape_from_settings(config, vocabulary, template.num_codebooks, template.codebook_size + 2)
        model = DualFFN(shape)
    if config.start is None or is_language_model(config.start):
        for source in config.shards:
            vectors = Path(source.path) / "codebooks.safetensors"
            if vectors.exists():
                start_from_codebooks(model, read_codebooks(vectors, template))
                break
        if config.model.code_heads == "embeddings":
            start_heads_from_embeddings(model)
    add_encoder(model, config)
    model.attention = config.model.attention
    return model


def _listening(
    config: TrainConfig,
    model: DualFFN,
    sources: Sequence[Source],
    template: Template,
    found: SourceSurvey,
    set_aside: SetAside,
    context: Context,
) -> Listening | None:
    """None on all ranks but the first, and where it cannot be; then the reason is told."""
    obstacle = _no_listening(config, context)
    spoken: list[tuple[LoadedSample, list[PartAudio]]] = []
    encoder = model.config.audio_encoder
    if not obstacle and context.ranks.first:
        for place, source in enumerate(sources):
            some = evenly(found.used(place, held_out=True), 4 * config.listen)
            usable = read_usable(source, some, encoder.features if encoder else None, set_aside)
            spoken += [(loaded, audio) for loaded, audio in usable if is_spoken(loaded.sample.messages)]
        obstacle = "" if spoken else "no held-out sample is spoken"
    if obstacle and config.listen:
        context.say(f"no prompts are spoken at evaluations: {obstacle}")
    if not spoken:
        return None
    picked = [spoken[place] for place in evenly(np.arange(len(spoken)), config.listen)]
    codec = load_codec(model_folder(required(config.codec)))
    digest = codec_of(sources, config.start).get("digest")
    if digest is not None and codec_digest(codec) != digest:
        problem = f"codec: {config.codec} is another codec than that of the shards"
        raise StageError(problem, "give the folder of the codec that the shards were tokenized with", 2)
    sampling = SamplingConfig(**guidance_of(config.text_dropout, config.speaker_dropout))
    return Listening(model, codec, template, picked, context.folder / "listening", sampling)


def _no_listening(config: TrainConfig, context: Context) -> str:
    if context.ranks.world > 1 and config.strategy in ("fsdp2", "zero2", "zero3"):
        return f"with {config.strategy} no rank has the whole model"
    if config.codec is None:
        return "set `codec` to that of the shards"
    return "" if config.listen else "listen is 0"


def _save(
    config: TrainConfig, template: Template, sources: Sequence[Source], found: SourceSurvey, folder: Path
) -> None:
    """Write what the run ended with; an adapter by itself too, and merged into `model`."""
    model = _model(config, template, sources)
    adapted = adapt(model, config.trained, config.lora)
    weights = trained_weights(folder, "model")
    model.load_state_dict({key.removeprefix("model."): value for key, value in weights.items()})
    if config.trained == "adapter":
        save_adapter(adapted, folder / "adapter")  # type: ignore[arg-type]
        model = merge_adapter(adapted)  # type: ignore[arg-type, assignment]
    card, generation = _card(config, sources, found), start_generation(config.start)
    save_pretrained(
        model,
        folder / "model",
        template.tokenizer,
        card,
        generation=generation,
        codec=_codec_folder(config, sources),
    )
    write_json(folder / "model" / SPEAKERS_FILE, list(found.speakers))
    longest = max(int(rows.max(initial=0)) for rows in found.rows)
    trained = {
        "longest_positions": longest,
        "text_dropout": config.text_dropout,
        "speaker_dropout": config.speaker_dropout,
        "codec_digest": codec_of(sources, config.start).get("digest"),
    }
    write_json(folder / "model" / TRAINED_FILE, trained)


def _codec_folder(config: TrainConfig, sources: Sequence[Source]) -> Path | None:
    """Where the codec is, as far as the settings, the shards or the model begun from tell."""
    if config.codec is not None:
        return model_folder(config.codec)
    told = [(getattr(source, "facts", {}).get("codec") or {}).get("path") for source in sources]
    if config.start is not None:
        told.append(read_config(model_folder(config.start)).get("audio_tokenizer_id"))
    return next((Path(folder) for folder in told if folder and Path(folder).is_dir()), None)


def _card(config: TrainConfig, sources: Sequence[Source], found: SourceSurvey) -> ModelCard:
    codec = codec_of(sources, config.start)
    samples = sum(len(found.used(place, held_out=False)) for place in range(len(sources)))
    return ModelCard(
        codec=f"{codec['num_codebooks']} codebooks of {codec['codebook_size']} codes"
        + (f", SHA-256 of its folder {codec['fingerprint']}" if "fingerprint" in codec else ""),
        data=f"{samples:,} samples of {', '.join(sorted({Path(source.name).name for source in sources}))}",
        recipe=f"stage `train`, {config.budget_text()}, {config.batch_size} sequences a step, seed {config.seed}",
        base=Path(config.start).name if config.start else "random weights",
    )


def _check_attention(config: TrainConfig, head_dim: int | None = None) -> None:
    """Raises: StageError: the attention that is asked for cannot run here; told before anything is read."""
    wanted, device = config.model.attention, default_device()
    dtype = compute_dtype(config.precision, device) or torch.float32
    if head_dim is None:  # that of `start` is not known yet
        head_dim = (
            64 if config.start else required(config.model.hidden_size) // required(config.model.num_heads)
        )
    try:
        attention_backend(device, dtype, head_dim, wanted)
    except ValueError as error:
        raise StageError(f"model.{error}", exit_code=2) from error


def _best(config: TrainConfig) -> str:
    return "audio_loss" if config.audio_weight else "text_loss"


def _batching(config: TrainConfig) -> Batching:
    shared = {name: getattr(config, name) for name in PackingSettings.model_fields}
    return Batching(
        **{
            **shared,
            "batch_size": config.batch_size,
            "encoder": _features(config),
            "augment": config.augmentations,
        }
    )


def _features(config: TrainConfig) -> FeatureShape | None:
    encoder = encoder_of(config)
    return encoder.features if encoder else None
