"""Reconstruction losses, and the share of a global batch that one rank trains on.

A task's losses of all ranks add up (`audiollm/train/loop/task.py`). So each rank multiplies a mean over its own rows
by its share of the rows, and the sum over ranks is the mean over the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.errors import StageError
from audiollm.recipe.ranks import ALONE, Ranks
from tokenizer.native.layers import mel_filters
from tokenizer.native.operations import magnitudes
from tokenizer.quantizers.codebooks import at_least_float32

WINDOWS = (256, 512, 1024, 2048)
MELS = (20, 40, 80, 120)


class ReconstructionLoss(nn.Module):
    """Mean over four scales of L1 on log-mel, and the same on log STFT magnitude (natural logarithms)."""

    def __init__(self, sample_rate: int, clamp: float = 1e-3) -> None:
        super().__init__()
        self.clamp = clamp
        for window, mels in zip(WINDOWS, MELS, strict=True):
            self.register_buffer(
                f"filters_{window}", mel_filters(sample_rate, window, mels), persistent=False
            )
            self.register_buffer(f"window_{window}", torch.hann_window(window), persistent=False)

    def forward(
        self, given_BN: Tensor, target_BN: Tensor, windows: Sequence[int] = WINDOWS
    ) -> dict[str, Tensor]:
        """`{"mel": ..., "stft": ...}`: mean absolute differences of `[B, N]` waveforms over these scales."""
        mel, stft = given_BN.new_zeros(()), given_BN.new_zeros(())
        for window in windows:
            given_mel, given_stft = self._logs(given_BN, window)
            with torch.no_grad():
                target_mel, target_stft = self._logs(target_BN, window)
            mel = mel + (given_mel - target_mel).abs().mean() / len(windows)
            stft = stft + (given_stft - target_stft).abs().mean() / len(windows)
        return {"mel": mel, "stft": stft}

    def _logs(self, samples_BN: Tensor, window: int) -> tuple[Tensor, Tensor]:
        hop = window // 4
        margin = window // 2
        padded = functional.pad(at_least_float32(samples_BN), (margin, margin + -samples_BN.shape[1] % hop))
        with torch.autocast(samples_BN.device.type, enabled=False):
            magnitude_BTF = magnitudes(padded, getattr(self, f"window_{window}"), hop)
            mel_BTM = magnitude_BTF @ getattr(self, f"filters_{window}")
        return mel_BTM.clamp_min(self.clamp).log(), magnitude_BTF.clamp_min(self.clamp).log()


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
