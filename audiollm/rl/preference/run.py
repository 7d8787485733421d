"""The work of the stage `train_preference`. Called on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from audiollm.data.records.mixture import StepDraws
from audiollm.data.records.opening import open_source
from audiollm.data.records.source import Source
from audiollm.data.records.step_records import UsableRecords, find_usable, first_records
from audiollm.devices import default_device
from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.families.frozen_weights import FrozenWeights
from audiollm.families.policies import load_policy, plain_model, untrained_copy
from audiollm.families.policy import Policy
from audiollm.families.target_logits import COMPARED_SAMPLES
from audiollm.files.set_aside import SetAside
from audiollm.models.frozen.shrink import load_trained
from audiollm.recipe.ranks import Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.rl.critic.model import ActorCritic, CriticModel
from audiollm.rl.preference.batches import BatchNeeds, StepMaker
from audiollm.rl.preference.held_out import EvalAnswers
from audiollm.rl.preference.ptx import supervised_maker
from audiollm.rl.preference.records import Grouping
from audiollm.rl.preference.settings import AnswerTrainingConfig, PreferenceConfig
from audiollm.rl.preference.task import PreferenceParts, PreferenceTask
from audiollm.supervised.corpus.sources import set_aside_of
from audiollm.train.loop.checkpoint import trained_weights
from audiollm.train.loop.loop import train
from audiollm.train.loop.whole import WholeCopy
from audiollm.train.parallel.wrapping import place_frozen

STAGE_NAME = "train_preference"


@dataclass(frozen=True)
class Records:
    """The opened sources of a training, and which of their records it uses."""

    sources: Sequence[Source]
    usable: UsableRecords
    grouping: Grouping
    set_aside: SetAside

    @property
    def trained(self) -> int:
        """Number of the records that are trained on."""
        return self.usable.num_trained

    def counts(self) -> dict[str, int]:
        """Figures of the stage."""
        held_out, set_aside = self.usable.num_held_out, len(self.set_aside.rows)
        return {"records": self.trained, "held_out_records": held_out, "set_aside": set_aside}


def train_preference(config: PreferenceConfig, context: Context) -> dict[str, Any]:
    """Train on the records' train split and save the policy to `model` (and `adapter`, where one is trained).

    A critic is saved to `critic/model`.

    Raises:
        StageError: nothing to train on, or a bad record where `strict` is set.
    """
    with errors_of_stage():
        return _train_preferences(config, context)


@contextmanager
def errors_of_stage() -> Iterator[None]:
    """Raise what a person can mend as a `StageError`."""
    try:
        yield
    except BadSample as bad:
        raise StageError(str(bad), "mend or remove it, or leave `strict` out to set it aside", 2) from bad
    except ConfigError as error:  # a model's folder that does not load, patterns that fit no parameter
        raise StageError(str(error), "", 2) from error


def find_records(
    config: AnswerTrainingConfig, stage: str, context: Context, takes_video: bool = False
) -> Records:
    """Open the sources and look at every record once.

    Args:
        takes_video: whether records with videos are used; otherwise they are set aside.

    Raises:
        StageError: none can be trained on.
    """
    sources = [open_source(source.path) for source in config.samples]
    set_aside = set_aside_of(context.folder, stage, context.ranks, config.strict)
    altered = any(needs.altered_recordings for needs in config.needs)
    grouping = Grouping(config.group_kind, _fields(config), config.pairs, altered, takes_video)
    with context.progress("reading records", sum(map(len, sources))) as bar:
        usable = find_usable(sources, grouping.groups, set_aside, lambda: bar.advance(bar.task_ids[0]))
    records = Records(sources, usable, grouping, set_aside)
    if not records.trained:
        raise StageError(_nothing_usable(config, set_aside), "see set_aside.jsonl", 2)
    return records


def _nothing_usable(config: AnswerTrainingConfig, set_aside: SetAside) -> str:
    """Say which objective finds no record of the train split, and the reason that most records have."""
    names = ", ".join(choice.name for choice in config.objective)
    message = f"objective: {names} can use no record of the train split"
    if not set_aside.rows:
        return f"{message}: all are held out (metadata split: test), or there is none"
    kind, count = set_aside.counts.most_common(1)[0]
    reason = next(row["reason"] for row in set_aside.rows if row["kind"] == kind)
    return (
        f"{message}: {count} of {len(set_aside.rows)} that were set aside have {kind!r}, the first: {reason}"
    )


def make_steps(
    config: AnswerTrainingConfig, policy: Policy[Any, Any, Any], records: Records, ranks: Ranks
) -> StepMaker[Any, Any, Any]:
    """The batches of a training, as its objectives need them.

    Raises:
        StageError: a source has a weight and no sample to train on.
    """
    fields = _fields(config)
    try:
        return StepMaker(
            policy,
            records.sources,
            records.usable,
            records.grouping,
            StepDraws(required(config.batch_size), config.seed, config.weights, required(config.max_tokens)),
            BatchNeeds(
                draws="draw_T" in fields or "contrast_T" in fields,
                mismatched=any(needs.mismatched_answers for needs in config.needs),
                altered=records.grouping.needs_recording,
                prompts=any(needs.prompts for needs in config.needs),
            ),
            ranks,
        )
    except ValueError as error:  # weights that the sources cannot have
        paths = ", ".join(str(source.path) for source in config.samples)
        raise StageError(f"samples: {error}", f"the sources are {paths}", 2) from error


def _fields(config: AnswerTrainingConfig) -> frozenset[str]:
    return frozenset().union(*(needs.fields for needs in config.needs))


def _train_preferences(config: PreferenceConfig, context: Context) -> dict[str, Any]:
    ranks, frozen_weights = context.ranks, FrozenWeights(config, context)
    records = find_records(config, STAGE_NAME, context, config.pictures is not None)
    torch.manual_seed(config.seed)  # an adapter begins at random
    policy = load_policy(
        config.start,
        config.trained,
        config.lora,
        config.reference,
        config.needs_reference,
        required(config.max_tokens),
        config.pictures,
    )
    critic = None
    if config.critic is not None:
        critic = CriticModel.begin(config, required(config.max_tokens))
        policy.check_reader(critic.policy, "critic")
    _shrink_frozen(frozen_weights, policy, critic, records)
    policy.root.to(default_device())
    if critic is not None:
        critic.root.to(default_device())
    for frozen in policy.frozen.values():
        place_frozen(frozen, config.reference_placement, ranks, default_device())
    steps = make_steps(config, policy, records, ranks)
    answers = _eval_answers(config, policy, steps, context)
    ptx = supervised_maker(
        config.ptx, policy, required(config.batch_size), required(config.max_tokens), config.seed,
        records.set_aside, context,
    )  # fmt: skip
    critic_root = None if critic is None else critic.root
    task = PreferenceTask(
        PreferenceParts(
            policy=policy,
            steps=steps,
            terms=config.terms,
            set_aside=records.set_aside,
            ranks=ranks,
            folder=context.folder,
            eval_answers=answers,
            critic=critic_root,
            ptx=ptx,
        )
    )
    rules = () if config.critic is None else config.critic.rules(required(config.learning_rate))
    loop = config.loop_config(
        config.steps_for(records.trained / required(config.batch_size)),
        evaluations=config.evaluations,
        rules=(*config.rules, *rules),
    )
    figures = train(task, loop, context.folder, context, task.device)
    if ranks.first:
        _save_preference_policy(config, context, frozen_weights)
        frozen_weights.compare_saved_policy(policy)
    ranks.barrier()
    return {**figures, **frozen_weights.figures(), **records.counts()}


def _shrink_frozen(
    frozen: FrozenWeights, policy: Policy[Any, Any, Any], critic: CriticModel | None, records: Records
) -> None:
    """Store frozen weights as the settings say; answers of the first records tell what that does to logits."""
    samples = first_records(records.sources, records.usable, COMPARED_SAMPLES)
    frozen.shrink_policy(policy, samples, [] if critic is None else [critic.root])


def _eval_answers(
    config: PreferenceConfig, policy: Policy[Any, Any, Any], steps: StepMaker[Any, Any, Any], context: Context
) -> EvalAnswers | None:
    """Pick the prompts that evaluations answer, and have the model answer them once before it is trained."""
    if not config.eval_answers or not steps.held_out_places():
        return None
    speaker, whole_copy, ranks = None, None, context.ranks
    if ranks.world > 1 and config.strategy in ("fsdp2", "zero2", "zero3"):
        if ranks.first:
            speaker = untrained_copy(policy, config.start, required(config.max_tokens))
        whole_copy = WholeCopy(
            plain_model(policy.root), None if speaker is None else plain_model(speaker.root)
        )
    answers = EvalAnswers(policy, steps, config.eval_answers, context.folder, ranks, speaker, whole_copy)
    answers.begin()
    return answers


def _save_preference_policy(config: PreferenceConfig, context: Context, frozen: FrozenWeights) -> None:
    """Write the weights that the loop left, through a policy made anew: the trained one may be spread over ranks."""
    weights = trained_weights(context.folder, "policy")
    with frozen.begun_again():
        fresh = load_policy(config.start, config.trained, config.lora, pictures=config.pictures)
        critic = None if config.critic is None else CriticModel.begin(config, required(config.max_tokens))
    root = fresh.root if critic is None else ActorCritic(fresh.root, critic.root)
    load_trained(root, weights, frozen.are_small)
    if critic is not None:
        critic.save(context.folder / "critic")
    fresh.save(context.folder)
