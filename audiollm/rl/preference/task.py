"""Training of a policy on groups of answers: a `Task` of the training loop.

Shapes: I items (pairs, lists, single answers) of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.families.logprobs.answers import AnswerLogprobs, ItemLosses
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policy import Policy
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.rl.critic.model import ActorCritic, Critic
from audiollm.rl.objectives.catalog import ObjectiveTerm
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.registry import mixed_losses
from audiollm.rl.preference.batches import MicroBatch, PreferenceStep, StepMaker
from audiollm.rl.preference.held_out import EvalAnswers, WorstItems
from audiollm.rl.preference.ptx import SupervisedMaker
from audiollm.rl.preference.statistics import StepStatistics
from audiollm.train.loop.task import Board, Update

CONTRAST_K = 5
"""Likeliest tokens that CRINGE draws its contrast from (arXiv 2211.05826, section 3)."""


class MetricSums:
    """Sums and counts of the figures of a step's items, by name; figures that do not apply to an item are NaN."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Take the figures of a micro-batch, `[I]` each."""
        for name, value_I in metrics.items():
            known_I = value_I.detach().double()
            applies_I = ~known_I.isnan()
            self._sums[name] = self._sums.get(name, 0.0) + float(known_I[applies_I].sum())
            self._counts[name] = self._counts.get(name, 0.0) + float(applies_I.sum())

    def means(self, ranks: Ranks) -> dict[str, float]:
        """Return the mean of each figure over the items of all ranks that have it. Called on every rank."""
        rows = ranks.gather((self._sums, self._counts))
        means: dict[str, float] = {}
        for name in sorted({name for sums, _ in rows for name in sums}):
            count = sum(counts.get(name, 0.0) for _, counts in rows)
            if count:
                means[name] = sum(sums.get(name, 0.0) for sums, _ in rows) / count
        return means


@dataclass(frozen=True)
class PreferenceParts:
    """Model, batches and objectives of a training on judged answers."""

    policy: Policy[Any, Any, Any]
    steps: StepMaker[Any, Any, Any]
    """Step -> this rank's batches; also gives those held out."""
    terms: Sequence[ObjectiveTerm]
    """Objectives and their weights."""
    set_aside: SetAside
    """Where records go that turn out bad."""
    ranks: Ranks = ALONE
    folder: Path | None = None
    """Where every evaluation writes `pairs.jsonl`; None: nowhere."""
    eval_answers: EvalAnswers | None = None
    """Has the policy answer held-out prompts at every evaluation."""
    critic: Critic | None = None
    """Trained beside the policy, in one root with it; its value at an answer's first token is that of the prompt
    (`value_A`)."""
    ptx: SupervisedMaker | None = None
    """Supervised samples of each step; None: there are none."""


