"""The work of the stage `train_policy`. Called on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from audiollm.data.hearing.features import MISSING_ROWS
from audiollm.data.records.mixture import StepDraws
from audiollm.data.records.opening import open_source
from audiollm.data.records.step_records import first_records
from audiollm.data.text.tokenizer import TRAINED_FILE
from audiollm.devices import default_device
from audiollm.errors import BadSample, StageError
from audiollm.evaluate.judges.choosing import recognizer_digest
from audiollm.families import registry
from audiollm.families.frozen_weights import FrozenWeights
from audiollm.families.policies import load_policy, plain_model, untrained_copy
from audiollm.families.policy import Policy
from audiollm.families.rollout import RolloutEngine, RolloutSettings
from audiollm.families.target_logits import COMPARED_SAMPLES
from audiollm.files.atomic import read_json, write_json
from audiollm.models.frozen.shrink import load_trained
from audiollm.models.hub import is_language_model
from audiollm.recipe.ranks import Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.rl.critic.model import ActorCritic, CriticModel
from audiollm.rl.online.progress import training_outcome
from audiollm.rl.online.prompts import PromptMaker
from audiollm.rl.online.refill import SamplesSteps, maker_of
from audiollm.rl.online.rollout_files import GreedyAnswerFiles, RolloutFiles
from audiollm.rl.online.settings import KLChoice, PolicyTrainingConfig
from audiollm.rl.online.task import PolicyParts, PolicyTask
from audiollm.rl.online.weight_copies import ReferenceRefresh, SampledWeights, SamplesAhead
from audiollm.rl.placement.pool import Joined, joined_cluster
from audiollm.rl.placement.rollout_actors import RolloutActors, SampledModel
from audiollm.rl.placement.scoring_actors import ReferenceActors, ReferenceModel, placed_rewards
from audiollm.rl.policy_gradient.kl import kl_controller
from audiollm.rl.preference.ptx import supervised_maker
from audiollm.rl.preference.run import errors_of_stage
from audiollm.rl.rewards.registry import check_rewards, load_rewards
from audiollm.rl.rewards.scoring import RewardSuite
from audiollm.rl.rewards.settings import WordsSettings
from audiollm.rl.rollouts.engines import CheckedRollouts, check_engine, load_engine
from audiollm.rl.rollouts.process import ProcessRollouts
from audiollm.rl.rollouts.settings import EngineChoice
from audiollm.supervised.corpus.sources import set_aside_of
from audiollm.supervised.eval_audio import SHARDING
from audiollm.train.loop.checkpoint import trained_weights
from audiollm.train.loop.loop import train
from audiollm.train.loop.whole import WholeCopy, unmerged_tensors


@dataclass(frozen=True)
class SamplingParts:
    """What samples and rewards the steps of a training are made from, beside an engine."""

    sampler: Policy[Any, Any, Any]
    """The policy of the engine's model."""
    settings: RolloutSettings
    prompts: PromptMaker
    ranks: Ranks


MakesSamplers = Callable[[RolloutEngine[Any], SamplingParts], SamplesSteps]
"""Makes what samples and rewards the steps of a training with an engine."""


def train_policy(
    config: PolicyTrainingConfig, context: Context, make: MakesSamplers | None = None
) -> dict[str, Any]:
    """Train a policy on its own answers to the prompts, and save it to `model` (and `adapter`, where one is trained).

    A critic is saved to `critic/model`.

    Args:
        make: what samples and rewards the steps; None: answers are rewarded by `config.rewards`.

    Raises:
        StageError: settings that do not fit the model, no prompt, or a bad one where `strict` is set.
    """
    with errors_of_stage():
        check_engine(config.rollouts, config.start)  # before any work
        with joined_cluster(config.placement, context.ranks, context.say) as joined:
            return _train_policy(config, context, make, joined)


