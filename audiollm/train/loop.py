"""The training loop: a task gives modules, batches and losses; the loop does the rest.

Everything random in step `n` is drawn from a generator seeded by (seed, n): there is no loader position and
no RNG state to save, and a killed run resumes to the same weights, bit for bit at the same thread count.

A task may have several optimizers (a GAN has two). Its `updates` is a generator that the loop goes through
within a step: each loss is computed only when the update before it is done, and its gradient reaches only
the parameters of its own optimizer.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn

from audiollm.files import read_json, write_json
from audiollm.runner import Context, StageError
from audiollm.train.budget import step_cost
from audiollm.train.checkpoint import load_checkpoint, save_checkpoint
from audiollm.train.monitor import Monitor
from audiollm.train.optim import Precision, autocast, build_optimizer, cosine_schedule, update_ema

Optimizers = Mapping[str, torch.optim.Optimizer]
Figures = dict[str, float | Tensor]


@dataclass(frozen=True)
class LoopConfig:
    """How to optimise. The budget is one of `steps`, `minutes` and `cpu_minutes`.

    Minutes become a number of steps by a short calibration at the start; they count the training steps
    alone (calibration, evaluation and checkpoints come on top).
    """

    seed: int
    steps: int | None
    minutes: float | None
    learning_rate: float
    cpu_minutes: float | None = None
    """CPU time of this process, all threads together: fair where other programs share the machine."""
    rate_factors: Mapping[str, float] = field(default_factory=dict)
    """By optimizer: a factor on `learning_rate`, 1 where not given."""
    warmup_steps: int = 100
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    clip_norm: float = 1.0
    ema_decay: float = 0.0
    """0 for no averaging; otherwise the averaged weights are what the run ends with."""
    precision: Precision = "auto"
    log_every: int = 20
    evaluate_every: int = 0
    checkpoint_seconds: float = 20.0

    def __post_init__(self) -> None:
        if sum(budget is not None for budget in (self.steps, self.minutes, self.cpu_minutes)) != 1:
            raise ValueError("give one of steps, minutes and cpu_minutes")


class Update(NamedTuple):
    """One optimizer step that a task asks for."""

    loss: Tensor
    """The scalar to minimise."""
    figures: Mapping[str, float | Tensor]
    """For the log, by plain names: those of a step's updates are put together, the later one wins."""
    optimizer: str = "main"


