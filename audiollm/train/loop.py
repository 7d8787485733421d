"""The training loop: a task gives modules, batches and losses; the loop does the rest.

Everything random in step `n` is drawn from a generator seeded by (seed, n): there is no loader position and
no RNG state to save, and a killed run resumes to the same weights, bit for bit at the same thread count.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from audiollm.files import read_json, write_json
from audiollm.runner import Context, StageError
from audiollm.train.checkpoint import load_checkpoint, save_checkpoint
from audiollm.train.monitor import Monitor
from audiollm.train.optim import Precision, autocast, build_optimizer, cosine_schedule, update_ema


@dataclass(frozen=True)
class LoopConfig:
    """How to optimise. `steps` and `minutes`: one of them; minutes become steps by a short calibration."""

    seed: int
    steps: int | None
    minutes: float | None
    learning_rate: float
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


class Task(Protocol):
    """What the loop needs to train something."""

    def modules(self) -> dict[str, nn.Module]: ...

    def batch(self, step: int, generator: torch.Generator) -> Any:
        """The batch of that step, a function of (step, generator) alone."""

    def loss(self, batch: Any, step: int, steps: int) -> tuple[Tensor, Mapping[str, float | Tensor]]:
        """The loss and figures for the log."""

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Figures on held-out data; called with modules in eval mode and without gradients."""


def step_generator(seed: int, step: int, purpose: str = "") -> torch.Generator:
    """A generator that depends on (seed, purpose, step) alone."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def train(
    task: Task, config: LoopConfig, folder: Path, context: Context, device: torch.device
) -> dict[str, Any]:
    """Train to the end of the budget, resuming from `folder/checkpoint` where there is one.

    Returns:
        figures: steps, seconds a step, parameters, the last losses.

    Raises:
        StageError: the loss is no longer finite.
    """
    modules = task.modules()
    optimizer = build_optimizer(modules.values(), config.weight_decay, config.betas)
    ema = _initial_ema(modules) if config.ema_decay else {}
    state = load_checkpoint(folder / "checkpoint", modules, optimizer, ema)
    steps = _budget(task, config, folder, context, device)
    step = state["step"] if state else 0
    if step:
        context.say(f"resuming at step {step} of {steps}")
    monitor = Monitor(folder, resume_step=step)
    started, first = time.monotonic(), step
    last_saved = started
    with context.progress("training", steps) as bar:
        bar.update(bar.task_ids[0], completed=step)
        while step < steps:
            figures = _train_step(task, config, optimizer, step, steps, device)
            if ema:
                update_ema(ema, modules, min(config.ema_decay, (step + 1) / (step + 10)))
            step += 1
            if step % config.log_every == 0 or step == steps:
                monitor.write(step - 1, {key: float(value) for key, value in figures.items()})
                _check_finite(figures, step, folder)
            if config.evaluate_every and (step % config.evaluate_every == 0 or step == steps):
                monitor.write(step - 1, _evaluate(task, modules, ema, step))
            if time.monotonic() - last_saved > config.checkpoint_seconds or step == steps:
                save_checkpoint(folder / "checkpoint", modules, optimizer, ema, {"step": step})
                last_saved = time.monotonic()
            bar.update(bar.task_ids[0], completed=step)
    monitor.close()
    _load_ema(ema, modules)
    for module in modules.values():
        module.eval()
    parameters = sum(p.numel() for module in modules.values() for p in module.parameters())
    seconds = (time.monotonic() - started) / max(1, step - first)
    context.say(f"{parameters / 1e6:.1f} M parameters, {steps} steps, {seconds * 1000:.0f} ms a step")
    return {"steps": steps, "parameters": parameters}


def _train_step(
    task: Task,
    config: LoopConfig,
    optimizer: torch.optim.Optimizer,
    step: int,
    steps: int,
    device: torch.device,
) -> dict[str, float | Tensor]:
    modules = task.modules()
    for module in modules.values():
        module.train()
    torch.manual_seed(step_generator(config.seed, step, "dropout").initial_seed())
    batch = task.batch(step, step_generator(config.seed, step, "batch"))
    rate = config.learning_rate * cosine_schedule(step, steps, config.warmup_steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    with autocast(config.precision, device):
        loss, figures = task.loss(batch, step, steps)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm)
    optimizer.step()
    return {"loss": loss.detach(), **figures, "gradient_norm": norm, "learning_rate": rate}


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


def _initial_ema(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": p.detach().clone()
        for name, module in modules.items()
        for key, p in module.named_parameters()
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


def _check_finite(figures: Mapping[str, float | Tensor], step: int, folder: Path) -> None:
    if not torch.isfinite(torch.as_tensor(figures["loss"])):
        raise StageError(
            f"the loss is {float(figures['loss'])} at step {step}",
            f"lower the learning rate; the last checkpoint is kept in {folder}",
        )


def _budget(task: Task, config: LoopConfig, folder: Path, context: Context, device: torch.device) -> int:
    """The number of steps: as given, or measured once from `minutes` and then kept."""
    if config.steps is not None:
        return config.steps
    assert config.minutes is not None
    kept = folder / "budget.json"
    if not kept.exists():
        seconds = _seconds_per_step(task, config, device)
        steps = max(2 * config.warmup_steps, int(config.minutes * 60 / seconds))
        write_json(kept, {"minutes": config.minutes, "seconds_per_step": seconds, "steps": steps})
        context.say(f"{config.minutes} minutes are {steps} steps of {seconds * 1000:.0f} ms here")
    return int(read_json(kept)["steps"])


def _seconds_per_step(task: Task, config: LoopConfig, device: torch.device, trials: int = 12) -> float:
    """The median time of a few steps that leave no trace: weights and buffers are put back."""
    modules = task.modules()
    before = {
        name: {k: v.clone() for k, v in module.state_dict().items()} for name, module in modules.items()
    }
    optimizer = build_optimizer(modules.values(), config.weight_decay, config.betas)
    times = []
    for _ in range(trials):
        started = time.monotonic()
        _train_step(task, config, optimizer, 0, 10 * trials, device)
        times.append(time.monotonic() - started)
    for name, module in modules.items():
        module.load_state_dict(before[name])
    return sorted(times[2:])[len(times[2:]) // 2]
