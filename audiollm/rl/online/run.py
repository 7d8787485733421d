"""The work of the stage `train_policy`. Called on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from audiollm.data.records.opening import open_source
from audiollm.devices import default_device
from audiollm.errors import StageError
from audiollm.files.set_aside import SetAside
from audiollm.generation.speaking.generator import Generator
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.rl.online.critic import ActorCritic, CriticModel
from audiollm.rl.online.prompts import PromptMaker
from audiollm.rl.online.ptx import SupervisedMaker
from audiollm.rl.online.refill import maker_of
from audiollm.rl.online.rollout_step import RolloutFiles
from audiollm.rl.online.settings import KLChoice, PolicyTrainingConfig, weights_of
from audiollm.rl.online.task import PolicyTask
from audiollm.rl.policy.dual_ffn_policy import DualFFNPolicy
from audiollm.rl.policy.protocol import Policy
from audiollm.rl.policy.transformers_policy import TransformersPolicy
from audiollm.rl.policy_gradient.controllers import kl_controller
from audiollm.rl.preference.policies import load_policy, plain_model, untrained_copy
from audiollm.rl.preference.run import errors_of_stage
from audiollm.rl.rewards.checks import check_rewards
from audiollm.rl.rewards.registry import load_rewards
from audiollm.rl.rewards.scoring import RewardSuite
from audiollm.rl.rollouts.by_transformers import TransformersRollouts
from audiollm.rl.rollouts.own import OwnRollouts
from audiollm.rl.rollouts.protocol import RolloutEngine, RolloutSettings
from audiollm.supervised.corpus.sources import set_aside_of
from audiollm.supervised.eval_audio import SHARDING
from audiollm.train.loop.checkpoint import trained_weights
from audiollm.train.loop.loop import train
from audiollm.train.loop.whole import WholeCopy

STAGE_NAME = "train_policy"


def train_policy(config: PolicyTrainingConfig, context: Context) -> dict[str, Any]:
    """Train a policy on its own answers to the prompts, and save it to `model` (and `adapter`, where one is trained).

    A critic is saved to `critic/model`.

    Raises:
        StageError: settings that do not fit the model, no prompt, or a bad one where `strict` is set.
    """
    with errors_of_stage():
        return _train(config, context)


def _train(config: PolicyTrainingConfig, context: Context) -> dict[str, Any]:
    ranks = context.ranks
    torch.manual_seed(config.seed)  # an adapter begins at random
    policy = load_policy(
        config.model,
        config.trained,
        config.lora,
        config.reference,
        config.needs_reference,
        required(config.max_tokens),
    )
    critic = None
    if config.critic is not None:
        critic = CriticModel.begin(config, required(config.max_tokens))
        policy.check_reader(critic.policy, "critic")
        critic.root.to(default_device())
    policy.root.to(default_device())
    for frozen in policy.frozen.values():
        frozen.to(default_device())
    sources = [open_source(source.path) for source in config.samples]
    set_aside = set_aside_of(context.folder, STAGE_NAME, ranks, config.strict)
    with context.progress("reading prompts", sum(map(len, sources))) as bar:
        prompts = PromptMaker(
            policy, sources, config.weights, required(config.batch_size), config.seed, set_aside, ranks.rank,
            ranks.world, lambda: bar.advance(bar.task_ids[0]),
        )  # fmt: skip
    if not prompts.trained:
        raise StageError("no record of the train split can be asked", "see set_aside.jsonl", 2)
    ptx = _supervised(config, policy, set_aside, context)
    terms = config.reward_terms
    if config.answer != "text" and not isinstance(policy, DualFFNPolicy):
        raise StageError(f"answer: {config.answer}, and this model answers in text", "set answer: text", 2)
    check_rewards(terms, prompts.samples, config.answer != "text")
    rewards = RewardSuite(terms, load_rewards(terms), config.reward_timeout_s, config.on_error)
    settings = RolloutSettings(
        config.seed, 0, config.temperature, config.answer, config.max_answer_tokens, config.max_frames
    )
    codec = (
        Generator.from_pretrained(config.model, config.codec).codec if any(t.speech for t in terms) else None
    )
    sampler, whole = policy, None
    if ranks.world > 1 and config.strategy in SHARDING:
        sampler = untrained_copy(policy, config.model, required(config.max_tokens))
        whole = WholeCopy(plain_model(policy.root), plain_model(sampler.root))
    maker = maker_of(config, engine_of(sampler), sampler, rewards, settings, prompts, ranks, codec)
    files = RolloutFiles(context.folder / "rollouts", ranks)
    kl = config.kl or KLChoice()
    controller = kl_controller(kl.controller.name, kl.controller.values)
    own = None if critic is None else critic.root
    task = PolicyTask(config, policy, prompts, maker, files, controller, set_aside, ranks, whole, own, ptx)
    rules = () if config.critic is None else config.critic.rules(required(config.learning_rate))
    loop = config.loop_config(
        config.steps_for(prompts.trained / required(config.batch_size)),
        evaluations=config.evaluations,
        log_every=1,
        rules=(*config.rules, *rules),
    )
    figures = train(task, loop, context.folder, context, task.device)
    if ranks.first:
        _save(config, context.folder)
    ranks.barrier()
    counts = {"prompts": prompts.trained, "held_out_prompts": prompts.held_out}
    return {**figures, **counts, "set_aside": len(set_aside.rows)}


def _supervised(
    config: PolicyTrainingConfig, policy: Policy[Any, Any, Any], set_aside: SetAside, context: Context
) -> SupervisedMaker | None:
    """The samples of `ptx`, where it is set."""
    if config.ptx is None:
        return None
    sources = [open_source(source.path) for source in config.ptx.samples]
    size = config.ptx.batch_size or required(config.batch_size)
    with context.progress("reading ptx", sum(map(len, sources))) as bar:
        return SupervisedMaker(
            policy, sources, weights_of(config.ptx.samples), size, required(config.max_tokens), config.seed, set_aside,
            context.ranks, lambda: bar.advance(bar.task_ids[0]),
        )  # fmt: skip


def _save(config: PolicyTrainingConfig, folder: Path) -> None:
    """Write the policy that a run ended with to `folder`, and its critic to `folder/critic`."""
    weights = trained_weights(folder, "policy")
    policy = load_policy(config.model, config.trained, config.lora)
    if config.critic is None:
        policy.root.load_state_dict(weights)
    else:
        critic = CriticModel.begin(config, required(config.max_tokens))
        ActorCritic(policy.root, critic.root).load_state_dict(weights)
        critic.save(folder / "critic")
    policy.save(folder)


def engine_of(policy: Policy[Any, Any, Any]) -> RolloutEngine[Any]:
    """The engine that samples from a policy's own weights."""
    if isinstance(policy, DualFFNPolicy):
        return OwnRollouts(policy.root.model, policy.template)
    assert isinstance(policy, TransformersPolicy)
    return TransformersRollouts(policy.root.model, policy.processor, policy.ends)
