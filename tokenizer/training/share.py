"""The share of a global batch that one rank trains on, and losses as parts of the global batch's mean.

A task's losses of all ranks add up (`audiollm/train/loop/task.py`). So each rank multiplies a mean over its own rows
by its share of the rows, and the sum over ranks is the mean over the global batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from audiollm.errors import StageError
from audiollm.recipe.ranks import ALONE, Ranks


@dataclass(frozen=True)
class BatchShare:
    """The rows of a batch of `batch_size` that a rank trains on: consecutive ones, in the order of the ranks."""

    batch_size: int
    ranks: Ranks = ALONE

    def check(self) -> None:
        """Raises: StageError: fewer rows than ranks, so that a rank would have none."""
        if self.batch_size < self.ranks.world:
            raise StageError(
                f"batch_size is {self.batch_size}, and {self.ranks.world} processes train",
                "raise batch_size to the number of processes, or start fewer",
                2,
            )

    @property
    def rows(self) -> slice:
        """This rank's rows of the global batch."""
        rank, world = self.ranks.rank, self.ranks.world
        return slice(rank * self.batch_size // world, (rank + 1) * self.batch_size // world)

    @property
    def fraction(self) -> float:
        """This rank's rows, as a fraction of the global batch; 1.0 for a process that is alone."""
        return (self.rows.stop - self.rows.start) / self.batch_size

    def scale_mean(self, mean: Tensor) -> Tensor:
        """This rank's part of the global mean, from the mean over this rank's rows."""
        return mean * self.fraction

    def figure(self, scaled_mean: Tensor) -> Tensor:
        """The figure to log for a part: the loop averages figures over ranks, which gives the global mean."""
        return scaled_mean.detach() * self.ranks.world

    def global_mean(self, mean: Tensor) -> Tensor:
        """The mean over the global batch, on every rank, from the mean over this rank's rows; all ranks call it."""
        return self.ranks.sum(self.scale_mean(mean.detach()))

    def own_batches(self, batches: int) -> range:
        """The indices of the whole batches that this rank draws, where ranks share out `batches` of them in order."""
        rank, world = self.ranks.rank, self.ranks.world
        return range(rank * batches // world, (rank + 1) * batches // world)
