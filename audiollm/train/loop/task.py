"""The contract between a task, which is trained, and the loop.

A task may have several optimizers (a GAN has two). Its `updates` is a generator that the loop goes through
within a step: each loss is computed only when the update before it is done, and its gradient reaches only
the parameters of its own optimizer.

The losses of all micro-batches and of all ranks add up to the loss of the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from audiollm.recipe.ranks import Ranks
from audiollm.train.settings import LoopConfig

Figures = dict[str, float | Tensor]

PHASE_PREFIX = "seconds/"
"""Begins the figures that tell how long a phase of a step took (`seconds/rollout`): they go to `performance.jsonl`."""


class Update(NamedTuple):
    """One optimizer step that a task asks for."""

    loss: Tensor | Iterable[Tensor]
    """The scalar to minimise; or several that add up to it, one a micro-batch: each is drawn, goes through its
    backward pass, and is let go before the next (gradient accumulation)."""
    figures: Mapping[str, float | Tensor]
    """For the log, by plain names: those of a step's updates are put together, the later one wins. Read when the
    losses are done. `tokens` and `flops` (of this rank, in this step) become throughput and use of the device, and
    `seconds/<phase>` the time by phase."""
    optimizer: str = "main"
    losses: int = 1
    """Number of losses in `loss`: the ranks meet in the last one's backward pass, so all must give as many. 0: the
    optimizer does not step, and the figures alone are told."""


class Task(Protocol):
    """Modules, batches and losses, as the loop needs them to train something."""

    def modules(self) -> dict[str, nn.Module]:
        """All that is trained or saved. What changes in training must be a parameter or a persistent buffer.

        The state of a task itself (a running mean, a controller) is a module of buffers without an optimizer: it is
        then in every checkpoint, goes back with a roll-back, and is put back after the trial steps of a budget.

        The loop switches all of them between train and eval mode: a frozen teacher is better kept out.
        """

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        """Takes the modules as the strategy wrapped them: losses are computed through these.

        Called once, before the first batch. `modules` goes on giving the unwrapped ones.
        """

    def optimizers(self) -> dict[str, list[str]]:
        """By optimizer, the names of its modules. `main` is required; its parameters alone are averaged.

        Every module with a trainable parameter belongs to one optimizer; frozen parameters to none.
        """

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks) -> Any:
        """This rank's share of that step's batch: a function of (step, generator, ranks), and of what is in `modules`.

        A task that generates what it is trained on reads its weights and its state here. Both are in every checkpoint,
        and are put back by a roll-back and after the trial steps of a budget, so a step that is done again has the same
        batch. Nothing else may enter it: no clock, no counter outside of `modules`, no file that a step writes. Modules
        are in train mode. The generator differs from rank to rank; what must not is drawn from `step_generator` of
        one's own.
        """

    def updates(self, batch: Any, step: int, steps: int) -> Iterator[Update]:
        """The updates of that step, in order; the code after a `yield` sees the updated weights.

        An optimizer without an update does not step. May raise FloatingPointError, on all ranks or on none.
        """

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Figures on held-out data; called on all ranks, with modules in eval mode and without gradients."""

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        """Return warnings for a person: kind -> text. Each kind is told once a run.

        `figures` is a row of `metrics.jsonl`: a step's figures, or those of an evaluation (`evaluation/...`).
        """


@runtime_checkable
class ReadsWeights(Protocol):
    """A task that reads whole weights while it trains, whatever the strategy (to fill a `WholeCopy`)."""

    def read_by(self, read: Callable[[Tensor], Tensor]) -> None:
        """Take `Strategy.read`, which gathers a parameter or buffer when all ranks call it; called after `adopt`."""


class Board(Protocol):
    """Where figures are drawn; one of a user's own is named `package.module:Class` in `report_to`."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        """Open it for a stage.

        Args:
            folder: the stage's folder.
            resume_step: what an earlier attempt drew from this step on is dropped; 0: nothing was.
        """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Draw figures of a step."""

    def text(self, step: int, key: str, text: str) -> None:
        """Show a text: an alarm."""

    def table(self, step: int, key: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table of texts: answers to held-out prompts."""

    def audio(self, step: int, key: str, samples_1N: Tensor, sample_rate: int) -> None:
        """Show a sound."""

    def close(self) -> None:
        """Write what is held back."""


@runtime_checkable
class DrawsOnBoards(Protocol):
    """A task that shows sounds or answers at its evaluations."""

    def draw_on(self, boards: Sequence[Board]) -> None:
        """Take the boards of the first rank; called before the first step, and again after a rollback."""


@runtime_checkable
class StopsEarly(Protocol):
    """A task that can end a training before its last step."""

    def stop_reason(self, step: int) -> str | None:
        """Return why the training ends after the evaluation at `step`, or None where it goes on.

        Called on every rank after each evaluation and when a run resumes; every rank must return the same, and a
        resumed run the same as the run that was killed.
        """


def step_generator(seed: int, step: int, purpose: str = "", rank: int = 0) -> torch.Generator:
    """A generator that depends on (seed, purpose, step, rank) alone."""
    text = f"{seed}/{purpose}/{step}" + (f"/{rank}" if rank else "")
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def check_groups(task: Task, config: LoopConfig) -> None:
    """Raises: ValueError: the task's optimizers do not fit its modules, or a rate names none of them."""
    modules, groups = task.modules(), task.optimizers()
    owned = [name for names in groups.values() for name in names]
    trained = {n for n, module in modules.items() if any(p.requires_grad for p in module.parameters())}
    wrong = (set(owned) - set(modules)) | (trained - set(owned)) | {n for n in owned if owned.count(n) > 1}
    if wrong or "main" not in groups:
        raise ValueError(
            f"optimizers {groups} do not fit the modules {sorted(modules)}: each trained module belongs to one, "
            f"and `main` must be there; see {sorted(wrong) or 'main'}"
        )
    if unknown := set(config.rate_factors) - set(groups):
        raise ValueError(f"rate_factors name {sorted(unknown)}; the task's optimizers are {sorted(groups)}")
