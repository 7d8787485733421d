"""The work of the stage `train_preference`. Called on every rank."""

from __future__ import annotations

from typing import Any

import torch

from audiollm.data.records.opening import open_source
from audiollm.devices import default_device
from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.rl.policy.protocol import Policy
from audiollm.rl.preference.batches import StepMaker
from audiollm.rl.preference.eval_answers import EvalAnswers, obstacle_to_answers
from audiollm.rl.preference.policies import load_policy
from audiollm.rl.preference.records import Grouping, find_usable
from audiollm.rl.preference.settings import PreferenceConfig
from audiollm.rl.preference.task import PreferenceTask
from audiollm.supervised.corpus.sources import set_aside_of
from audiollm.train.loop.checkpoint import trained_weights
from audiollm.train.loop.loop import train

STAGE_NAME = "train_preference"


def train_preference(config: PreferenceConfig, context: Context) -> dict[str, Any]:
    """Train on the records' train split and save the policy to `model` (and `adapter`, where one is trained).

    Raises:
        StageError: nothing to train on, or a bad record where `strict` is set.
    """
    try:
        return _train(config, context)
    except BadSample as bad:
        raise StageError(str(bad), "mend or remove it, or leave `strict` out to set it aside", 2) from bad
    except ConfigError as error:  # a model's folder that does not load, patterns that fit no parameter
        raise StageError(str(error), "", 2) from error


def _train(config: PreferenceConfig, context: Context) -> dict[str, Any]:
    ranks, terms = context.ranks, config.terms
    sources = [open_source(source.path) for source in config.samples]
    set_aside = set_aside_of(context.folder, STAGE_NAME, ranks, config.strict)
    fields = frozenset().union(*(needs.fields for needs in config.needs))
    altered = any(needs.altered_recordings for needs in config.needs)
    grouping = Grouping(config.group_kind, fields, config.pairs, needs_recording=altered)
    with context.progress("reading records", sum(map(len, sources))) as bar:
        usable = find_usable(sources, grouping, set_aside, lambda: bar.advance(bar.task_ids[0]))
    records = sum(len(each) for each in usable.train)
    if not records:
        raise StageError("no record of the train split can be used", "see set_aside.jsonl", 2)
    torch.manual_seed(config.seed)  # an adapter begins at random
    policy = load_policy(config, config.needs_reference)
    policy.root.to(default_device())
    for frozen in policy.frozen.values():
        frozen.to(default_device())
    steps: StepMaker[Any, Any, Any] = StepMaker(
        policy,
        sources,
        config.weights,
        usable,
        grouping,
        required(config.batch_size),
        required(config.max_tokens),
        config.seed,
        draws="draw_T" in fields or "contrast_T" in fields,
        mismatched=any(needs.mismatched_answers for needs in config.needs),
        altered=altered,
        rank=ranks.rank,
        world=ranks.world,
    )
    answers = _eval_answers(config, policy, steps, context)
    task = PreferenceTask(policy, steps, terms, set_aside, ranks, context.folder, answers)
    loop = config.loop_config(
        config.steps_for(records / required(config.batch_size)), evaluations=config.evaluations
    )
    figures = train(task, loop, context.folder, context, task.device)
    if ranks.first:
        _save(config, context)
    ranks.barrier()
    held_out = sum(len(each) for each in usable.held_out)
    return {**figures, "records": records, "held_out_records": held_out, "set_aside": len(set_aside.rows)}


def _eval_answers(
    config: PreferenceConfig, policy: Policy[Any, Any, Any], steps: StepMaker[Any, Any, Any], context: Context
) -> EvalAnswers | None:
    """Pick the prompts that evaluations answer, and have the model answer them once before it is trained."""
    if not config.eval_answers or not steps.held_out_places():
        return None
    obstacle = obstacle_to_answers(config, context.ranks)
    if obstacle:
        context.say(f"no answers are given at evaluations: {obstacle}")
        return None
    answers = EvalAnswers(policy, steps, config.eval_answers, context.folder, context.ranks)
    answers.begin()
    return answers


def _save(config: PreferenceConfig, context: Context) -> None:
    """Write the weights that the loop left, through a policy made anew: the trained one may be spread over ranks."""
    fresh = load_policy(config, needs_reference=False)
    fresh.root.load_state_dict(trained_weights(context.folder, "policy"))
    fresh.save(context.folder)
