"""A small batch of every kind of group, with the same numbers as plain lists for the closed forms.

Answers 0 to 5 have 5, 2, 3, 4, 1 and 3 tokens; 6 to 8 are answers 0 to 2 once more, with an altered recording. Tokens
of different answers are interleaved, as they may be in a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from audiollm.families.logprobs.answers import (
    AnswerGroups,
    AnswerLogprobs,
    AnswerScores,
    ItemLosses,
    LabelledSteps,
    Lists,
    ObjectiveInputs,
    Pairs,
    Singles,
    StepScores,
)
from audiollm.rl.objectives.catalog import ObjectiveTerm
from audiollm.rl.objectives.figures import StepFigures, transport_partners
from audiollm.rl.objectives.pairs import aot_unpaired_values, aot_values
from audiollm.rl.objectives.registry import mixed_losses
from audiollm.rl.objectives.settings import AOTSettings

LENGTHS = [5, 2, 3, 4, 1, 3, 5, 2, 3]
CHOSEN, REJECTED, ALTERED = [0, 1, 2, 0], [3, 4, 5, 5], [6, 7, 8, 6]
MARGINS = [0.5, 0.0, 1.0, 2.0]
LISTS = [[0, 3, 4], [5, 1], [2, 0, 1, 5]]
LIST_SCORES = [[0.9, 0.2, 0.6], [0.1, 1.0], [0.5, 0.4, 0.8, 0.0]]
SINGLES, VERDICTS = [0, 1, 2, 3, 4], [True, False, True, False, False]
SINGLE_SCORES = [0.7, -0.4, 1.5, 0.0, 0.3]
STEP_ANSWERS, STEP_LABELS = [0, 0, 1, 2, 2, 2], [1.0, 0.3, 0.0, 1.0, 0.0, 0.6]
KL, RUNNING_MEAN, MARGIN_CENTER = 0.35, -0.12, 0.03


@dataclass
class Numbers:
    """Leaves of a batch; float64 unless cast."""

    policy: Tensor
    reference: Tensor
    kl: Tensor
    contrast: Tensor
    collision: Tensor
    draw: Tensor
    value: Tensor
    prompt_sum: Tensor
    score: Tensor
    step_score: Tensor
    answer: Tensor

    def tokens(self, name: str, answer: int) -> list[float]:
        """Values of one answer's tokens, in order."""
        return getattr(self, name).detach()[self.answer == answer].tolist()

    def cast(self, dtype: torch.dtype) -> Numbers:
        return Numbers(
            **{
                each.name: value.to(dtype)
                if (value := getattr(self, each.name)).is_floating_point()
                else value
                for each in fields(self)
            }
        )


PROMPT_LENGTHS = [2, 3, 1, 4, 2, 2, 2, 3, 1]
LEAVES = ("policy", "contrast", "kl", "value", "prompt_sum", "score", "step_score")


