"""The reference of a training follows its policy: every so many steps it becomes the policy, or is mixed with it.

Source: TR-DPO, arXiv 2404.09656 (soft and hard updates); TRL's `sync_ref_model` (every 512 steps, mixed by 0.6).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from audiollm.train.loop.whole import Read, SavedTensors, fill_tensors


class ReferenceRefresh:
    """Mixes the policy's weights into the reference's, adapters merged.

    Args:
        policy: the plain model that is trained, with or without LoRA adapters inside.
        reference: a frozen model of its own, whole on every rank.
        every: steps of the training from one refresh to the next.
        mix: the policy's share of the mixture; 1: the reference becomes the policy.
    """

    def __init__(self, policy: nn.Module, reference: nn.Module, every: int, mix: float) -> None:
        self._policy, self._every, self._mix = policy, every, mix
        self._weights = reference.state_dict(keep_vars=True)
        self.saved = SavedTensors(self._weights)
        """The reference's weights, for the checkpoint."""
        self._read: Read = lambda tensor: tensor

    def read_by(self, read: Callable[[Tensor], Tensor]) -> None:
        """Take the strategy's way to read whole tensors."""
        self._read = read

    def after(self, step: int) -> bool:
        """Refresh the reference where it is due after a step; return whether it was. All ranks must call it.

        Args:
            step: number of the step that is done, from 0.
        """
        is_due = (step + 1) % self._every == 0
        if is_due:
            fill_tensors(self._policy, self._read, self._weights, self._mix)
        return is_due