def _train_policy(
    config: PolicyTrainingConfig, context: Context, make: MakesSamplers | None, joined: Joined | None
) -> dict[str, Any]:
    ranks, frozen_weights = context.ranks, FrozenWeights(config, context)
    roles = {} if joined is None else joined.choice.shares
    torch.manual_seed(config.seed)  # an adapter begins at random
    policy = load_policy(
        config.start,
        config.trained,
        config.lora,
        config.reference,
        config.needs_reference and "reference" not in roles,
        required(config.max_tokens),
    )
    critic = None
    if config.critic is not None:
        critic = CriticModel.begin(config, required(config.max_tokens))
        policy.check_reader(critic.policy, "critic")
    if config.refresh_reference is not None and config.trained == "adapter":
        policy.hold_to(untrained_copy(policy, config.start, required(config.max_tokens)).root)
    sources = [open_source(source.path) for source in config.samples]
    set_aside = set_aside_of(context.folder, config.kind, ranks, config.strict)
    draws = StepDraws(required(config.batch_size), config.seed, config.weights)
    with context.progress("reading prompts", sum(map(len, sources))) as bar:
        prompts = PromptMaker(policy, sources, draws, set_aside, ranks, lambda: bar.advance(bar.task_ids[0]))
    if config.answer == "text" and config.ptx is None:
        if config.trained == "all":
            policy.freeze_unreached(any(sample.audio_parts() for sample in prompts.samples))
        if ranks.world == 1 and config.refresh_reference is None:
            policy.share_frozen()
    frozen_weights.shrink_policy(
        policy,
        first_records(sources, prompts.usable, COMPARED_SAMPLES),
        [] if critic is None else [critic.root],
        config.refresh_reference is not None,
    )
    for model in (policy.root, *policy.frozen.values(), *([] if critic is None else [critic.root])):
        model.to(default_device())
    if not prompts.trained:
        raise StageError("no record of the train split can be asked", set_aside.remedy(), 2)
    if problem := prompts.missing_codes():
        raise _missing_codes_error(config.start, problem)
    if config.keep_best and not prompts.held_out:
        raise StageError(
            "keep_best is set, and no prompt is held out that could tell the best weights",
            "hold samples out (metadata `split: test`; `audiollm convert --held-out 0.1`), or set keep_best: false",
            2,
        )
    ptx = supervised_maker(
        config.ptx,
        policy,
        required(config.batch_size),
        required(config.max_tokens),
        config.seed,
        set_aside,
        context,
    )
    if config.answer != "text" and not policy.num_codebooks:
        raise StageError(f"answer: {config.answer}, and this model answers in text", "set answer: text", 2)
    books = policy.num_codebooks
    if config.codebooks is not None and books and config.codebooks > books:
        raise StageError(f"codebooks: {config.codebooks} of a model of {books}", f"at most {books}", 2)
    make = make or _by_rewards(config, prompts, context, joined)
    settings = RolloutSettings(
        config.seed, 0, config.temperature, config.answer, config.max_answer_tokens, config.max_frames
    )
    sampler, whole_copy = policy, None
    if ranks.world > 1 and config.strategy in SHARDING:
        device = torch.device("cpu") if "rollout" in roles else None  # actors get it from there
        sampler = untrained_copy(policy, config.start, required(config.max_tokens), device)
        whole_copy = WholeCopy(plain_model(policy.root), plain_model(sampler.root))
    sampling = SamplingParts(sampler, settings, prompts, ranks)
    engine = _engine(config, sampler, joined)
    maker = make(engine, sampling)
    kl = config.kl or KLChoice()
    rules = () if config.critic is None else config.critic.rules(required(config.learning_rate))
    loop = config.loop_config(
        config.steps_for(prompts.trained / required(config.batch_size)),
        evaluations=config.evaluations,
        best="reward" if config.keep_best else "",
        best_is="higher",
        log_every=1,
        rules=(*config.rules, *rules),
    )
    with _engine_ahead(config, policy) as early_engine, _closing(engine):
        ahead, early = None, maker
        if early_engine is not None:
            early = make(early_engine, sampling)
            ahead = SamplesAhead(plain_model(policy.root), early_engine, prompts, early)
        parts = PolicyParts(
            policy=policy,
            prompts=prompts,
            maker=early,
            files=RolloutFiles(context.folder / "rollouts", ranks, policy.pieces),
            controller=kl_controller(kl.controller.name, kl.controller.values),
            set_aside=set_aside,
            ranks=ranks,
            audio_controller=None if kl.audio is None else kl_controller(kl.audio.name, kl.audio.values),
            weights=SampledWeights(engine, whole_copy),
            critic=None if critic is None else critic.root,
            ptx=ptx,
            answers=GreedyAnswerFiles(context.folder, ranks),
            refresh=_refresh(config, policy),
            ahead=ahead,
            greedy_maker=maker,
            reference=_reference_actors(config, policy, joined),
        )
        task = PolicyTask(config, parts)
        task.evaluations.begin(context.say)
        figures = train(task, loop, context.folder, context, task.device)
        changes = task.evaluations.changes(figures["steps"])
    if ranks.first:
        _save_policy(config, context.folder, frozen_weights)
        _record_reward_recognizers(config, context.folder / "model" / TRAINED_FILE)
        frozen_weights.compare_saved_policy(policy)
    ranks.barrier()
    outcome = training_outcome(changes, figures.get("best_step"), figures.get("stopped"))
    for warning in outcome.get("warnings", ()):
        context.say(warning)
    counts = {"prompts": prompts.trained, "held_out_prompts": prompts.held_out}
    return {**figures, **frozen_weights.figures(), **outcome, **counts, "set_aside": len(set_aside.rows)}


