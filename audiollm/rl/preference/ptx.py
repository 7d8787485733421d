"""PTX: supervised samples beside the answers of a step, so that the policy keeps what it was trained on (InstructGPT).

Source: arXiv 2203.02155, section 3.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.data.records.mixture import StepDraws
from audiollm.data.records.opening import open_source
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policy import Policy
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import Ranks
from audiollm.recipe.runner import Context
from audiollm.rl.policy_gradient.losses import ptx_loss
from audiollm.rl.preference.settings import PTXChoice, weights_of
from audiollm.supervised.answers.batches import AnswerBatches, AnswerBatchMaker


class SupervisedMaker:
    """`maker(step)` gives this rank's supervised samples of a step, and `losses` their share of the step's loss.

    Args:
        batches: of a step, by its number.
        weight: of the mean cross entropy per token.
    """

    def __init__(self, batches: AnswerBatchMaker, weight: float) -> None:
        self._batches, self._weight = batches, weight

    def __call__(self, step: int) -> SupervisedPacks:
        """Encode and batch the samples of a step. Called on every rank."""
        return SupervisedPacks(self._batches(step), self._weight)


class SupervisedPacks:
    """The supervised answers of a step, as this rank trains them."""

    def __init__(self, answers: AnswerBatches, weight: float) -> None:
        self.batches, self.tokens, self._weight = answers.batches, answers.tokens, weight

    def losses(
        self,
        policy: Policy[Any, Any, Any],
        root: nn.Module,
        ranks: Ranks,
        figures: dict[str, Any],
    ) -> Iterator[Tensor]:
        """The loss of each batch; when the last is drawn, `figures` has their mean cross entropy, `ptx_loss`.

        Args:
            root: as the strategy wrapped it.
        """
        device = next(policy.root.parameters()).device
        total = torch.zeros((), dtype=torch.float64)
        for batch in self.batches:
            answers = policy.answer_logprobs(root, batch.to(device), TokenRequest(reference=False))
            total -= answers.policy_T.detach().double().sum().cpu()
            yield ptx_loss(answers.policy_T, max(1, self.tokens), self._weight)
        figures["ptx_loss"] = float(ranks.sum(total)) / max(1, self.tokens)


def supervised_maker(
    choice: PTXChoice | None,
    policy: Policy[Any, Any, Any],
    batch_size: int,
    max_tokens: int,
    seed: int,
    set_aside: SetAside,
    context: Context,
) -> SupervisedMaker | None:
    """Open the samples of `ptx`, where it is set.

    Args:
        batch_size: the stage's own.

    Raises:
        BadSample: the first bad sample, where `set_aside` is strict.
        StageError: there is no sample to train on.
    """
    if choice is None:
        return None
    sources = [open_source(source.path) for source in choice.samples]
    draws = StepDraws(choice.batch_size or batch_size, seed, weights_of(choice.samples), max_tokens)
    with context.progress("reading ptx", sum(map(len, sources))) as bar:
        batches = AnswerBatchMaker(
            policy, sources, draws, set_aside, context.ranks, "ptx",
            advance=lambda: bar.advance(bar.task_ids[0]),
        )  # fmt: skip
    return SupervisedMaker(batches, choice.weight)
