"""Training of a policy on its own fresh answers: a `Task` of the training loop.

A step: prompts ─▶ rollouts (behaviour) ─▶ rewards ─▶ old, and the critic's values, in a pass without gradient
─▶ advantages ─▶ updates (current, reference). Every sum over the step is over all packs and ranks before anything is
divided by it.

Shapes: T tokens of a pack, flat; A answers of a pack.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from audiollm.errors import BadSample
from audiollm.families.logprobs.answers import AnswerLogprobs
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policy import Policy
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.rl.critic.model import ActorCritic, Critic
from audiollm.rl.online.entropies import mean_entropy, step_threshold
from audiollm.rl.online.fresh_losses import PackLogprobs, StepLoss, fresh_loss
from audiollm.rl.online.progress import (
    REWARD_PREFIX,
    EntropyBounds,
    HeldOutChange,
    SkippedSteps,
    StartMeasure,
    changes_since_start,
    collapse,
    reward_means,
)
from audiollm.rl.online.prompts import PromptMaker
from audiollm.rl.online.refill import SamplesSteps
from audiollm.rl.online.rollout_files import GreedyAnswerFiles, RolloutFiles
from audiollm.rl.online.rollout_step import RolloutStep, failed_reward, group_numbers, selected_answers
from audiollm.rl.online.scored_packs import (
    AdvantageMaker,
    RolloutPack,
    ScoredPack,
    counted_tokens,
    fresh_answers,
    sum_of,
)
from audiollm.rl.online.settings import PolicyTrainingConfig
from audiollm.rl.online.weight_copies import ReferenceRefresh, SampledWeights, SamplesAhead
from audiollm.rl.placement.scoring_actors import ReferenceActors
from audiollm.rl.policy_gradient.corrections import ImportanceWeights
from audiollm.rl.policy_gradient.kl import KLController
from audiollm.rl.policy_gradient.losses import Regularizers, StepCounts
from audiollm.rl.policy_gradient.reward_shaping import (
    groups_without_variance,
)
from audiollm.rl.policy_gradient.rollout_batch import RolloutLogprobs
from audiollm.rl.policy_gradient.settings import (
    KLSettings,
)
from audiollm.rl.preference.ptx import SupervisedMaker, SupervisedPacks
from audiollm.train.loop.task import PHASE_PREFIX, Update

MAX_START_PROMPTS = 16
"""Prompts whose sampled answers tell whether the start is fit to begin, at most."""


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
        self._greedy_maker = parts.greedy_maker or parts.maker
        self._rewards = {term.name: term.weight for term in config.reward_terms}
        root = parts.policy.root
        self._trained: nn.Module = root if parts.critic is None else ActorCritic(root, parts.critic)
        self._root = self._trained
        self._kl: KLSettings | None = config.kl
        self._make_advantages = AdvantageMaker(config, parts.ranks, self._kl_weight)
        self._loss = fresh_loss(config, parts.ranks)
        self._skips = SkippedSteps(config.max_skipped_steps)
        self._entropy = EntropyBounds()
        self._start: StartMeasure | None = None
        self._start_figures: Mapping[str, float] | None = None
        self._failed_reward: BadSample | None = None
        self.device = next(root.parameters()).device

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

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["policy"]}

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> PackedStep:
        prompts, bad = (
            self._parts.prompts(step) if self._parts.ahead is None else self._parts.ahead.prompts(step)
        )
        began = time.monotonic()
        if self._parts.ahead is None:
            self._fill()
        filled = time.monotonic() - began
        rollout_step = self._parts.maker(prompts, step)
        rollout_step.seconds["weights"] = filled
        self._parts.set_aside.add([*bad, *rollout_step.bad])
        self._failed_reward = failed_reward(rollout_step.bad)
        supervised = None if self._parts.ptx is None else self._parts.ptx(step)
        return PackedStep(rollout_step, self._packs(rollout_step), supervised)

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
        self._parts.files.write(step, rollout_step, self._per_answer(scored, len(rollout_step.rollouts)))
        counts = self._counts(scored)
        loss = self._loss.of_step([fresh_answers(scored_pack) for scored_pack in scored], counts)
        figures |= {**self._figures_of(rollout_step.sampled), **rollout_step.figures}
        figures["skipped"] = float(not loss.is_trained)
        entropy = mean_entropy(self._entropies(scored), self._ranks)
        self._entropy.add(entropy)
        figures["entropy"] = entropy
        spent = {**rollout_step.seconds, "score": time.monotonic() - began}
        figures |= {f"{PHASE_PREFIX}{name}": seconds for name, seconds in spent.items()}
        figures["tokens"] = float(
            sum(len(scored_pack.answer_T) for scored_pack in scored) * (1 + self._config.updates)
        )
        self._skips.count(not loss.is_trained)
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
            if not number and self._kl is not None and "kl" in update.figures:
                self._update_controllers(update.figures, int(self._total(len(rollout_step.rollouts))))

    def begin(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Answer the held-out prompts with the model that the training begins from, as step 0, and measure its rewards.

        A resumed run has done so. Called on every rank, before the loop.

        Args:
            say: told of the start's rewards, and whether the policy is fit to begin.
        """
        if self._parts.answers is None:
            return
        if not self._parts.answers.has_begun:
            self._start_figures = self.evaluate(0)
        self._start = self._parts.answers.start
        if self._start is None:
            self._start = self._measured_start()
            self._parts.answers.write_start(self._start)
            say(self._start.text())
            if fault := self._start.fault(self._learns_from_differences):
                say(fault)

    @torch.no_grad()
    def _measured_start(self) -> StartMeasure:
        """Rewards of greedy and of sampled answers; without held-out prompts, to those of the first step."""
        prompts, _ = self._parts.prompts.held_out_prompts(min(MAX_START_PROMPTS, self._config.eval_prompts))
        is_held_out = self._parts.prompts.held_out > 0
        if not is_held_out:
            prompts, _ = self._parts.prompts(0)
        self._fill()
        sampled = self._greedy_maker.sampled(prompts, 0)
        greedy = self._start_figures
        if greedy is None or not is_held_out:
            greedy = self._means(self._rows_of(self._greedy_maker.greedy(prompts, 0)))
        figures = self._figures_of(sampled)
        flat = figures.pop("groups_without_variance")
        count = int(self._total(len(prompts)))
        return StartMeasure(reward_means(greedy), reward_means(figures), flat, count, is_held_out)

    @torch.no_grad()
    def evaluate(self, step: int) -> Mapping[str, float]:
        """Mean rewards of greedy answers to the held-out prompts, and their length."""
        if not step and self._start_figures is not None:
            return self._start_figures
        prompts, bad = self._parts.prompts.held_out_prompts(self._config.eval_prompts)
        self._fill()
        rollout_step = self._greedy_maker.greedy(prompts, step)
        self._parts.set_aside.add([*bad, *rollout_step.bad])
        if self._parts.answers is not None:
            self._parts.answers.write(step, rollout_step)
        return self._means(self._rows_of(rollout_step))

    def stop_reason(self, step: int) -> str | None:
        """See `StopsEarly`: the policy has collapsed."""
        return collapse(self.changes(step), self._config.patience, self._entropy)

    def changes(self, step: int) -> list[HeldOutChange]:
        """Return the changes of the held-out rewards since the start, up to a step. Called on every rank."""
        if self._parts.answers is None:
            return []
        rows: list[dict[str, Any]] = self._ranks.of_first(self._parts.answers.rows_until(step))
        return changes_since_start(rows)

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        """Tell of rewards that fail, steps that teach nothing, and answers sampled from another distribution."""
        alarms = dict(self._progress_alarms(figures, step))
        failed = self._failed_reward
        if failed is not None:
            alarms["failed reward"] = (
                f"{failed}; such answers are left out, and named in set_aside.jsonl (on_error: stop ends the run "
                "instead)"
            )
        are_equal = figures.get("groups_without_variance", 0.0) >= 1.0
        if self._learns_from_differences and are_equal and (failed is None or "reward" in figures):
            alarms["no variance"] = (
                "in every group all answers have the same reward, so the step changes nothing: take harder or easier "
                "prompts, a higher temperature, or larger groups"
            )
        if figures.get("skipped", 0.0):
            alarms["skipped"] = (
                "a step had nothing to train on, and was skipped: no answer has a reward and is kept, or the rewards "
                f"of every group are equal; {self._config.max_skipped_steps} such steps in a row end the run"
            )
        if figures.get("mismatch_kl", 0.0) > 0.01 and not self._config.ahead:
            alarms["mismatch"] = (
                f"answers are sampled from another distribution than the one that is trained (KL "
                f"{figures['mismatch_kl']:.3f} a token): set `precision: fp32`, or `correction`"
            )
        if figures.get("truncated", 0.0) > 0.5:
            alarms["truncated"] = "more than half of the answers are cut by a limit: raise max_answer_tokens"
        return alarms

    def _progress_alarms(self, figures: Mapping[str, float], step: int) -> Iterator[tuple[str, str]]:
        """Alarms of a start that is not fit, and of a policy that becomes worse than its start."""
        if self._start is not None and (fault := self._start.fault(self._learns_from_differences)):
            yield "unfit start", fault
        if bound := self._entropy.alarm():
            yield "entropy", bound
        if "evaluation/reward" not in figures or self._parts.answers is None:
            return
        changes = changes_since_start(self._parts.answers.rows_until(step))
        if not changes:
            return
        last = changes[-1]
        if last.is_clearly_below:
            yield (
                "worse than the start",
                f"the held-out reward is {last.after:.3f}, {last.before:.3f} at the start: lower the learning rate, "
                "raise kl, or train the start for more steps",
            )
        if last.lost_format:
            yield (
                "format lost",
                f"{last.format_after:.0%} of the held-out answers are well formed, {last.format_before:.0%} at the "
                "start: lower the learning rate, raise kl, or give format more weight",
            )

    @property
    def _learns_from_differences(self) -> bool:
        """Whether a group whose answers have equal rewards teaches nothing."""
        fresh = self._config.fresh_objective
        if fresh is not None:
            return fresh.kind == "pairs"
        return self._config.compares_answers and "reward_A" in self._config.advantage_term.reads

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

    def _fill(self) -> None:
        if self._parts.weights is not None:
            self._parts.weights.fill()

    # ------------------------------------------------------------------------------------------- parts of a step

    def _packs(self, rollout_step: RolloutStep) -> list[RolloutPack]:
        """Packs of whole groups; as many as the rank with the most has, at least one.

        Answers without a part in the loss are in none, nor those of groups that the policy cannot take: these are set
        aside.
        """
        trained = self._loss.trained_answers(rollout_step)
        trained_places = set(trained)
        rollout_step = selected_answers(
            rollout_step, [place in trained_places for place in range(len(rollout_step.rollouts))]
        )
        groups, fits = self._encoded(rollout_step)
        rollout_step, trained = selected_answers(rollout_step, fits), list(compress(trained, fits))
        max_tokens = self._config.max_tokens
        assert max_tokens is not None
        plans = self._policy.plan(groups, max_tokens) if groups else []
        firsts = [0]
        for group in groups:
            firsts.append(firsts[-1] + len(group))
        packs = [self._pack(rollout_step, plan, groups, firsts) for plan in plans]
        num_packs = max(1, *self._ranks.gather(len(packs)))
        packs += [self._pack(rollout_step, [], groups, firsts) for _ in range(num_packs - len(packs))]
        return [replace(pack, places=[trained[place] for place in pack.places]) for pack in packs]

    def _encoded(self, rollout_step: RolloutStep) -> tuple[list[Sequence[Any]], list[bool]]:
        """The encoded answers of the groups that the policy can take, and which of all answers are among them."""
        groups: list[Sequence[Any]] = []
        fits: list[bool] = []
        for group in rollout_step.groups:
            sampled = [rollout.tokens for rollout in group.rollouts]
            try:
                groups.append(self._policy.encode_sampled(group.prompt.prompted, sampled))
                fits += [True] * len(sampled)
            except BadSample as error:
                self._parts.set_aside.add([error.with_traceback(None)])
                fits += [False] * len(sampled)
        return groups, fits

    def _pack(
        self,
        rollout_step: RolloutStep,
        plan: Sequence[int],
        groups: Sequence[Sequence[Any]],
        firsts: Sequence[int],
    ) -> RolloutPack:
        places = [place for group in plan for place in range(firsts[group], firsts[group + 1])]
        rollouts = [rollout_step.rollouts[place] for place in places]
        encoded = [answer for group in plan for answer in groups[group]]
        none = torch.zeros(0)
        greedy = rollout_step.greedy_reward_G
        numbers = group_numbers(rollout_step)
        pack_groups = {group: number for number, group in enumerate(plan)}
        return RolloutPack(
            (self._policy.batch(encoded) if encoded else self._policy.idle_batch()).to(self.device),
            places,
            torch.tensor([pack_groups[int(numbers[place])] for place in places], dtype=torch.long),
            len(plan),
            rollout_step.reward_A[places],
            rollout_step.kept_reward_AF[places],
            None if greedy is None else greedy[list(plan)],
            torch.cat([none, *(_behaviour(rollout) for rollout in rollouts)]),
            rollout_step.truncated_A[places],
            [rollout_step.steps[place] for place in places] if rollout_step.steps else [],
        )

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
        request = TokenRequest(
            self._config.needs_reference and self._parts.reference is None,
            self._config.temperature,
            entropy=True,
            value=self._config.reads_values,
        )
        return self._policy.answer_logprobs(self._root, pack.batch, request)

    def _counts(self, scored: Sequence[ScoredPack]) -> StepCounts:
        threshold = None
        if self._config.top_entropy < 1:
            threshold = step_threshold(self._entropies(scored), self._config.top_entropy, self._ranks)
        parts = [
            StepCounts.of(
                counted_tokens(scored_pack, self._config.correction),
                scored_pack.answer_T,
                len(scored_pack.pack.places),
                None,
                scored_pack.entropy_T,
                threshold,
            ).sums
            for scored_pack in scored
        ]
        max_length = (
            self._config.max_frames if self._config.answer == "audio" else self._config.max_answer_tokens
        )
        return StepCounts(self._ranks.sum(sum_of(parts)), max_length, threshold)

    def _entropies(self, scored: Sequence[ScoredPack]) -> list[Tensor]:
        """The entropies of the tokens that count, of each pack."""
        return [
            scored_pack.entropy_T[counted_tokens(scored_pack, self._config.correction)]
            for scored_pack in scored
        ]

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
            request = self._loss.request(self._config.temperature)
            answers = self._policy.answer_logprobs(self._root, pack.pack.batch, request)
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
        regularizers = Regularizers(self._kl, weight, self._config.entropy_weight)
        values = None if pack.values is None else pack.values.to(self.device)
        return PackLogprobs(number, answers, tokens, counts, regularizers, values)

    # ------------------------------------------------------------------------------------------------- figures

    def _figures_of(self, rollout_step: RolloutStep) -> dict[str, float]:
        figures = self._means(self._rows_of(rollout_step))
        flat_G = groups_without_variance(
            rollout_step.reward_A, group_numbers(rollout_step), len(rollout_step.groups)
        )
        groups = self._total(len(rollout_step.groups))
        return {**figures, "groups_without_variance": self._total(float(flat_G.sum())) / max(1.0, groups)}

    def _rows_of(self, rollout_step: RolloutStep) -> list[dict[str, float]]:
        rows = []
        reward_AF, scores = rollout_step.reward_AF, rollout_step.scores
        for place, rollout in enumerate(rollout_step.rollouts):
            rewards = dict(zip(self._rewards, reward_AF[place].tolist(), strict=True))
            row = {f"{REWARD_PREFIX}{name}": value for name, value in rewards.items()}
            reward = scores.reported_A[place] if scores.kept_A[place] else math.nan
            row |= {"reward": reward, "truncated": float(rollout.truncated)}
            rows.append({**row, "answer_length": float(rollout.tokens.num_actions)})
        return rows

    def _means(self, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Means over the answers of all ranks, missing values left out. Called on every rank."""
        every = [row for rank_rows in self._ranks.gather(list(rows)) for row in rank_rows]
        means = {}
        for key in dict.fromkeys(key for row in every for key in row):
            values = [row[key] for row in every if row[key] == row[key]]
            if values:
                means[key] = sum(values) / len(values)
        return means

    def _per_answer(self, scored: Sequence[ScoredPack], count: int) -> list[dict[str, list[float]]]:
        """Figures of the tokens of each answer of this rank, by name, for the files of rollouts.

        Answers without a part in the loss have none; an objective on pairs or single answers has no advantages.
        """
        has_advantages = self._config.fresh_objective is None
        figures: list[dict[str, list[float]]] = [{"advantages": [], "old": []} for _ in range(count)]
        for scored_pack in scored:
            columns = {"old": scored_pack.old_T}
            if has_advantages:
                columns["advantages"] = scored_pack.advantage_T.masked_fill(~scored_pack.kept_T, 0.0)
            if scored_pack.reference_T is not None:
                columns["reference"] = scored_pack.reference_T
            if scored_pack.values is not None:
                columns |= {"values": scored_pack.values.old_T, "returns": scored_pack.values.return_T}
            for name, value_T in columns.items():
                for value, answer in zip(value_T.tolist(), scored_pack.answer_T.tolist(), strict=True):
                    figures[scored_pack.pack.places[answer]].setdefault(name, []).append(value)
        return figures

    def _total(self, value: float) -> float:
        return float(sum(self._ranks.gather(value)))


def _behaviour(rollout: Any) -> Tensor:
    assert rollout.tokens.logprob_A is not None  # temperature is above 0
    logprob_A: Tensor = rollout.tokens.logprob_A
    return logprob_A


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