def _engine(
    config: PolicyTrainingConfig, sampler: Policy[Any, Any, Any], joined: Joined | None
) -> RolloutEngine[Any]:
    """The engine that samples from a policy's weights, in this process or in actors."""
    if joined is None or "rollout" not in joined.choice.shares:
        return load_engine(sampler, config.start, config.rollouts)
    model = SampledModel(config.start, required(config.max_tokens), config.rollouts, str(Path.cwd()))
    return RolloutActors(joined, model, plain_model(sampler.root))


def _missing_codes_error(start: Path, problem: BadSample) -> StageError:
    """The error of recordings without what the model reads: codes, or rows of streams; or it has heard nothing yet."""
    if problem.kind == MISSING_ROWS:
        return StageError("the prompts' recordings have no rows that the model reads", str(problem), 2)
    if not is_language_model(start):
        return StageError("the prompts' recordings have no codes, and the model reads codes", str(problem), 2)
    return StageError(
        f"start: {start} is a language model that hears nothing, and the prompts have recordings",
        "begin from a model that hears: a published audio LLM, or this one after training with an audio encoder "
        "(recipes/understanding/full.yaml language_model=FOLDER encoder=FOLDER)",
        2,
    )


@contextmanager
def _closing(engine: RolloutEngine[Any]) -> Iterator[None]:
    """End an engine that has a process of its own at the end."""
    try:
        yield
    finally:
        if isinstance(engine, CheckedRollouts):
            engine.close()


def _reference_actors(
    config: PolicyTrainingConfig, policy: Policy[Any, Any, Any], joined: Joined | None
) -> ReferenceActors | None:
    """The reference in actors, where it is placed there; a folder of its own must read the policy's batches."""
    if joined is None or "reference" not in joined.choice.shares:
        return None
    if config.reference is not None:
        policy.check_reader(load_policy(config.reference), "reference")
    model = ReferenceModel(
        config.reference or config.start,
        required(config.max_tokens),
        config.temperature,
        config.precision,
        str(Path.cwd()),
    )
    return ReferenceActors(joined, model)


