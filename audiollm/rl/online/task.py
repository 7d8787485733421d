"""Training of a policy on its own fresh answers: a `Task` of the training loop.

A step: prompts ─▶ rollouts (behaviour) ─▶ rewards ─▶ old, and the critic's values, in a pass without gradient
─▶ advantages ─▶ updates (current, reference). Every sum over the step is over all packs and ranks before anything is
divided by it.

Shapes: T tokens of a pack, flat; A answers of a pack.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from audiollm.errors import BadSample
from audiollm.families.logprobs.answers import AnswerLogprobs
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policy import Policy
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.recipe.stages import required
from audiollm.rl.critic.model import ActorCritic, Critic
from audiollm.rl.online.evaluation import HeldOutEvaluations, step_alarms, step_figures
from audiollm.rl.online.fresh_losses import PackLogprobs, StepLoss, fresh_loss
from audiollm.rl.online.progress import (
    EntropyBounds,
    SkippedSteps,
)
from audiollm.rl.online.prompts import PromptMaker
from audiollm.rl.online.refill import SamplesSteps
from audiollm.rl.online.rollout_files import GreedyAnswerFiles, RolloutFiles, answer_token_figures
from audiollm.rl.online.rollout_packs import RolloutPack, RolloutPacker
from audiollm.rl.online.rollout_step import RolloutStep, failed_reward
from audiollm.rl.online.scored_packs import (
    AdvantageMaker,
    ScoredPack,
    counted_entropies,
    fresh_answers,
    mean_entropy,
    step_counts,
)
from audiollm.rl.online.settings import PolicyTrainingConfig
from audiollm.rl.online.weight_copies import ReferenceRefresh, SampledWeights, SamplesAhead
from audiollm.rl.placement.scoring_actors import ReferenceActors
from audiollm.rl.policy_gradient.corrections import ImportanceWeights
from audiollm.rl.policy_gradient.kl import KLController
from audiollm.rl.policy_gradient.losses import Regularizers, StepCounts
from audiollm.rl.policy_gradient.rollout_batch import RolloutLogprobs
from audiollm.rl.preference.ptx import SupervisedMaker, SupervisedPacks
from audiollm.train.loop.task import PHASE_PREFIX, Board, Update


class PackedStep(NamedTuple):
    """This rank's answers of a step, and the packs that they are trained in."""

    rollout_step: RolloutStep
    packs: list[RolloutPack]
    supervised: SupervisedPacks | None = None


@dataclass(frozen=True)
class PolicyParts:
    """Model, data, sampler and controllers of a training on fresh answers."""

    policy: Policy[Any, Any, Any]
    prompts: PromptMaker
    """Step -> this rank's prompts."""
    maker: SamplesSteps
    """Samples and rewards answers, with the weights of now where `ahead` is None."""
    files: RolloutFiles
    """Where the answers of each step are written."""
    controller: KLController
    """The weight of the KL; its buffers are the state of the task."""
    set_aside: SetAside
    ranks: Ranks = ALONE
    audio_controller: KLController | None = None
    """The weight of the KL of codes of speech; None: `controller` has all tokens."""
    weights: SampledWeights | None = None
    """The weights that `maker` samples from; None: the policy's own."""
    critic: Critic | None = None
    """Trained beside the policy, in one root with it; None: the policy alone is trained."""
    ptx: SupervisedMaker | None = None
    """The supervised samples of each step; None: there are none."""
    answers: GreedyAnswerFiles | None = None
    """Where the answers to held-out prompts are written at every evaluation; None: nowhere."""
    refresh: ReferenceRefresh | None = None
    """Refreshes the reference; None: it stays as it is."""
    ahead: SamplesAhead | None = None
    """Keeps the weights that `maker` samples from, and has it sample the next step."""
    greedy_maker: SamplesSteps | None = None
    """Samples from the weights of now in evaluations; None: `maker` does."""
    reference: ReferenceActors | None = None
    """Computes the reference's log-probabilities; None: the policy does, where they are needed."""