class PreferenceTask:
    """A `Task` over groups of answers.

    The loss of a step is the mean over its items on all ranks: neither micro-batches nor ranks change it.
    """

    def __init__(self, parts: PreferenceParts) -> None:
        self._policy, self._steps, self._terms = parts.policy, parts.steps, parts.terms
        self._set_aside, self._ranks, self._ptx = parts.set_aside, parts.ranks, parts.ptx
        self._folder, self._eval_answers = parts.folder, parts.eval_answers
        root = parts.policy.root
        self._trained: nn.Module = root if parts.critic is None else ActorCritic(root, parts.critic)
        self._root = self._trained
        self._request = request_of(parts.terms)
        self._statistics = StepStatistics(parts.terms, parts.ranks)
        self.device = next(root.parameters()).device

    def modules(self) -> dict[str, nn.Module]:
        return {"policy": self._trained, "means": self._statistics.means}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        self._root = modules["policy"]

    def read_by(self, read: Callable[[Tensor], Tensor]) -> None:
        """See `ReadsWeights`: answers at evaluations may need whole weights."""
        if self._eval_answers is not None:
            self._eval_answers.read_by(read)

    def draw_on(self, boards: Sequence[Board]) -> None:
        """See `DrawsOnBoards`."""
        if self._eval_answers is not None:
            self._eval_answers.draw_on(boards)

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["policy"]}

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> PreferenceStep[Any]:
        batch = self._steps(step)
        self._set_aside.add(batch.bad)
        return batch

    def updates(self, batch: PreferenceStep[Any], step: int, steps: int) -> Iterator[Update]:
        """One update: the mean loss over the items of the step."""
        micro = self._evened(batch.micro)
        items = sum(self._ranks.gather(sum(micro_batch.num_items for micro_batch in micro)))
        if not items:
            raise FloatingPointError("every record of the step is bad; see set_aside.jsonl")
        every = self._figures(micro, batch.mismatched, training=True)
        figures: dict[str, float | Tensor] = {
            "tokens": float(sum(int(micro_batch.length_A.sum()) for micro_batch in micro))
        }

        beside = None if self._ptx is None else self._ptx(step)

        def losses() -> Iterator[Tensor]:
            if (
                beside is not None
            ):  # first: the last backward pass must reach every trained weight, the critic's too
                yield from beside.losses(self._policy, self._root, self._ranks, figures)
            sums = MetricSums()
            for micro_batch, step_figures in zip(micro, every, strict=True):
                item_losses = self._losses(micro_batch, step_figures)
                sums.add(item_losses.metrics)
                yield item_losses.loss_I.sum() / items
            figures.update(sums.means(self._ranks))

        yield Update(losses(), figures, losses=len(micro) + (0 if beside is None else len(beside.batches)))

    @torch.no_grad()
    def evaluate(self, step: int) -> Mapping[str, float]:
        """Means over the held-out items: loss, figures of the objectives, and the KL from the reference per token.

        Also writes the items that are ordered worst, and has held-out prompts answered (`answer_length`).
        """
        sums, worst = MetricSums(), WorstItems()
        for batch in self._steps.held_out():
            self._set_aside.add(batch.bad)
            micro = self._evened(batch.micro)
            for micro_batch, figures in zip(micro, self._figures(micro, [], training=False), strict=True):
                item_losses = self._losses(micro_batch, figures, with_kl=True)
                sums.add({"loss": item_losses.loss_I, **item_losses.metrics})
                worst.add(micro_batch, item_losses.metrics)
        if self._folder is not None:
            worst.write(self._folder / "pairs.jsonl", self._steps, step, self._ranks)
        answered = self._eval_answers(step) if self._eval_answers is not None else {}
        return {**sums.means(self._ranks), **answered}

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        """Tell of answers that both become unlikely: the policy forgets how to answer at all."""
        chosen, rejected = figures.get("reward_chosen"), figures.get("reward_rejected")
        if chosen is None or rejected is None or not chosen < rejected * 0.5 < 0:
            return {}
        return {
            "likelihood displacement": (
                f"the reward of chosen answers fell to {chosen:.2f} with that of rejected ones ({rejected:.2f}): "
                "mix in `sft`, or take dpop or a higher beta"
            )
        }

    def _losses(self, micro: MicroBatch[Any], figures: StepFigures, with_kl: bool = False) -> ItemLosses:
        on_device_batch = micro.to(self.device)
        request = replace(self._request, kl=self._request.kl or (with_kl and self._request.reference))
        answers = self._policy.answer_logprobs(
            self._root, on_device_batch.batch, request, on_device_batch.draw_T
        )
        if answers.value_T is not None:
            answers = replace(answers, value_A=answers.first_of(answers.value_T))
        losses = mixed_losses(self._terms, answers, on_device_batch.groups, on_device(figures, self.device))
        if answers.kl_T is not None and with_kl:
            return ItemLosses(losses.loss_I, {**losses.metrics, "kl_per_token": answers.kl_T})
        return losses

    def _figures(
        self, micro: Sequence[MicroBatch[Any]], mismatched: Sequence[Any], training: bool
    ) -> list[StepFigures]:
        """The figures of the whole step for each micro-batch, from a pass without gradient where they need one."""
        needed = self._statistics
        answers = [self._plain(micro_batch.batch) for micro_batch in micro] if needed.needs_answers else []
        beside: list[AnswerLogprobs] = []
        if "kl" in needed.needed:
            count = max(self._ranks.gather(len(mismatched)))
            batches = [*mismatched, *[None] * (count - len(mismatched))]
            beside = [self._plain(self._steps.idle().batch if b is None else b) for b in batches]
            beside = beside[: len(mismatched)]
        return needed.of_step(micro, answers, beside, training)

    @torch.no_grad()
    def _plain(self, batch: Any) -> AnswerLogprobs:
        request = TokenRequest(reference=self._request.reference)
        return self._policy.answer_logprobs(self._root, batch.to(self.device), request)

    def _evened(self, micro: Sequence[MicroBatch[Any]]) -> list[MicroBatch[Any]]:
        """As many as the rank with the most has, at least one: ranks meet in every pass through the model."""
        num_batches = max(1, *self._ranks.gather(len(micro)))
        return [*micro, *(self._steps.idle() for _ in range(num_batches - len(micro)))]


def request_of(terms: Sequence[ObjectiveTerm]) -> TokenRequest:
    """Return the figures per token that these objectives read."""
    fields = frozenset().union(*(term.needs.fields for term in terms))
    return TokenRequest(
        reference=any(term.needs.reference for term in terms),
        kl="kl_T" in fields,
        collision="log_collision_T" in fields,
        contrast_k=CONTRAST_K if "contrast_T" in fields else 0,
        value=any(term.needs.value_head for term in terms),
        prompts=any(term.needs.prompts for term in terms),
    )


def on_device(figures: StepFigures, device: torch.device) -> StepFigures:
    """Return the figures with their tensors on a device."""
    moved: dict[str, Any] = {}
    for name, value in vars(figures).items():
        if isinstance(value, Tensor):
            moved[name] = value.to(device)
        else:
            moved[name] = value
    return StepFigures(**moved)
