"""Optimizer steps of a task of the training loop, one at a time, for benchmarks that take turns with a peer."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from audiollm.recipe.ranks import ALONE
from audiollm.train.loop.modules import announce_weights, checkpoint_activations
from audiollm.train.loop.optim import autocast, build_optimizer
from audiollm.train.loop.task import Task
from audiollm.train.parallel.strategy import choose_strategy
from audiollm.train.settings import LoopConfig, Precision


class Step(NamedTuple):
    """Loss of an optimizer step, and its gradient's norm before clipping."""

    loss: float
    norm: float


class TaskSteps:
    """A task with its strategy and optimizer, stepped as the training loop does.

    Args:
        checkpointed: layers are computed again in the backward pass.
        device: where the task's modules are.
    """

    def __init__(
        self,
        task: Task,
        learning_rate: float,
        checkpointed: bool = False,
        device: torch.device | None = None,
        precision: Precision = "fp32",
    ) -> None:
        self._task, self._rate, self._step = task, learning_rate, 0
        self._device, self._precision = device or torch.device("cpu"), precision
        config = LoopConfig(learning_rate=learning_rate, steps=10, weight_decay=0.0)
        self._clip_norm = config.clip_norm
        self.modules = task.modules()
        """The task's modules by name, as they were before the strategy wrapped them."""
        if checkpointed:
            checkpoint_activations(self.modules)
        self._strategy = choose_strategy("auto", ALONE, self._device, None, config.clip_norm)
        named = [(f"{name}.{key}", p) for name, m in self.modules.items() for key, p in m.named_parameters()]
        self._wrapped = self._strategy.prepare(
            self.modules,
            task.optimizers(),
            lambda: {"main": build_optimizer(named, config.weight_decay, config.betas)},
        )
        task.adopt(self._wrapped)
        self.seconds: dict[str, float] = {}
        """CPU-seconds of the last step by phase: `batch`, `score` (passes before the losses) and `update`; on a GPU, by
        the clock."""
        self.batch: Any = None
        """The batch of the last step, as the task made it."""

    def __call__(self) -> Step:
        """Take an optimizer step."""
        for module in self._wrapped.values():
            module.train()
        optimizer = self._strategy.optimizers["main"]
        optimizer.zero_grad(set_to_none=True)
        began = self._now()
        self.batch = batch = self._task.batch(self._step, torch.Generator(), ALONE)
        batched = self._now()
        with autocast(self._precision, self._device):
            (update,) = self._task.updates(batch, self._step, 10)
        scored = self._now()
        for group in optimizer.param_groups:
            group["lr"] = self._rate
        total = 0.0
        losses = iter([update.loss] if isinstance(update.loss, Tensor) else update.loss)
        for number in range(1, update.losses + 1):
            last = number == update.losses
            with self._strategy.accumulate("main", last):
                with autocast(self._precision, self._device):
                    loss = next(losses)
                self._strategy.backward(loss, "main", last)
            total += float(loss.detach())
            del loss
        next(losses, None)
        norm = float(self._strategy.step("main", self._clip_norm))
        announce_weights(self.modules.values())
        self._step += 1
        self.seconds = {"batch": batched - began, "score": scored - batched, "update": self._now() - scored}
        return Step(total, norm)

    def _now(self) -> float:
        if self._device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(self._device)
        return time.perf_counter()
