"""Figures of a whole step that some objectives need before its losses: they are computed in a pass of their own.

Shapes: P pairs, N single answers of this rank in a step; "gathered" values are those of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.families.logprobs.answers import AnswerLogprobs, Pairs, Singles
from audiollm.recipe.ranks import Ranks
from audiollm.rl.objectives.catalog import ObjectiveTerm
from audiollm.rl.objectives.figures import (
    RunningMean,
    StepFigures,
    TransportPartners,
    mismatched_kl,
    transport_partners,
)
from audiollm.rl.objectives.pairs import aot_unpaired_values, aot_values
from audiollm.rl.objectives.singles import good_answers
from audiollm.rl.preference.batches import MicroBatch

CENTER_MOMENTUM = 0.9
"""Momentum of beta-DPO's mean margin (its paper's value)."""
ANSWERS_FIRST = ("running_mean", "margin_center", "margin_mean", "partners")
"""Figures that are made of the log-probabilities of the step's own answers."""


class RunningMeans(nn.Module):
    """What a training remembers between steps, for BCO and beta-DPO.

    A module of buffers: checkpoints, roll-backs and the trial steps of a budget save and restore it as they do weights.
    """

    NAMES = ("reward", "margin")

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            start = RunningMean.start()
            self.register_buffer(f"{name}_value", start.value)
            self.register_buffer(f"{name}_count", start.count)

    def update(self, name: str, values_N: Tensor, momentum: float | None = None) -> None:
        """Take in the values of a whole step; see `RunningMean.updated`."""
        new = RunningMean(self.mean(name), self.get_buffer(f"{name}_count")).updated(values_N, momentum)
        self.get_buffer(f"{name}_value").copy_(new.value)
        self.get_buffer(f"{name}_count").copy_(new.count)

    def mean(self, name: str) -> Tensor:
        """The mean so far, a scalar."""
        return self.get_buffer(f"{name}_value")


