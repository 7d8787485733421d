"""Minutes into steps: what a step costs, measured by trials over the whole schedule that leave no trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from audiollm.files.atomic import DamagedFile, read_record, write_json
from audiollm.recipe.runner import Context
from audiollm.train.settings import LoopConfig

IMAGINED_STEPS = 1000
TRIALS_PER_THIRD = 10
DROPPED_PER_SIDE = 2


class StepCost(NamedTuple):
    """Average cost of a step over a whole run."""

    seconds: float
    """On the wall clock."""
    cpu_seconds: float
    """CPU seconds of this process, all its threads together."""


def steps_of_budget(
    config: LoopConfig, folder: Path, context: Context, measure: Callable[[], StepCost]
) -> int:
    """The number of steps: as given, or measured once from minutes and then kept in `folder/budget.json`.

    Every rank measures, as a step needs them all; the first one's figures count.
    """
    ranks, path = context.ranks, folder / "budget.json"
    if config.steps is not None:
        return config.steps
    if not ranks.of_first(path.exists()):
        with context.progress("measuring what a step costs", None):
            cost = measure()
        budget, minutes, seconds_per_step = ("minutes", config.minutes, cost.seconds)
        if config.cpu_minutes is not None:
            budget, minutes, seconds_per_step = ("cpu_minutes", config.cpu_minutes, cost.cpu_seconds)
        assert minutes is not None
        steps = max(2 * (config.warmup_steps or 1), int(minutes * 60 / seconds_per_step))
        measured = {"seconds_per_step": cost.seconds, "cpu_seconds_per_step": cost.cpu_seconds}
        if ranks.first:
            write_json(path, {budget: minutes, **measured, "steps": steps})
        name = budget.replace("cpu_", "CPU ")
        context.say(f"{minutes:g} {name} are {steps} steps of {seconds_per_step * 1000:.0f} ms here")
    return int(ranks.of_first(_kept_steps(path) if ranks.first else 0))


def _kept_steps(path: Path) -> int:
    remedy = "restore it, or remove it: what a step costs is then measured again"
    steps = read_record(path, remedy).get("steps")
    if not isinstance(steps, int) or steps < 1:
        raise DamagedFile(path, "it gives no number of steps", remedy)
    return steps


def step_cost(
    run_step: Callable[[int, int], object], modules: Mapping[str, nn.Module], device: torch.device
) -> StepCost:
    """The mean cost of `run_step(step, steps)` over a schedule of `IMAGINED_STEPS` steps.

    Steps differ in cost: a run has phases (an adversary that begins late), and within one some steps do more.
    So the trials lie all over the schedule, one at a random place of each of its equal parts. Of each third
    the cheapest and dearest trials are dropped, so that what happens once (codebooks begun by k-means, a
    kernel compiled, another program's burst) does not count, and the rest are averaged: a median would take
    one side of what alternates. Parameters, buffers, gradients and random state are put back.
    """
    trials = 3 * TRIALS_PER_THIRD
    generator = torch.Generator().manual_seed(0)
    shares = (torch.arange(trials) + torch.rand(trials, generator=generator)) / trials
    seconds, cpu_seconds = [], []
    with _no_trace(modules, device):
        for step in (0, IMAGINED_STEPS - 1):  # not timed: first calls allocate and compile
            run_step(step, IMAGINED_STEPS)
        for step in (shares * IMAGINED_STEPS).long().tolist():
            started, cpu_started = _now(device)
            run_step(step, IMAGINED_STEPS)
            ended, cpu_ended = _now(device)
            seconds.append(ended - started)
            cpu_seconds.append(cpu_ended - cpu_started)
    return StepCost(_robust_mean(seconds), _robust_mean(cpu_seconds))


def _now(device: torch.device) -> tuple[float, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic(), time.process_time()


def _robust_mean(costs: Sequence[float]) -> float:
    """The mean over the schedule's thirds, each without its `DROPPED_PER_SIDE` lowest and highest."""
    kept_costs: list[float] = []
    for begin in range(0, len(costs), TRIALS_PER_THIRD):
        third = sorted(costs[begin : begin + TRIALS_PER_THIRD])
        kept_costs += third[DROPPED_PER_SIDE:-DROPPED_PER_SIDE]
    return sum(kept_costs) / len(kept_costs)


@contextmanager
def _no_trace(modules: Mapping[str, nn.Module], device: torch.device) -> Iterator[None]:
    """Puts parameters, buffers (those not saved included), gradients and random state back."""
    before = {
        name: {key: tensor.detach().clone() for key, tensor in _iterate_tensors(module)}
        for name, module in modules.items()
    }
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for name, module in modules.items():
            module.zero_grad(set_to_none=True)
            for key, tensor in _iterate_tensors(module):
                tensor.copy_(before[name][key])


def _iterate_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
