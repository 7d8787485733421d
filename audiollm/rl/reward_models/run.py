"""The work of the stage `train_reward`. Called on every rank."""

from __future__ import annotations

from typing import Any

import torch

from audiollm.data.records.step_records import first_records
from audiollm.devices import default_device
from audiollm.families.frozen_weights import FrozenWeights
from audiollm.families.target_logits import COMPARED_SAMPLES
from audiollm.models.frozen.shrink import load_trained
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.rl.preference.run import errors_of_stage, find_records, make_steps
from audiollm.rl.reward_models.model import RewardModel
from audiollm.rl.reward_models.settings import RewardConfig
from audiollm.rl.reward_models.task import RewardTask
from audiollm.train.loop.checkpoint import trained_weights
from audiollm.train.loop.loop import train

STAGE_NAME = "train_reward"


def train_reward(config: RewardConfig, context: Context) -> dict[str, Any]:
    """Train on the records' train split and save the reward model to `model`; `reliability.json` beside it.

    Raises:
        StageError: nothing to train on, or a bad record where `strict` is set.
    """
    with errors_of_stage():
        return _train_reward_model(config, context)


def _train_reward_model(config: RewardConfig, context: Context) -> dict[str, Any]:
    ranks, frozen = context.ranks, FrozenWeights(config, context)
    records = find_records(config, STAGE_NAME, context)
    torch.manual_seed(config.seed)  # the head, and an adapter, begin at random
    model = _begin_reward_model(config)
    samples = first_records(records.sources, records.usable, COMPARED_SAMPLES)
    frozen.shrink_policy(model.base, samples)
    model.root.to(default_device())
    steps = make_steps(config, model.policy, records, ranks)
    task = RewardTask(
        model, steps, config.terms, records.set_aside, ranks, config.margin_scale, context.folder
    )
    loop = config.loop_config(
        config.steps_for(records.trained / required(config.batch_size)), evaluations=config.evaluations
    )
    figures = train(task, loop, context.folder, context, task.device)
    if ranks.first:
        with frozen.begun_again():
            fresh = _begin_reward_model(config)
        load_trained(fresh.root, trained_weights(context.folder, "reward"), frozen.are_small)
        fresh.save(context.folder)
        frozen.compare_saved_policy(model.base)
    ranks.barrier()
    return {**figures, **frozen.figures(), **records.counts()}


def _begin_reward_model(config: RewardConfig) -> RewardModel:
    return RewardModel.begin(
        config.start,
        config.trained,
        config.lora,
        required(config.max_tokens),
        config.scored,
        config.has_bias,
    )