@dataclass
class StepUpdate:
    """One optimizer step on the answers of a step."""

    scored: Sequence[ScoredPack]
    supervised: SupervisedPacks | None
    counts: StepCounts
    loss: StepLoss
    began: float
    """Time at which the step's first update began."""
    is_first: bool
    """In the first update, old is current: its ratios are exactly 1."""
    first_passes: list[AnswerLogprobs]
    """The packs' log-probabilities where their gradient is at hand; they are taken out as they are used."""
    step_figures: Mapping[str, float | Tensor]
    """Figures of the whole step; those of its first update have them."""
    figures: dict[str, float | Tensor] = field(default_factory=dict)
    """Complete when the last loss is drawn."""


class PolicyTask:
    """A `Task` over rollouts."""

    def __init__(self, config: PolicyTrainingConfig, parts: PolicyParts) -> None:
        self._config, self._parts = config, parts
        self._policy, self._ranks = parts.policy, parts.ranks
        root = parts.policy.root
        self._trained: nn.Module = root if parts.critic is None else ActorCritic(root, parts.critic)
        self._root = self._trained
        self.device = next(root.parameters()).device
        self._pack = RolloutPacker(
            parts.policy, parts.set_aside, parts.ranks, required(config.max_tokens), self.device
        )
        self._first_request = TokenRequest(
            config.needs_reference and parts.reference is None,
            config.temperature,
            entropy=True,
            value=config.reads_values,
        )
        self._make_advantages = AdvantageMaker(config, parts.ranks, self._kl_weight)
        self._loss = fresh_loss(config, parts.ranks)
        self._request = self._loss.request(config.temperature)
        self._skips = SkippedSteps(config.max_skipped_steps)
        self._entropy = EntropyBounds()
        self._failed_reward: BadSample | None = None
        self.evaluations = HeldOutEvaluations(
            config,
            parts.prompts,
            parts.greedy_maker or parts.maker,
            parts.weights,
            parts.answers,
            parts.set_aside,
            parts.ranks,
        )
        """Called before the loop (`begin`), and for the outcome of the training."""

    def modules(self) -> dict[str, nn.Module]:
        modules: dict[str, nn.Module] = {
            "policy": self._trained,
            "controller": self._parts.controller,
            "skips": self._skips,
            "entropy": self._entropy,
        }
        if self._parts.audio_controller is not None:
            modules["audio_controller"] = self._parts.audio_controller
        if self._parts.refresh is not None:
            modules["reference"] = self._parts.refresh.saved
        if self._parts.ahead is not None:
            modules["ahead"] = self._parts.ahead.saved
        return {**modules, **self._loss.modules()}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        self._root = modules["policy"]

    def read_by(self, read: Callable[[Tensor], Tensor]) -> None:
        """See `ReadsWeights`: engines and the reference get the policy's weights."""
        for copy in (self._parts.weights, self._parts.refresh, self._parts.ahead):
            if copy is not None:
                copy.read_by(read)

    def draw_on(self, boards: Sequence[Board]) -> None:
        """See `DrawsOnBoards`."""
        if self._parts.answers is not None:
            self._parts.answers.draw_on(boards)

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["policy"]}

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> PackedStep:
        prompts, bad = (
            self._parts.prompts(step) if self._parts.ahead is None else self._parts.ahead.prompts(step)
        )
        began = time.monotonic()
        if self._parts.ahead is None and self._parts.weights is not None:
            self._parts.weights.fill()
        filled = time.monotonic() - began
        rollout_step = self._parts.maker(prompts, step)
        rollout_step.seconds["weights"] = filled
        self._parts.set_aside.add([*bad, *rollout_step.bad])
        self._failed_reward = failed_reward(rollout_step.bad)
        supervised = None if self._parts.ptx is None else self._parts.ptx(step)
        packs = self._pack(rollout_step, self._loss.trained_answers(rollout_step))
        return PackedStep(rollout_step, packs, supervised)

    def updates(self, batch: PackedStep, step: int, steps: int) -> Iterator[Update]:
        """As many optimizer steps as `updates` says, on the same answers; then the reference is refreshed."""
        if self._parts.ahead is not None:
            began = time.monotonic()
            self._parts.ahead.go_on(step, step + 1 >= steps)
            batch.rollout_step.seconds["weights"] += time.monotonic() - began
        yield from self._updates(batch, step)
        if self._parts.refresh is not None:
            self._parts.refresh.after(step)

    def _updates(self, batch: PackedStep, step: int) -> Iterator[Update]:
        began = time.monotonic()
        rollout_step, packs, supervised = batch
        num_supervised = 0 if supervised is None else len(supervised.batches)
        # the graph of a pack that is alone serves the first update, which would make it once more
        keeps_graph = len(packs) == 1 and self._ranks.world == 1 and self._config.fresh_objective is None
        with torch.set_grad_enabled(keeps_graph):
            passes = self._first_passes(packs)
        scored, figures = self._make_advantages(packs, [_without_gradient(answers) for answers in passes])
        first = passes if keeps_graph else []
        del passes
        has_advantages = self._config.fresh_objective is None
        per_answer = answer_token_figures(scored, len(rollout_step.rollouts), has_advantages)
        self._parts.files.write(step, rollout_step, per_answer)
        counts = step_counts(scored, self._config, self._ranks)
        loss = self._loss.of_step([fresh_answers(scored_pack) for scored_pack in scored], counts)
        figures |= {**step_figures(rollout_step.sampled, self._ranks), **rollout_step.figures}
        figures["skipped"] = float(not loss.is_trained)
        entropy = mean_entropy(counted_entropies(scored, self._config.correction), self._ranks)
        self._entropy.add(entropy)
        figures["entropy"] = entropy
        spent = {**rollout_step.seconds, "score": time.monotonic() - began}
        figures |= {f"{PHASE_PREFIX}{name}": seconds for name, seconds in spent.items()}
        figures["tokens"] = float(
            sum(len(scored_pack.answer_T) for scored_pack in scored) * (1 + self._config.updates)
        )
        self._skips.count(not loss.is_trained, len(rollout_step.rollouts))
        if not loss.is_trained:
            yield Update((), figures, losses=0)
            return
        began = time.monotonic()
        for number in range(self._config.updates):
            update = StepUpdate(
                scored=scored,
                supervised=supervised,
                counts=counts,
                loss=loss,
                began=began,
                is_first=not number,
                first_passes=first if not number else [],
                step_figures=figures if not number else {},
            )
            yield Update(self._losses(update), update.figures, losses=num_supervised + len(scored))
            if not number and self._config.kl is not None and "kl" in update.figures:
                self._update_controllers(update.figures, sum(self._ranks.gather(len(rollout_step.rollouts))))

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Mean rewards of greedy answers to the held-out prompts, and their length."""
        return self.evaluations.evaluate(step)

    def stop_reason(self, step: int) -> str | None:
        """See `StopsEarly`: the policy has collapsed."""
        return self.evaluations.stop_reason(step, self._entropy)

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        """Alarms of a step, of the policy's entropy, and of the held-out rewards."""
        alarms = dict(self.evaluations.alarms(figures, step))
        if bound := self._entropy.alarm():
            alarms["entropy"] = bound
        return {**alarms, **dict(step_alarms(self._config, figures, self._failed_reward))}

    def _update_controllers(self, figures: Mapping[str, float | Tensor], answers: int) -> None:
        """Let the controllers follow the KL of the step: of all tokens, or of text and of speech."""
        if self._parts.audio_controller is None:
            self._parts.controller.update(float(figures["kl"]), answers)
            return
        self._parts.controller.update(float(figures["kl_text"]), answers)
        self._parts.audio_controller.update(float(figures["kl_audio"]), answers)

    def _kl_weight(self, is_code_T: Tensor | None) -> float | Tensor:
        """The weight of the KL: of all tokens, or `[T]` where speech has one of its own."""
        weight = float(self._parts.controller.coefficient)
        if self._parts.audio_controller is None or is_code_T is None:
            return weight
        of_audio = float(self._parts.audio_controller.coefficient)
        return weight + (of_audio - weight) * is_code_T.double()

    def _first_passes(self, packs: Sequence[RolloutPack]) -> list[AnswerLogprobs]:
        """Every pack before the updates on it; reference actors compute meanwhile."""
        if self._parts.reference is None:
            return [self._first_pass(pack) for pack in packs]
        request = self._parts.reference.ask([pack.batch.to(torch.device("cpu")) for pack in packs])
        passes = [self._first_pass(pack) for pack in packs]
        return [
            replace(answers, reference_T=value_T.to(answers.policy_T))
            for answers, value_T in zip(passes, self._parts.reference.answers(request), strict=True)
        ]

    def _first_pass(self, pack: RolloutPack) -> AnswerLogprobs:
        """Old, the reference, and the critic's values."""
        return self._policy.answer_logprobs(self._root, pack.batch, self._first_request)

    def _losses(self, update: StepUpdate) -> Iterator[Tensor]:
        """The loss of each pack; when the last is drawn, `update.figures` has the figures of the whole step.

        Supervised packs come first: a critic has no part in their loss, and ranks meet in the last backward pass, which
        must reach every trained weight.
        """
        if update.supervised is not None:
            yield from update.supervised.losses(self._policy, self._root, self._ranks, update.figures)
        sums: dict[str, Tensor] = {}
        counts = replace(update.counts, sums=update.counts.sums.to(self.device))
        for number, pack in enumerate(update.scored):
            pack_loss = update.loss(self._pack_logprobs(update, number, pack, counts))
            for name, value in pack_loss.sums.items():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value.cpu()
            yield pack_loss.loss
        names = sorted(sums)
        total = self._ranks.sum(torch.stack([sums[name] for name in names]))
        means = update.loss.means(dict(zip(names, total.tolist(), strict=True)), update.counts)
        if "kl" in means:
            means["kl_weight"] = float(self._parts.controller.coefficient)
            if self._parts.audio_controller is not None:
                means["kl_weight_audio"] = float(self._parts.audio_controller.coefficient)
        seconds = time.monotonic() - update.began
        update.figures.update({**update.step_figures, **means, f"{PHASE_PREFIX}update": seconds})

    def _pack_logprobs(
        self, update: StepUpdate, number: int, pack: ScoredPack, counts: StepCounts
    ) -> PackLogprobs:
        """Log-probabilities of a pack under the weights of now, beside what is known of its rollouts."""
        if update.first_passes:
            answers = update.first_passes.pop()
        else:
            answers = self._policy.answer_logprobs(self._root, pack.pack.batch, self._request)
        tokens = RolloutLogprobs(
            answers.policy_T,
            answers.answer_T,
            len(pack.pack.places),
            pack.advantage_T.to(self.device),
            old_T=None if update.is_first else pack.old_T.to(self.device),
            reference_T=None if pack.reference_T is None else pack.reference_T.to(self.device),
            entropy_T=answers.entropy_T,
            kept_T=pack.kept_T.to(self.device),
            correction=_on(pack.correction, self.device) if self._config.correction else None,
            is_code_T=answers.is_code_T if self._config.answer != "text" else None,
            old_entropy_T=pack.entropy_T.to(self.device),
        )
        weight = self._kl_weight(answers.is_code_T)
        regularizers = Regularizers(self._config.kl, weight, self._config.entropy_weight)
        values = None if pack.values is None else pack.values.to(self.device)
        return PackLogprobs(number, answers, tokens, counts, regularizers, values)


def _without_gradient(answers: AnswerLogprobs) -> AnswerLogprobs:
    """Return the log-probabilities, entropies and values without their graph."""
    entropy_T, value_T = answers.entropy_T, answers.value_T
    return AnswerLogprobs(
        answers.policy_T.detach(),
        answers.answer_T,
        answers.num_answers,
        answers.reference_T,
        entropy_T=None if entropy_T is None else entropy_T.detach(),
        value_T=None if value_T is None else value_T.detach(),
        codebook_T=answers.codebook_T,
    )


def _on(weights: ImportanceWeights, device: torch.device) -> ImportanceWeights:
    return ImportanceWeights(
        weights.weight_T.to(device),
        weights.log_weight_A.to(device),
        weights.kept_T.to(device),
        weights.figures,
    )
