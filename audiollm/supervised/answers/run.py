"""The stage `train` on a model that learns answers through its policy: its work on every rank."""

from __future__ import annotations

from typing import Any

import torch

from audiollm.data.records.mixture import StepDraws
from audiollm.data.records.opening import open_source
from audiollm.data.records.step_records import first_records
from audiollm.data.records.video_clips import PictureSettings
from audiollm.devices import default_device
from audiollm.errors import ConfigError, StageError
from audiollm.families.frozen_weights import FrozenWeights
from audiollm.families.policies import load_policy
from audiollm.families.policy import has_depth
from audiollm.families.target_logits import COMPARED_SAMPLES
from audiollm.models.frozen.shrink import load_trained
from audiollm.models.pretrained import model_folder
from audiollm.processes import return_free_memory, return_tensors_at_once
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.supervised.answers.batches import AnswerBatchMaker
from audiollm.supervised.answers.task import AnswerTask, loss_figure
from audiollm.supervised.corpus.sources import set_aside_of
from audiollm.train.loop.checkpoint import trained_weights
from audiollm.train.loop.loop import train
from audiollm.train.supervised_settings import TrainConfig

LARGE_MODEL = 50_000_000
"""Parameters from which on a step computes so much that giving memory back at once costs nothing beside."""
OF_PACKS = (
    "text_tokenizer", "audio_in", "augment", "max_length", "too_long", "packing", "audio_reduction", "text_dropout",
    "speaker_dropout", "corrupt_codes", "silence_weight", "text_weight", "audio_weight", "max_codes_mb", "workers",
    "codec", "eval_audio_samples", "pin_memory",
)  # fmt: skip
"""Settings of `train` that are for models which learn from packs alone."""
LEARNING_RATE, ADAPTER_LEARNING_RATE = 1e-5, 1e-4
"""Learning rates of published weights, where none is set: of all or some weights, and of an adapter."""


def check_settings(config: TrainConfig) -> None:
    """Refuse settings that would be read by nothing.

    Raises:
        ConfigError: one is set.
    """
    useless = [name for name in (*OF_PACKS, "shape") if name in config.settings_given]
    if any(source.augment is not None for source in config.samples):
        useless.append("augment")
    if useless:
        raise ConfigError(
            f"{useless[0]}: is for models that learn from packs of rows (DualFFN), and the one in `start` does not",
            str(config.start),
            "leave it out",
        )


def check_no_talker(config: TrainConfig, where: str) -> None:
    """Refuse settings that only talkers with two decoders read.

    Raises:
        ConfigError: one is set.
    """
    for name in ("depth_weight", "prompt_mix"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"{name}: is for talkers with two decoders (CSM, Qwen3-TTS), and this model is none",
                where,
                "leave it out",
            )


def train_on_answers(config: TrainConfig, context: Context) -> dict[str, Any]:
    """Train on the last turns of the conversations of the train split, and save to `model` (and to `adapter`).

    Raises:
        ConfigError: settings that the model has no use for, or a folder that does not load.
        StageError: nothing to train on.
        BadSample: the first bad sample, where `strict` is set.
    """
    check_settings(config)
    ranks, start, frozen = context.ranks, required(config.start), FrozenWeights(config, context)
    torch.manual_seed(config.seed)  # an adapter begins at random
    pictures = PictureSettings.beside(model_folder(start))
    policy = load_policy(start, config.trained, config.lora, pictures=pictures, prompt_mix=config.prompt_mix)
    if sum(parameter.numel() for parameter in policy.root.parameters()) >= LARGE_MODEL:
        return_tensors_at_once()
    if not has_depth(policy):
        check_no_talker(config, str(start))
    sources = [open_source(source.path) for source in config.samples]
    set_aside = set_aside_of(context.folder, "train", ranks, config.strict)
    batch_size = required(config.batch_size)
    draws = StepDraws(batch_size, config.seed, config.weights, required(config.max_tokens))
    with context.progress("reading samples", sum(map(len, sources))) as bar:
        batches = AnswerBatchMaker(
            policy, sources, draws, set_aside, ranks, "samples", pictures is not None,
            lambda: bar.advance(bar.task_ids[0]),
        )  # fmt: skip
    frozen.shrink_policy(policy, first_records(sources, batches.usable, COMPARED_SAMPLES))
    policy.root.to(default_device())
    counts = batches.counts
    if config.keep_best and not counts["test"]:
        raise StageError(
            "keep_best is set, and no sample is held out that could tell the best weights",
            "hold samples out (metadata `split: test`), or set keep_best: false",
            2,
        )
    rate = ADAPTER_LEARNING_RATE if config.trained == "adapter" else LEARNING_RATE
    loop = config.loop_config(
        config.steps_for(counts["train"] / batch_size),
        evaluations=config.evaluations,
        best=loss_figure(policy) if config.keep_best else "",
        **({} if "learning_rate" in config.settings_given else {"learning_rate": rate}),
    )
    task = AnswerTask(policy, batches, config.normalization, ranks, config.depth_weight)
    figures = train(task, loop, context.folder, context, task.device)
    return_free_memory()
    if ranks.first:
        if ranks.world == 1 and not frozen.are_small:
            policy.save(context.folder)
        else:  # through a policy made anew: the trained one may be spread over ranks, or in fewer bytes
            with frozen.begun_again():
                fresh = load_policy(start, config.trained, config.lora, pictures=pictures)
            load_trained(fresh.root, trained_weights(context.folder, "policy"), frozen.are_small)
            fresh.save(context.folder)
            del fresh
        frozen.compare_saved_policy(policy)
    ranks.barrier()
    named = {"sequences": counts["train"], "held_out": counts["test"], "set_aside": counts["bad"]}
    return {**figures, **frozen.figures(), **named}
