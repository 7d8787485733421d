"""Copies of the policy's weights: those that engines sample from, those of the step ahead, the reference that follows.

Sampling ahead: step n trains on answers that were sampled by the weights from before the updates of step n - 1; those
of the first step are sampled by the weights that it trains. The weights that sample are a state of the training: they
are in its checkpoints, and a step that is done again, after a kill or a roll-back, samples the same answers from them
again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from audiollm.errors import BadSample
from audiollm.families.rollout import RolloutEngine
from audiollm.rl.rollouts.process import ProcessRollouts
from audiollm.train.loop.whole import Read, SavedTensors, WholeCopy, fill_tensors


class SampledWeights:
    """The weights of a training's engine.

    Args:
        engine: is told whenever the weights are others.
        whole: the copy of the weights that the engine reads, where a strategy spreads them over ranks; None: the
            engine reads those that are trained.
    """

    def __init__(self, engine: RolloutEngine[Any], whole_copy: WholeCopy | None) -> None:
        self._engine, self._whole_copy = engine, whole_copy

    def read_by(self, read: Read) -> None:
        """Take the strategy's way to read whole tensors."""
        if self._whole_copy is not None:
            self._whole_copy.read_by(read)

    def fill(self) -> None:
        """Bring the engine's weights up to those of now; all ranks must call it."""
        if self._whole_copy is not None:
            self._whole_copy.fill()
        self._engine.weights_changed()


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


Prompts = tuple[list[Any], list[BadSample]]
"""The prompts of a step on this rank, and those that turned out bad."""

NEVER = -1
"""Value of `SamplingWeights.step` before the first step."""


class SamplingWeights(SavedTensors):
    """The weights that sample, as buffers, with the first step that they sample."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.register_buffer("step", torch.tensor(NEVER))


class StartsSteps(Protocol):
    """Samples the answers of steps, and can be asked for those of a step in advance."""

    def start(self, prompts: list[Any], step: int) -> None:
        """Begin to sample the answers of a step; sampling the step takes them."""


class SamplesAhead:
    """Keeps the weights that sample, and asks for the answers of the next step.

    Args:
        policy: the plain model that is trained, with or without LoRA adapters inside.
        engine: samples in a process of its own, from the weights that are kept here.
        read_prompts: step -> its prompts.
        maker: samples steps with `engine`.
    """

    def __init__(
        self,
        policy: nn.Module,
        engine: ProcessRollouts[Any],
        read_prompts: Callable[[int], Prompts],
        maker: StartsSteps,
    ) -> None:
        self._policy, self._engine = policy, engine
        self._read_prompts, self._maker = read_prompts, maker
        self._weights = engine.weights
        self.saved = SamplingWeights(self._weights)
        """The weights that sample, for the checkpoint."""
        self._read: Read = lambda tensor: tensor
        self._started: tuple[int, int] | None = None
        self._next: tuple[int, Prompts] | None = None
        self._before: int | None = None

    def read_by(self, read: Callable[[Tensor], Tensor]) -> None:
        """Take the strategy's way to read whole tensors."""
        self._read = read

    def prompts(self, step: int) -> Prompts:
        """Return the prompts of a step that is about to be sampled. All ranks must call it.

        Answers that were begun for another step, or from other weights than those that are kept, are dropped.
        """
        if self._first_step == NEVER:
            self._fill(step)
        if self._started != (step, self._first_step):
            self._engine.forget()
        read_ahead = self._next
        self._started = self._next = None
        return read_ahead[1] if read_ahead is not None and read_ahead[0] == step else self._read_prompts(step)

    def go_on(self, step: int, is_last: bool) -> None:
        """Keep the present weights, and begin to sample the next step from them. All ranks must call it.

        Called when the answers of a step are there, before its updates. Steps that are tried out of their order, to
        find out what they cost, begin nothing.
        """
        self._fill(step + 1)
        in_order = self._before in (None, step - 1)
        self._before = step
        if is_last or not in_order:
            return
        prompts = self._read_prompts(step + 1)
        self._maker.start(prompts[0], step + 1)
        self._started, self._next = (step + 1, self._first_step), (step + 1, prompts)

    @property
    def _first_step(self) -> int:
        return int(self.saved.get_buffer("step"))

    def _fill(self, step: int) -> None:
        fill_tensors(self._policy, self._read, self._weights)
        self.saved.get_buffer("step").fill_(step)
        self._engine.weights_changed()
