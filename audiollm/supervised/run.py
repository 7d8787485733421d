"""The work of the stage `train`, from the parts that other trainings use too. Called on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from audiollm.data.packing import PackedBatch
from audiollm.data.records.loader import Loader
from audiollm.devices import default_device
from audiollm.errors import BadSample, StageError
from audiollm.families.dual_ffn.losses import TokenLosses
from audiollm.recipe.ranks import Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.supervised.corpus.batches import Batching, BatchMaker, evaluation_packs
from audiollm.supervised.corpus.sources import open_sources, set_aside_of, survey_once
from audiollm.supervised.corpus.vocabulary import make_template
from audiollm.supervised.decoder.building import build_decoder, check_attention, choose_trained
from audiollm.supervised.decoder.encoder import encoder_of
from audiollm.supervised.eval_audio import make_eval_audio
from audiollm.supervised.saving import save_trained
from audiollm.supervised.settings import SIZES, PackingSettings, TrainConfig
from audiollm.supervised.sft import SFTTask
from audiollm.train.loop.loop import train


def train_model(config: TrainConfig, context: Context) -> dict[str, Any]:
    """Train on the sources' train split and save to `model` (and to `adapter`, where one is trained).

    Raises:
        StageError: nothing to train on, sources of different codecs, or a bad sample where `strict` is set.
    """
    check_attention(config)
    try:
        return _train_on_packs(config, context)
    except BadSample as bad:
        raise StageError(str(bad), "mend or remove it, or leave `strict` out to set it aside", 2) from bad


def _train_on_packs(config: TrainConfig, context: Context) -> dict[str, Any]:
    ranks = context.ranks
    sources = open_sources(config.samples, config.max_codes_mb)
    set_aside = set_aside_of(context.folder, "train", ranks, config.strict)
    template = make_template(config, sources, SIZES[config.size].vocab_size, set_aside, context)
    batching = _batching(config)
    survey = survey_once(sources, template, config, batching.encoder, set_aside, context)
    try:
        maker = BatchMaker(
            sources, config.weights, survey, template, batching, config.seed, ranks.rank, ranks.world
        )
    except ValueError as error:  # weights that the sources cannot have
        raise StageError(str(error), "see the weights of `samples`", 2) from error
    torch.manual_seed(config.seed)
    model = build_decoder(config, template).to(default_device())
    check_attention(config, model.config.head_dim)
    choose_trained(model, config, any(getattr(source, "facts", {}).get("codec") for source in sources))
    held_out = evaluation_packs(sources, survey, template, batching, set_aside, ranks.rank, ranks.world)
    task = SFTTask(
        TokenLosses(model),
        Loader(maker, config.workers),
        held_out,
        {"text": config.text_weight, "audio": config.audio_weight},
        set_aside,
        ranks,
        make_eval_audio(config, model, sources, template, survey, set_aside, context),
        config.audio_reduction,
    )
    samples = sum(len(survey.used(place, held_out=False)) for place in range(len(sources)))
    loop = config.loop_config(
        config.steps_for(samples / required(config.batch_size)),
        default_warmup_steps=50 if config.size == "tiny" else 1000,
        best=_best_figure(config, held_out, ranks) if config.keep_best else "",
    )
    figures = train(task, loop, context.folder, context, task.device)
    if ranks.first:
        save_trained(config, "train", template, sources, survey, context.folder)
    ranks.barrier()
    sample_counts = {f"samples_{kind.replace(' ', '_')}": count for kind, count in survey.counts().items()}
    counts = {"vocabulary": template.tokenizer.get_vocab_size(), "sequences": samples}
    passes = zip(sources, maker.passes(figures["steps"]), strict=True)
    return {
        **figures,
        **sample_counts,
        **counts,
        "passes": {source.name: round(n, 2) for source, n in passes},
    }


def _best_figure(config: TrainConfig, held_out: Mapping[str, Sequence[PackedBatch]], ranks: Ranks) -> str:
    """The figure that tells the best weights: the loss of speech where held-out samples are spoken, else of text."""
    has_speech = any(pack.counts["audio"] for packs in held_out.values() for pack in packs)
    return "audio_loss" if config.audio_weight and any(ranks.gather(has_speech)) else "text_loss"


def _batching(config: TrainConfig) -> Batching:
    encoder = encoder_of(config)
    shared = {name: getattr(config, name) for name in PackingSettings.model_fields}
    return Batching(
        **{
            **shared,
            "batch_size": config.batch_size,
            "encoder": encoder.features if encoder else None,
            "augment": config.augmentations,
        }
    )