class StepStatistics:
    """Computes `StepFigures` of each micro-batch of a step.

    Args:
        terms: the objectives; at most one of them reads each figure with a setting of its own.
    """

    def __init__(self, terms: Sequence[ObjectiveTerm], ranks: Ranks) -> None:
        self._terms, self._ranks = terms, ranks
        self.needed = frozenset().union(*(term.needs.figures for term in terms))
        self.means = RunningMeans()

    @property
    def needs_answers(self) -> bool:
        """Whether the log-probabilities of the step's answers are needed before its losses."""
        return bool(self.needed.intersection(ANSWERS_FIRST))

    def of_step(
        self,
        micro: Sequence[MicroBatch[Any]],
        answers: Sequence[AnswerLogprobs],
        mismatched: Sequence[AnswerLogprobs],
        training: bool = True,
    ) -> list[StepFigures]:
        """Return the figures of each micro-batch. Called on every rank.

        Args:
            answers: log-probabilities of each micro-batch, without gradient, where `needs_answers`.
            mismatched: those of answers behind the prompts of other records, where `kl` is needed.
            training: False leaves the running means as they are (an evaluation).
        """
        figures = StepFigures()
        if "tokens_per_answer" in self.needed:
            figures = replace(figures, tokens_per_answer=self._tokens_per_answer(micro))
        if "kl" in self.needed:
            policy_M = self._gathered([logprobs.sums_A for logprobs in mismatched])
            ratio_M = self._gathered([logprobs.ratios_A for logprobs in mismatched])
            has_mismatched = len(ratio_M) > 0
            kl = (
                mismatched_kl(policy_M, policy_M - ratio_M)
                if has_mismatched
                else torch.zeros((), dtype=torch.float64)
            )
            figures = replace(figures, kl=kl)
        if "running_mean" in self.needed:
            figures = replace(figures, running_mean=self._running_mean(micro, answers, training))
        if "margin_center" in self.needed:
            margin_P = self._gathered([self._margins(m, a) for m, a in zip(micro, answers, strict=True)])
            if training and len(margin_P):
                self.means.update("margin", margin_P, CENTER_MOMENTUM)
            mean = margin_P.mean() if len(margin_P) else margin_P.new_zeros(())
            figures = replace(figures, margin_center=self.means.mean("margin").clone(), margin_mean=mean)
        every = [figures for _ in micro]
        if "partners" in self.needed:
            matched = self._partners(micro, answers)
            every = [
                replace(step_figures, partners=partners)
                for step_figures, partners in zip(every, matched, strict=True)
            ]
        return every

    def _tokens_per_answer(self, micro: Sequence[MicroBatch[Any]]) -> Tensor:
        """Return the mean length of the answers under cross entropy: chosen ones of pairs, desirable single ones.

        With their prompts, where the cross entropy has them.
        """
        with_prompts = any(term.needs.prompts for term in self._terms)
        lengths = []
        for micro_batch in micro:
            answer_I, is_trained_I = good_answers(micro_batch.groups)
            length_A = micro_batch.length_A
            if with_prompts and micro_batch.prompt_length_A is not None:
                length_A = length_A + micro_batch.prompt_length_A
            lengths.append(length_A[answer_I[is_trained_I]])
        tokens_N = self._gathered(lengths)
        return tokens_N.mean() if len(tokens_N) else torch.ones((), dtype=torch.float64)

    def _running_mean(
        self, micro: Sequence[MicroBatch[Any]], answers: Sequence[AnswerLogprobs], training: bool
    ) -> Tensor:
        beta = self._setting("running_mean", "beta")
        rewards = []
        for micro_batch, logprobs in zip(micro, answers, strict=True):
            assert isinstance(micro_batch.groups, Singles)
            rewards.append(beta * logprobs.ratios_A[micro_batch.groups.answer_N])
        reward_N = self._gathered(rewards)
        if training and len(reward_N):
            self.means.update("reward", reward_N)
        return self.means.mean("reward").clone()

    def _margins(self, micro_batch: MicroBatch[Any], logprobs: AnswerLogprobs) -> Tensor:
        assert isinstance(micro_batch.groups, Pairs)
        ratio_A = logprobs.ratios_A
        margin_P = ratio_A[micro_batch.groups.chosen_P] - ratio_A[micro_batch.groups.rejected_P]
        margin_P = margin_P * self._setting("margin_center", "beta")
        return margin_P

    def _partners(
        self, micro: Sequence[MicroBatch[Any]], answers: Sequence[AnswerLogprobs]
    ) -> list[TransportPartners]:
        term = next(term for term in self._terms if "partners" in term.needs.figures)
        values_of = aot_values if term.name == "aot" else aot_unpaired_values
        values = [
            values_of(logprobs, micro_batch.groups, term.settings)  # type: ignore[arg-type]
            for micro_batch, logprobs in zip(micro, answers, strict=True)
        ]
        sizes = [len(first) for first, _ in values]
        by_rank = self._ranks.gather(sum(sizes))
        begin = sum(by_rank[: self._ranks.rank])
        first_P, second_P = (self._gathered([pair[k] for pair in values]) for k in (0, 1))
        matched = transport_partners(first_P, second_P)
        device = values[0][0].device if values else first_P.device
        parts = [
            tensor[begin : begin + sum(sizes)].to(device).split(sizes)
            for tensor in (matched.of_first_P, matched.of_second_P)
        ]
        return [TransportPartners(of_first, of_second) for of_first, of_second in zip(*parts, strict=True)]

    def _setting(self, figure: str, name: str) -> float:
        term = next(term for term in self._terms if figure in term.needs.figures)
        return float(getattr(term.settings, name))

    def _gathered(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the values of all ranks, float64 on the CPU, in the order of the ranks."""
        local_values = (
            torch.cat([values.detach().double().cpu() for values in parts])
            if parts
            else torch.zeros(0).double()
        )
        rows: list[list[float]] = self._ranks.gather(local_values.tolist())
        return torch.tensor([value for row in rows for value in row], dtype=torch.float64)