class Task(Protocol):
    """What the loop needs to train something."""

    def modules(self) -> dict[str, nn.Module]:
        """All that is trained or saved. What changes in training must be a parameter or a persistent buffer.

        The loop switches all of them between train and eval mode: a frozen teacher is better kept out.
        """

    def optimizers(self) -> dict[str, list[str]]:
        """By optimizer, the names of its modules. `main` is required; its parameters alone are averaged.

        Every module with a trainable parameter belongs to one optimizer; frozen parameters to none.
        """

    def batch(self, step: int, generator: torch.Generator) -> Any:
        """The batch of that step, a function of (step, generator) alone."""

    def updates(self, batch: Any, step: int, steps: int) -> Iterator[Update]:
        """The updates of that step, in order; the code after a `yield` sees the updated weights.

        An optimizer without an update does not step.
        """

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Figures on held-out data; called with modules in eval mode and without gradients."""

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        """What a person should be warned of: kind -> text. Each kind is told once a run.

        `figures` is a row of `metrics.jsonl`: a step's figures, or those of an evaluation (`evaluation/...`).
        """


def step_generator(seed: int, step: int, purpose: str = "") -> torch.Generator:
    """A generator that depends on (seed, purpose, step) alone."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def train(
    task: Task, config: LoopConfig, folder: Path, context: Context, device: torch.device
) -> dict[str, Any]:
    """Train to the end of the budget, resuming from `folder/checkpoint` where there is one.

    Returns:
        figures: `steps`, `parameters` and `cpu_seconds`, the CPU time of the training steps (evaluation and
            checkpoints not counted; over all attempts, without what a kill undid).

    Raises:
        StageError: a loss or a gradient is no longer finite.
        ValueError: the task's `optimizers` do not fit its modules, or an update or a rate names none of them.
    """
    modules = task.modules()
    optimizers = _build_optimizers(task, config)
    ema = _initial_ema(task) if config.ema_decay else {}
    state = load_checkpoint(folder / "checkpoint", modules, optimizers, ema)
    steps = _budget(task, config, folder, context, device)
    step, cpu_seconds = (state["step"], state["cpu_seconds"]) if state else (0, 0.0)
    if step:
        context.say(f"resuming at step {step} of {steps}")
    monitor = Monitor(folder, resume_step=step)
    watch = FiniteWatch(folder, monitor)
    started, first = time.monotonic(), step
    last_saved = started
    with context.progress("training", steps) as bar:
        bar.update(bar.task_ids[0], completed=step)
        while step < steps:
            cpu_started = time.process_time()
            try:
                figures = _train_step(task, config, optimizers, step, steps, device)
            except FloatingPointError as error:
                watch.check()  # where an earlier step is the cause, it is named
                watch.stop(step + 1, str(error))
            if ema:
                update_ema(ema, modules, min(config.ema_decay, (step + 1) / (step + 10)))
            cpu_seconds += time.process_time() - cpu_started
            step += 1
            watch.add(step, figures)
            if step % config.log_every == 0 or step == steps:
                watch.check()
                _report(task, {key: float(value) for key, value in figures.items()}, step, monitor, context)
            if config.evaluate_every and (step % config.evaluate_every == 0 or step == steps):
                _report(task, _evaluate(task, modules, ema, step), step, monitor, context)
            if time.monotonic() - last_saved > config.checkpoint_seconds or step == steps:
                watch.check()  # a checkpoint is worth something only with sound weights
                kept = {"step": step, "cpu_seconds": cpu_seconds}
                save_checkpoint(folder / "checkpoint", modules, optimizers, ema, kept)
                last_saved = time.monotonic()
            bar.update(bar.task_ids[0], completed=step)
    monitor.close()
    _load_ema(ema, modules)
    for module in modules.values():
        module.eval()
    parameters = sum(p.numel() for module in modules.values() for p in module.parameters())
    seconds = (time.monotonic() - started) / max(1, step - first)
    context.say(f"{parameters / 1e6:.1f} M parameters, {steps} steps, {seconds * 1000:.0f} ms a step")
    return {"steps": steps, "parameters": parameters, "cpu_seconds": round(cpu_seconds, 3)}


def _train_step(
    task: Task, config: LoopConfig, optimizers: Optimizers, step: int, steps: int, device: torch.device
) -> Figures:
    for module in task.modules().values():
        module.train()
    torch.manual_seed(step_generator(config.seed, step, "dropout").initial_seed())
    batch = task.batch(step, step_generator(config.seed, step, "batch"))
    rate = config.learning_rate * cosine_schedule(step, steps, config.warmup_steps)
    figures: Figures = {}
    updates = iter(task.updates(batch, step, steps))
    while True:
        with autocast(config.precision, device):  # entered anew: casts of weights are cached within one
            update = next(updates, None)
        if update is None:
            return {**figures, "learning_rate": rate}
        figures.update(_apply(update, config, optimizers, rate))
        del update  # with its loss goes what is left of the graph


def _apply(update: Update, config: LoopConfig, optimizers: Optimizers, rate: float) -> Figures:
    """One optimizer step. Returns the update's figures, its loss and its gradient's norm."""
    name = update.optimizer
    if name not in optimizers:
        raise ValueError(f"an update names the optimizer {name!r}; the task has {sorted(optimizers)}")
    optimizer = optimizers[name]
    for group in optimizer.param_groups:
        group["lr"] = rate * config.rate_factors.get(name, 1.0)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    optimizer.zero_grad(set_to_none=True)
    # the generator's loss goes through the discriminator: its weights' gradients are not even computed
    update.loss.backward(inputs=parameters)
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm)
    optimizer.step()
    suffix = "" if name == "main" else f"/{name}"
    figures = {k: v.detach() if isinstance(v, Tensor) else v for k, v in update.figures.items()}
    return {f"loss{suffix}": update.loss.detach(), **figures, f"gradient_norm{suffix}": norm}


