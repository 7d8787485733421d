"""Cross entropy on the answers of conversations: a `Task` of the training loop, for a policy of any family.

The loss is `text_loss`; of models that answer in speech, `audio_loss`. Where two decoders choose the codes of a frame
(`has_depth`), it is `first_codebook_loss` plus `depth_loss` times its weight, each a mean over its own targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from audiollm.families.logprobs.answers import AnswerLogprobs, sum_by_index
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policy import Policy, has_depth
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.recipe.stages import required
from audiollm.supervised.answers.batches import AnswerBatches, AnswerBatchMaker
from audiollm.supervised.guards.offsets import GivesOffsets, OffsetTable, offset_table
from audiollm.train.loop.task import Update

Normalization = Literal["sequence", "token"]
PART_NAMES = ("first_codebook_loss", "depth_loss")


class AnswerTask:
    """A `Task` over answers in words.

    Args:
        batches: step -> this rank's answers; also gives those held out.
        normalization: the loss is the mean over answers of their mean over tokens, or the mean over tokens.
        depth_weight: of the depth decoder's loss, where there is one; None: the policy's own.
    """

    def __init__(
        self,
        policy: Policy[Any, Any, Any],
        batches: AnswerBatchMaker,
        normalization: Normalization,
        ranks: Ranks = ALONE,
        depth_weight: float | None = None,
    ) -> None:
        self._policy, self._batches, self._normalization, self._ranks = policy, batches, normalization, ranks
        self._depth_weight = 0.0
        if has_depth(policy):
            self._depth_weight = required(policy.depth_weight if depth_weight is None else depth_weight)
        self._root: nn.Module = policy.root
        self._figure = loss_figure(policy)
        self._offsets: OffsetTable | None = None
        """The table of offsets of the last evaluation; None: none was made, or the policy gives no offsets."""
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
        figures: dict[str, float | Tensor] = {"tokens": float(batch.rank_tokens)}
        figures |= dict.fromkeys(self._loss_names, 0.0)

        def losses() -> Iterator[Tensor]:
            for answer_batch in batch.batches:
                parts = self._mean_parts(self._logprobs(answer_batch), batch)
                for name, value in parts.items():
                    # the loop takes the mean over ranks, and the parts of all of them add up
                    figures[name] += value.detach() * self._ranks.world
                yield parts[self._figure]

        yield Update(losses(), figures, losses=len(batch.batches))

    @torch.no_grad()
    def evaluate(self, step: int) -> Mapping[str, float]:
        """The losses of held-out answers; nothing where there are none."""
        totals = torch.zeros(len(self._loss_names), dtype=torch.float64, device=self.device)
        counts = torch.zeros(3, dtype=torch.float64)
        for step_batches in self._batches.held_out():
            counts += torch.tensor(self._counts(step_batches))
            for answer_batch in step_batches.batches:
                totals += torch.stack(self._sums(self._logprobs(answer_batch))).double()
        if not counts[0]:
            return {}
        self._compare_offsets()
        all_count, *part_counts = counts.tolist()
        whole, *parts = self._ranks.sum(totals).tolist()
        if not self._has_depth:
            return {self._figure: whole / all_count}
        means = [total / max(1.0, count) for total, count in zip(parts, part_counts, strict=True)]
        return dict(zip(self._loss_names, [means[0] + self._depth_weight * means[1], *means], strict=True))

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        """Labels that are shifted, here or when the start was trained, told once."""
        sentence = "" if self._offsets is None else self._offsets.sentence()
        return {"shifted_labels": sentence} if sentence else {}

    def _logprobs(self, batch: Any) -> AnswerLogprobs:
        return self._policy.answer_logprobs(self._root, batch.to(self.device), TokenRequest(reference=False))

    def _compare_offsets(self) -> None:
        """Make the table of offsets of the first held-out batch, until one shows labels that are shifted."""
        is_shifted = self._offsets is not None and bool(self._offsets.shifted)
        if not is_shifted and isinstance(self._policy, GivesOffsets):
            first = next(iter(next(self._batches.held_out()).batches))
            self._offsets = offset_table(self._policy, self._root, [first.to(self.device)])

    @property
    def _has_depth(self) -> bool:
        return has_depth(self._policy)

    @property
    def _loss_names(self) -> list[str]:
        """The loss, and its parts where two decoders have one each."""
        return [self._figure, *(PART_NAMES if self._has_depth else ())]

    def _mean_parts(self, answers: AnswerLogprobs, batch: AnswerBatches) -> dict[str, Tensor]:
        """A batch's share in the losses of the whole step, by name."""
        whole, *parts = self._sums(answers)
        all_count, *part_counts = self._counts(batch)
        if not self._has_depth:
            return {self._figure: whole / all_count}
        first, depth = (total / max(1, count) for total, count in zip(parts, part_counts, strict=True))
        return dict(zip(self._loss_names, [first + self._depth_weight * depth, first, depth], strict=True))

    def _sums(self, answers: AnswerLogprobs) -> list[Tensor]:
        """Sums of cross entropies, of answers or of their tokens: of all, and of each decoder where there are two."""
        if not self._has_depth:
            return [-(answers.policy_T if self._normalization == "token" else answers.means_A).sum()]
        assert answers.codebook_T is not None
        of_first_T = answers.codebook_T == 0
        parts = [-self._reduced(answers, is_part_T).sum() for is_part_T in (of_first_T, ~of_first_T)]
        return [parts[0].detach(), *parts]

    def _reduced(self, answers: AnswerLogprobs, is_part_T: Tensor) -> Tensor:
        """Log-probabilities of some tokens, or their mean in each answer that has them."""
        policy_T = answers.policy_T[is_part_T]
        if self._normalization == "token":
            return policy_T
        answer_T = answers.answer_T[is_part_T]
        count_A = torch.bincount(answer_T, minlength=answers.num_answers)
        return sum_by_index(policy_T, answer_T, answers.num_answers) / count_A.clamp_min(1)

    def _counts(self, batch: AnswerBatches) -> tuple[int, int, int]:
        """What the sums are divided by: of all tokens or answers, and of each decoder's."""
        if self._normalization == "token":
            return batch.tokens, *batch.parts
        return batch.answers, batch.answers, batch.answers


def loss_figure(policy: Policy[Any, Any, Any]) -> str:
    """The name of the loss of a policy's answers."""
    return "audio_loss" if policy.num_codebooks else "text_loss"
