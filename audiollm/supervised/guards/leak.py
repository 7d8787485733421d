"""The leak test: what nobody can know must not be predicted.

The model learns to say codes that are drawn anew for every clip, of a few values each, in clips that end at random. Its
cross entropy cannot go below the entropy of the draw, unless a target is among what its prediction reads.

Shapes: K codebooks, T frames or targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from audiollm.families.policy import Policy
from audiollm.families.prompts import PromptedContents
from audiollm.supervised.guards.trials import TEXTS, TrialSettings, spoken_prompt, train_trial

VALUES = 4
"""Different codes of each codebook."""
END_SHARE = 0.2
"""Probability that a clip ends behind a frame."""
MOST_FRAMES = 24
TOLERANCE = 0.01
"""Nats below the entropy from which a codebook leaks, beside two standard errors of the mean."""
MEASURED_SHARE = 0.25
"""Share of the steps, the last ones, over which the cross entropy is taken."""


@dataclass(frozen=True)
class CodebookLeak:
    """The cross entropy of a codebook's targets, and what it cannot fall below, in nats."""

    codebook: int
    cross_entropy: float
    entropy: float
    error: float
    """Standard error of the cross entropy."""

    @property
    def leaks(self) -> bool:
        """Whether the targets were known."""
        return self.cross_entropy + 2 * self.error < self.entropy - TOLERANCE


def test_leak(
    policy: Policy[Any, Any, Any], settings: TrialSettings, advance: Callable[[], None] = lambda: None
) -> list[CodebookLeak]:
    """Train the policy on random codes, and compare; codebook after codebook, the end among the first one's targets."""
    books = policy.num_codebooks
    losses: list[list[Tensor]] = [[] for _ in range(books)]
    drawn: list[list[int]] = []
    """Frames of the clips of each step."""
    generator = torch.Generator().manual_seed(settings.seed)

    def clips(step: int) -> list[PromptedContents]:
        codes = [random_clip(books, generator) for _ in range(settings.batch_size)]
        drawn.append([codes_KT.shape[1] for codes_KT in codes])
        return [
            spoken_prompt(f"{TEXTS[number % len(TEXTS)]} {step}", codes_KT)
            for number, codes_KT in enumerate(codes)
        ]

    begin = math.floor(settings.steps * (1 - MEASURED_SHARE))
    frames: list[int] = []
    for step, logprobs in enumerate(train_trial(policy, clips, settings, advance)):
        if step < begin:
            continue
        frames += drawn[step]
        codebook_T = (
            torch.zeros_like(logprobs.answer_T) if logprobs.codebook_T is None else logprobs.codebook_T
        )
        for book in range(books):
            losses[book].append(-logprobs.policy_T[codebook_T == book].detach().double().cpu())
    entropies = [_first_entropy(frames), *[math.log(VALUES) * sum(frames)] * (books - 1)]
    return [
        _compare_with_entropy(book, torch.cat(values), entropy)
        for book, (values, entropy) in enumerate(zip(losses, entropies, strict=True))
    ]


def random_clip(books: int, generator: torch.Generator) -> Tensor:
    """Codes `[K, T]` of `VALUES` values each, in a clip that ends at random."""
    frames = 1
    while frames < MOST_FRAMES and float(torch.rand(1, generator=generator)) >= END_SHARE:
        frames += 1
    return torch.randint(1, 1 + VALUES, (books, frames), generator=generator)


def _first_entropy(frames: Sequence[int]) -> float:
    """Entropy of the first codebook's targets in clips of so many frames, in nats: the first one is a code in any case,
    each later one is a code or the end, and behind the most frames there is the end."""
    binary = -END_SHARE * math.log(END_SHARE) - (1 - END_SHARE) * math.log(1 - END_SHARE)
    later = binary + (1 - END_SHARE) * math.log(VALUES)
    return sum(math.log(VALUES) + later * min(count, MOST_FRAMES - 1) for count in frames)


def _compare_with_entropy(book: int, loss_T: Tensor, entropy: float) -> CodebookLeak:
    """Compare the losses of a codebook with the entropy of all of them; where ends have codes of their own, these are
    known from the first."""
    return CodebookLeak(
        book, float(loss_T.mean()), entropy / len(loss_T), float(loss_T.std() / len(loss_T) ** 0.5)
    )