def _evaluate(
    task: Task, modules: Mapping[str, nn.Module], ema: dict[str, Tensor], step: int
) -> Mapping[str, float]:
    for module in modules.values():
        module.eval()
    kept = _load_ema(ema, modules)
    with torch.no_grad():
        figures = {f"evaluation/{key}": value for key, value in task.evaluate(step).items()}
    _load_ema(kept, modules)
    return figures


def _report(task: Task, figures: Mapping[str, float], step: int, monitor: Monitor, context: Context) -> None:
    """Write the figures of `step` steps done, and the alarms that they give rise to."""
    monitor.write(step - 1, figures)
    for kind, text in task.alarms(figures, step).items():
        if monitor.alarm(step - 1, kind, text):
            context.say(f"alarm at step {step}, {kind}: {text}")


class FiniteWatch:
    """Keeps the figures of the last steps until they are checked: a look at each would stall a GPU."""

    def __init__(self, folder: Path, monitor: Monitor) -> None:
        self._folder, self._monitor = folder, monitor
        self._unchecked: list[tuple[int, Figures]] = []

    def add(self, step: int, figures: Figures) -> None:
        self._unchecked.append((step, figures))

    def check(self) -> None:
        """Raises: StageError: a loss or a gradient's norm was not finite."""
        for step, figures in self._unchecked:
            for key, value in figures.items():
                what, _, optimizer = key.partition("/")
                if what in ("loss", "gradient_norm") and not math.isfinite(value):
                    whose = f" of the {optimizer}" if optimizer else ""
                    listed = ", ".join(f"{k} {float(v):.4g}" for k, v in figures.items())
                    self.stop(
                        step,
                        f"the {what.replace('_', ' ')}{whose} is {float(value)} at step {step} ({listed})",
                    )
        self._unchecked.clear()

    def stop(self, step: int, text: str) -> NoReturn:
        """Record the alarm and end the run. Raises: StageError."""
        self._monitor.alarm(step - 1, "not finite", text)
        raise StageError(text, f"lower the learning rate; the last checkpoint is kept in {self._folder}")


def _build_optimizers(task: Task, config: LoopConfig) -> dict[str, torch.optim.Optimizer]:
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
    return {
        optimizer: build_optimizer([modules[name] for name in names], config.weight_decay, config.betas)
        for optimizer, names in groups.items()
    }


def _initial_ema(task: Task) -> dict[str, Tensor]:
    modules = task.modules()
    return {
        f"{name}.{key}": p.detach().clone()
        for name in task.optimizers()["main"]
        for key, p in modules[name].named_parameters()
        if p.requires_grad
    }


@torch.no_grad()
def _load_ema(ema: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Write averaged weights into the modules; returns what was there."""
    kept: dict[str, Tensor] = {}
    for name, module in modules.items():
        for key, parameter in module.named_parameters():
            full = f"{name}.{key}"
            if full in ema:
                kept[full] = parameter.detach().clone()
                parameter.copy_(ema[full])
    return kept


def _budget(task: Task, config: LoopConfig, folder: Path, context: Context, device: torch.device) -> int:
    """The number of steps: as given, or measured once from minutes and then kept."""
    if config.steps is not None:
        return config.steps
    kept = folder / "budget.json"
    if not kept.exists():
        optimizers = _build_optimizers(task, config)
        cost = step_cost(
            lambda step, steps: _train_step(task, config, optimizers, step, steps, device),
            task.modules(),
            device,
        )
        budget, minutes, each = ("minutes", config.minutes, cost.seconds)
        if config.cpu_minutes is not None:
            budget, minutes, each = ("cpu_minutes", config.cpu_minutes, cost.cpu_seconds)
        assert minutes is not None
        steps = max(2 * config.warmup_steps, int(minutes * 60 / each))
        measured = {"seconds_per_step": cost.seconds, "cpu_seconds_per_step": cost.cpu_seconds}
        write_json(kept, {budget: minutes, **measured, "steps": steps})
        name = budget.replace("cpu_", "CPU ")
        context.say(f"{minutes:g} {name} are {steps} steps of {each * 1000:.0f} ms here")
    return int(read_json(kept)["steps"])