def _by_rewards(
    config: PolicyTrainingConfig, prompts: PromptMaker, context: Context, joined: Joined | None
) -> MakesSamplers:
    """Answers are rewarded by `config.rewards`, in this process or in actors."""
    terms = config.reward_terms
    check_rewards(terms, prompts.samples, config.answer != "text")
    place = (terms, context.folder, context.ranks.rank)
    if joined is None or "reward" not in joined.choice.shares:
        functions = load_rewards(*place)
    else:
        functions = placed_rewards(joined, *place)
    rewards = RewardSuite(terms, functions, config.reward_timeout_s, config.on_error)
    codec = None
    if config.codec is not None or any(term.speech for term in terms):
        codec = registry.load_speech_generator(config.start, config.codec).codec

    def make(engine: RolloutEngine[Any], parts: SamplingParts) -> SamplesSteps:
        return maker_of(
            config, engine, parts.sampler, rewards, parts.settings, parts.prompts, parts.ranks, codec
        )

    return make


def _refresh(config: PolicyTrainingConfig, policy: Policy[Any, Any, Any]) -> ReferenceRefresh | None:
    """What refreshes the reference, where it is asked for."""
    choice = config.refresh_reference
    if choice is None:
        return None
    reference = plain_model(policy.frozen["reference"])
    return ReferenceRefresh(plain_model(policy.root), reference, choice.every, choice.mix)


@contextmanager
def _engine_ahead(
    config: PolicyTrainingConfig, policy: Policy[Any, Any, Any]
) -> Iterator[ProcessRollouts[Any] | None]:
    """The engine of `ahead: 1`, in a process of its own; on a CPU, each process has half of the threads."""
    if not config.ahead:
        yield None
        return
    threads = torch.get_num_threads()
    beside = max(1, threads // 2)
    on_cpu = default_device().type == "cpu"
    gpu = None if on_cpu else torch.cuda.current_device()
    load = partial(load_sampling, config.start, required(config.max_tokens), config.rollouts)
    engine = ProcessRollouts[Any](
        load, unmerged_tensors(plain_model(policy.root)), beside if on_cpu else threads, gpu
    )
    try:
        if on_cpu:
            torch.set_num_threads(max(1, threads - beside))
        yield engine
    finally:
        torch.set_num_threads(threads)
        engine.close()


def load_sampling(
    model: Path, max_tokens: int, rollouts: EngineChoice | None = None
) -> tuple[nn.Module, RolloutEngine[Any]]:
    """Load a model that samples and is not trained, on its device; return it, and its engine.

    Args:
        rollouts: vLLM, SGLang, or a user's engine; None: that of the model's family.
    """
    policy = load_policy(model, max_tokens=max_tokens)
    policy.root.requires_grad_(False).to(default_device())
    return plain_model(policy.root), load_engine(policy, model, rollouts)


def _record_reward_recognizers(config: PolicyTrainingConfig, path: Path) -> None:
    """Write down which recognizers gave rewards, so that reports can say that they judge their own pupil."""
    recognizers = [
        recognizer
        for term in config.reward_terms
        if isinstance(term.settings, WordsSettings)
        for recognizer in term.settings.recognizers
    ]
    digests = [digest for digest in map(recognizer_digest, recognizers) if digest is not None]
    if not digests:
        return
    trained = read_json(path) if path.exists() else {}
    trained["recognizers"] = {**(trained.get("recognizers") or {}), **dict.fromkeys(digests, "rewards")}
    write_json(path, trained)


def _save_policy(config: PolicyTrainingConfig, folder: Path, frozen: FrozenWeights) -> None:
    """Write the policy that a run ended with to `folder`, and its critic to `folder/critic`."""
    weights = trained_weights(folder, "policy")
    with frozen.begun_again():
        policy = load_policy(config.start, config.trained, config.lora)
        critic = None if config.critic is None else CriticModel.begin(config, required(config.max_tokens))
    root = policy.root if critic is None else ActorCritic(policy.root, critic.root)
    load_trained(root, weights, frozen.are_small)
    if critic is not None:
        critic.save(folder / "critic")
    policy.save(folder)
