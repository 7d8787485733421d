"""Steps without anything to train on: each is skipped, and too many in a row end the run."""

from __future__ import annotations

import torch
from torch import nn

from audiollm.errors import StageError


class SkippedSteps(nn.Module):
    """Counts the skipped steps in a row. A module of a buffer: the count is in every checkpoint.

    Args:
        most: number of skipped steps in a row that ends the run.
    """

    def __init__(self, max_skipped: int) -> None:
        super().__init__()
        self._max_skipped = max_skipped
        self.register_buffer("in_a_row", torch.zeros((), dtype=torch.int64))

    def count(self, is_skipped: bool) -> None:
        """Take notice of a step.

        Raises:
            StageError: it is one skipped step too many.
        """
        row = self.get_buffer("in_a_row")
        row.copy_(row + 1 if is_skipped else torch.zeros_like(row))
        if int(row) >= self._max_skipped:
            raise StageError(
                f"{self._max_skipped} steps in a row had nothing to train on: no answer with a reward, or equal "
                "rewards in every group",
                "see rollouts/ and set_aside.jsonl; take other prompts or rewards, a higher temperature, refill, or "
                "raise max_skipped_steps",
            )
