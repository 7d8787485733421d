"""The work of the stage `train`, by the family of the model. Called on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from audiollm.data.packing import PackedBatch
from audiollm.data.records.loader import Loader
from audiollm.devices import default_device
from audiollm.errors import BadSample, StageError
from audiollm.families.frozen_weights import FrozenWeights
from audiollm.families.packed_training import PackedTraining
from audiollm.families.registry import packed_training
from audiollm.families.target_logits import COMPARED_SAMPLES, read_logits
from audiollm.recipe.ranks import Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.supervised.answers.run import check_no_talker, train_on_answers
from audiollm.supervised.corpus.batches import Batching, BatchMaker, evaluation_packs
from audiollm.supervised.corpus.sources import TrainingCorpus, open_training_corpus
from audiollm.supervised.eval_audio import make_eval_audio
from audiollm.supervised.features.encoding import encoded_views
from audiollm.supervised.saving import save_trained
from audiollm.supervised.sft import SFTTask
from audiollm.train.loop.loop import train
from audiollm.train.supervised_settings import PackingSettings, TrainConfig


def train_model(config: TrainConfig, context: Context) -> dict[str, Any]:
    """Train on the sources' train split and save to `model` (and to `adapter`, where one is trained).

    Raises:
        ConfigError: settings that the model has no use for, or a folder that does not load.
        StageError: nothing to train on, sources of different codecs, or a bad sample where `strict` is set.
    """
    training = packed_training(config)
    try:
        if training is None:
            return train_on_answers(config, context)
        check_no_talker(config, str(config.start or "shape"))
        training.check()
        if config.pin_memory and default_device().type != "cuda":
            raise StageError("pin_memory is set, and there is no GPU", "leave it out", 2)
        return _train_on_packs(config, training, context)
    except BadSample as bad:
        raise StageError(str(bad), "mend or remove it, or leave `strict` out to set it aside", 2) from bad


def _train_on_packs(config: TrainConfig, training: PackedTraining, context: Context) -> dict[str, Any]:
    ranks, frozen = context.ranks, FrozenWeights(config, context)
    corpus = open_training_corpus(config, training, context)
    sources, survey, template = corpus.sources, corpus.survey, corpus.template
    batching = _batching(config, corpus)
    try:
        maker = BatchMaker(
            sources, config.weights, survey, template, batching, config.seed, ranks.rank, ranks.world
        )
    except ValueError as error:  # weights that the sources cannot have
        raise StageError(str(error), "see the weights of `samples`", 2) from error
    torch.manual_seed(config.seed)
    model = training.build(template, corpus.is_coded)
    compared = _compared_pack(config, corpus, batching) if frozen.are_small else None
    frozen.shrink(model, lambda: read_logits(model, compared))
    model.to(default_device())
    held_out = evaluation_packs(
        sources, survey, template, batching, corpus.set_aside, ranks.rank, ranks.world
    )
    task = SFTTask(
        model,
        Loader(maker, config.workers, pinned=config.pin_memory),
        held_out,
        {"text": config.text_weight, "audio": config.audio_weight},
        corpus.set_aside,
        ranks,
        make_eval_audio(config, model, corpus, context),
        config.audio_reduction,
    )
    loop = config.loop_config(
        config.steps_for(corpus.num_samples / required(config.batch_size)),
        default_warmup_steps=50 if config.size == "tiny" else 1000,
        best=_best_figure(config, held_out, ranks) if config.keep_best else "",
    )
    figures = train(task, loop, context.folder, context, task.device)
    if ranks.first:
        with frozen.begun_again():
            saved = save_trained(config, training, corpus, context.folder)
        frozen.compare_saved(
            lambda: read_logits(model, None if compared is None else compared.to(task.device)),
            lambda: read_logits(saved, compared),
        )
    ranks.barrier()
    sample_counts = {f"samples_{kind.replace(' ', '_')}": count for kind, count in survey.counts().items()}
    passes = zip(sources, maker.passes(figures["steps"]), strict=True)
    return {
        **figures,
        **frozen.figures(),
        **sample_counts,
        "vocabulary": template.tokenizer.get_vocab_size(),
        "sequences": corpus.num_samples,
        "passes": {source.name: round(n, 2) for source, n in passes},
    }


def _compared_pack(config: TrainConfig, corpus: TrainingCorpus, batching: Batching) -> PackedBatch:
    """A pack of a few samples of the first step, on which models are compared."""
    few = batching.model_copy(update={"batch_size": COMPARED_SAMPLES})
    return BatchMaker(corpus.sources, config.weights, corpus.survey, corpus.template, few, config.seed)(
        0
    ).packs[0]


def _best_figure(config: TrainConfig, held_out: Mapping[str, Sequence[PackedBatch]], ranks: Ranks) -> str:
    """The figure that tells the best weights: the loss of speech where held-out samples are spoken, else of text."""
    has_speech = any(pack.counts["audio"] for packs in held_out.values() for pack in packs)
    return "audio_loss" if config.audio_weight and any(ranks.gather(has_speech)) else "text_loss"


def _batching(config: TrainConfig, corpus: TrainingCorpus) -> Batching:
    """
    Raises:
        StageError: views are asked for that were not encoded.
    """
    shared = {name: getattr(config, name) for name in PackingSettings.model_fields}
    views = [
        encoded_views(source, augment)
        for source, augment in zip(corpus.sources, config.augmentations, strict=True)
    ]
    return Batching(
        **{**shared, "batch_size": config.batch_size, "encoder": corpus.encoder},
        augment=config.augmentations,
        views=tuple(views),
    )
