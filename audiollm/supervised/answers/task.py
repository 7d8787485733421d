"""Cross entropy on the answers of conversations: a `Task` of the training loop, for a policy of any family.

The loss is `text_loss`; of models that answer in speech, `audio_loss`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from audiollm.families.logprobs.answers import AnswerLogprobs
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policy import Policy
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.supervised.answers.batches import AnswerBatches, AnswerBatchMaker
from audiollm.train.loop.task import Update

Normalization = Literal["sequence", "token"]


class AnswerTask:
    """A `Task` over answers in words.

    Args:
        batches: step -> this rank's answers; also gives those held out.
        normalization: the loss is the mean over answers of their mean over tokens, or the mean over tokens.
    """

    def __init__(
        self,
        policy: Policy[Any, Any, Any],
        batches: AnswerBatchMaker,
        normalization: Normalization,
        ranks: Ranks = ALONE,
    ) -> None:
        self._policy, self._batches, self._normalization, self._ranks = policy, batches, normalization, ranks
        self._root: nn.Module = policy.root
        self._figure = loss_figure(policy)
        self.device = next(policy.root.parameters()).device

    def modules(self) -> dict[str, nn.Module]:
        return {"policy": self._policy.root}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        self._root = modules["policy"]

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["policy"]}

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> AnswerBatches:
        return self._batches(step)

    def updates(self, batch: AnswerBatches, step: int, steps: int) -> Iterator[Update]:
        """One update: the mean loss over the answers of the step."""
        if not batch.answers:
            raise FloatingPointError("every sample of the step is bad; see set_aside.jsonl")
        figures: dict[str, float | Tensor] = {"tokens": float(batch.rank_tokens), self._figure: 0.0}

        def losses() -> Iterator[Tensor]:
            for answer_batch in batch.batches:
                loss = self._sum(self._logprobs(answer_batch)) / self._count(batch)
                # the loop takes the mean over ranks, and the parts of all of them add up
                figures[self._figure] += loss.detach() * self._ranks.world
                yield loss

        yield Update(losses(), figures, losses=len(batch.batches))

    @torch.no_grad()
    def evaluate(self, step: int) -> Mapping[str, float]:
        """The loss of held-out answers; nothing where there are none."""
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for step_batches in self._batches.held_out():
            count += self._count(step_batches)
            for answer_batch in step_batches.batches:
                total += self._sum(self._logprobs(answer_batch)).double()
        return {self._figure: float(self._ranks.sum(total)) / count} if count else {}

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        return {}

    def _logprobs(self, batch: Any) -> AnswerLogprobs:
        return self._policy.answer_logprobs(self._root, batch.to(self.device), TokenRequest(reference=False))

    def _sum(self, answers: AnswerLogprobs) -> Tensor:
        """Sum of the cross entropies of answers, or of their tokens."""
        return -(answers.policy_T if self._normalization == "token" else answers.means_A).sum()

    def _count(self, batch: AnswerBatches) -> int:
        return batch.tokens if self._normalization == "token" else batch.answers


def loss_figure(policy: Policy[Any, Any, Any]) -> str:
    """The name of the loss of a policy's answers."""
    return "audio_loss" if policy.num_codebooks else "text_loss"