def numbers(seed: int = 0) -> Numbers:
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    answer = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    answer = answer[torch.randperm(total, generator=generator)]

    def noise(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    policy = -noise(total).abs() - 0.2
    return Numbers(
        policy=policy,
        reference=policy + 0.7 * noise(total),
        kl=noise(total).abs(),
        contrast=-noise(total).abs() - 0.1,
        collision=-noise(total).abs() - 0.3,
        draw=torch.rand(total, generator=generator, dtype=torch.float64),
        value=noise(len(LENGTHS)),
        prompt_sum=-noise(len(LENGTHS)).abs() * 3,
        score=noise(len(LENGTHS)),
        step_score=noise(len(STEP_ANSWERS)),
        answer=answer,
    )


def inputs_of(reads: str, data: Numbers) -> ObjectiveInputs:
    if reads == "scores":
        return AnswerScores(data.score)
    if reads == "step_scores":
        return StepScores(data.step_score, torch.tensor(STEP_ANSWERS), 3)
    return AnswerLogprobs(
        data.policy,
        data.answer,
        len(LENGTHS),
        data.reference,
        kl_T=data.kl,
        contrast_T=data.contrast,
        log_collision_T=data.collision,
        draw_T=data.draw,
        value_A=data.value,
        prompt_sum_A=data.prompt_sum,
        prompt_length_A=torch.tensor(PROMPT_LENGTHS).to(data.policy),
    )


def groups_of(kind: str) -> AnswerGroups:
    if kind == "pairs":
        chosen, rejected, altered = (torch.tensor(each) for each in (CHOSEN, REJECTED, ALTERED))
        return Pairs(chosen, rejected, torch.tensor(MARGINS, dtype=torch.float64), altered)
    if kind == "lists":
        answer = torch.tensor([each for entries in LISTS for each in entries])
        index = torch.tensor([number for number, entries in enumerate(LISTS) for _ in entries])
        scores = torch.tensor([each for row in LIST_SCORES for each in row], dtype=torch.float64)
        return Lists(answer, index, len(LISTS), scores)
    if kind == "singles":
        return Singles(
            torch.tensor(SINGLES),
            torch.tensor(VERDICTS),
            torch.tensor(SINGLE_SCORES, dtype=torch.float64),
        )
    return LabelledSteps(torch.tensor(STEP_LABELS, dtype=torch.float64))


def outer_figures() -> StepFigures:
    """The figures that no call can compute from its own items."""
    scalars = (torch.tensor(each, dtype=torch.float64) for each in (KL, RUNNING_MEAN, MARGIN_CENTER))
    kl, running_mean, margin_center = scalars
    return StepFigures(kl=kl, running_mean=running_mean, margin_center=margin_center)


def item_losses(term: ObjectiveTerm, data: Numbers, figures: StepFigures | None = None) -> Tensor:
    return evaluated(term, data, figures).loss_I


def item_metrics(term: ObjectiveTerm, data: Numbers) -> dict[str, Tensor]:
    return evaluated(term, data).metrics


def evaluated(term: ObjectiveTerm, data: Numbers, figures: StepFigures | None = None) -> ItemLosses:
    groups = groups_of(term.needs.groups[0])
    inputs = inputs_of(term.needs.reads, data)
    return mixed_losses([term], inputs, groups, figures or outer_figures())


def whole_step_figures(term: ObjectiveTerm, data: Numbers) -> StepFigures:
    """All figures that a training would gather over the packs of a step."""
    figures = outer_figures()
    if "tokens_per_answer" in term.needs.figures:
        figures = replace(figures, tokens_per_answer=mean_trained_length(term))
    answers, pairs = inputs_of("log_probs", data), groups_of("pairs")
    assert isinstance(answers, AnswerLogprobs) and isinstance(pairs, Pairs)
    if "margin_mean" in term.needs.figures:
        margins = item_metrics(term, data)["margin"]
        figures = replace(figures, margin_mean=margins.mean())
    if isinstance(term.settings, AOTSettings):
        values = aot_values if term.name == "aot" else aot_unpaired_values
        figures = replace(figures, partners=transport_partners(*values(answers, pairs, term.settings)))
    return figures


def mean_trained_length(term: ObjectiveTerm) -> float:
    """Mean tokens of the answers under cross entropy."""
    kind = term.needs.groups[0]
    if kind == "pairs":
        trained = CHOSEN
    elif kind == "lists":
        trained = best_answers()
    else:
        trained = [answer for answer, good in zip(SINGLES, VERDICTS, strict=True) if good]
    lengths: list[int] = LENGTHS
    if getattr(term.settings, "sft_on", "answer") == "prompt_and_answer":
        lengths = [a + b for a, b in zip(LENGTHS, PROMPT_LENGTHS, strict=True)]
    return sum(lengths[answer] for answer in trained) / len(trained)


def best_answers() -> list[int]:
    return [row[scores.index(max(scores))] for row, scores in zip(LISTS, LIST_SCORES, strict=True)]


ClosedForm = Callable[[Numbers, Any], Sequence[float]]
