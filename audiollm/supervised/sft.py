"""Supervised training of a model of any family on packed samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from audiollm.data.packing import AudioReduction, PackedBatch
from audiollm.families.packed_training import PackedModel
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.supervised.corpus.batches import StepBatch
from audiollm.train.loop.loop import Update
from audiollm.train.loop.task import Board, DrawsOnBoards, ReadsWeights

KINDS = ("text", "audio")


class Steps(Protocol):
    """Where the batches come from: a `Loader` of a `BatchMaker`."""

    def __getitem__(self, step: int) -> StepBatch: ...


class SFTTask:
    """A `Task` of the training loop over packs of samples.

    Args:
        losses: the model and its losses.
        steps: step -> this rank's packs.
        held_out: this rank's packs to evaluate on, by task.
        weights: of the `text` and of the `audio` loss.
        set_aside: where samples go that turn out bad.
        listen: called at every evaluation with its step; told how to read whole weights if it is `ReadsWeights`.
        audio_reduction: over codebooks, as the packs were weighed.
    """

    def __init__(
        self,
        losses: PackedModel,
        steps: Steps,
        held_out: Mapping[str, Sequence[PackedBatch]],
        weights: Mapping[str, float],
        set_aside: SetAside,
        ranks: Ranks = ALONE,
        listen: Callable[[int], None] | None = None,
        audio_reduction: AudioReduction = "mean",
    ) -> None:
        self._losses, self._steps, self._held_out, self._weights = losses, steps, held_out, weights
        self._set_aside, self._ranks, self._listen = set_aside, ranks, listen
        self._forward: nn.Module = losses
        self._codebook_share = 1 / losses.num_codebooks if audio_reduction == "mean" else 1.0
        self.device = next(losses.parameters()).device

    def modules(self) -> dict[str, nn.Module]:
        return {"model": self._losses}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        self._forward = modules["model"]

    def read_by(self, read: Callable[[Tensor], Tensor]) -> None:
        """See `ReadsWeights`: what speaks at evaluations may need whole weights."""
        if isinstance(self._listen, ReadsWeights):
            self._listen.read_by(read)

    def draw_on(self, boards: Sequence[Board]) -> None:
        """See `DrawsOnBoards`."""
        if isinstance(self._listen, DrawsOnBoards):
            self._listen.draw_on(boards)

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["model"]}

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> StepBatch:
        batch = self._steps[step]
        self._set_aside.add(batch.bad)
        return batch

    def updates(self, batch: StepBatch, step: int, steps: int) -> Iterator[Update]:
        """One update: the losses of the packs, each over the counts of the whole step."""
        counts = self._counts(batch.packs)
        figures: dict[str, float | Tensor] = {f"{kind}_loss": 0.0 for kind in KINDS if counts[kind]}
        figures["tokens"] = float(sum(len(pack.positions_S) for pack in batch.packs))
        figures["flops"] = sum(self._losses.flops(pack) for pack in batch.packs)

        def losses() -> Iterator[Tensor]:
            for pack in batch.packs:
                sums = self._forward(pack.to(self.device))
                means = {kind: sums[kind] / max(counts[kind], 1.0) for kind in KINDS}
                # the loop takes the mean over ranks, and the parts of all of them add up
                for kind in [kind for kind in KINDS if counts[kind]]:
                    figures[f"{kind}_loss"] += means[kind].detach() * self._ranks.world
                for book, value in enumerate(sums["audio_by_codebook"] if counts["audio"] else ()):
                    codebook_loss = value * self._ranks.world / (counts["audio"] * self._codebook_share)
                    figures[f"audio_loss/{book}"] = figures.get(f"audio_loss/{book}", 0.0) + codebook_loss
                yield torch.stack([self._weights[kind] * means[kind] for kind in KINDS]).sum()

        yield Update(losses(), figures, losses=len(batch.packs))

    def evaluate(self, step: int) -> Mapping[str, float]:
        """`held_out_losses`; and some prompts are spoken."""
        if self._listen is not None:
            self._listen(step)
        return self.held_out_losses()

    @torch.no_grad()
    def held_out_losses(self) -> dict[str, float]:
        """Losses on held-out samples, and by task where there are several."""
        tasks = {task: self._sums(packs) for task, packs in self._held_out.items()}
        total_4 = torch.stack([torch.zeros(4, dtype=torch.float64), *tasks.values()]).sum(dim=0)
        figures = _mean_losses(total_4, "")
        if len(tasks) > 1:
            for task, sums_4 in tasks.items():
                figures |= _mean_losses(sums_4, f"/{task}")
        return figures

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        return {}

    def _counts(self, packs: Sequence[PackedBatch]) -> dict[str, float]:
        """Return the denominators of the losses, summed over all ranks."""
        rank_counts = torch.tensor(
            [[pack.counts[kind] for kind in KINDS] for pack in packs], dtype=torch.float64
        )
        total = self._ranks.sum(rank_counts.sum(dim=0).to(self.device)).tolist()
        return dict(zip(KINDS, total, strict=True))

    def _sums(self, packs: Sequence[PackedBatch]) -> Tensor:
        """Sums of the losses of both kinds, and what they are to be divided by, over all ranks: `[4]`."""
        sums_4 = torch.zeros(4, dtype=torch.float64)
        for pack in packs:
            losses = self._forward(pack.to(self.device))
            both = [*(float(losses[kind]) for kind in KINDS), *(pack.counts[kind] for kind in KINDS)]
            sums_4 += torch.tensor(both, dtype=torch.float64)
        return self._ranks.sum(sums_4.to(self.device)).cpu()


def _mean_losses(sums_4: Tensor, suffix: str) -> dict[str, float]:
    sums, counts = sums_4[:2].tolist(), sums_4[2:].tolist()
    return {f"{kind}_loss{suffix}": s / n for kind, s, n in zip(KINDS, sums, counts, strict=True) if n}
