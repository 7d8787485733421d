"""The training loop: a task gives modules, batches and losses; the loop does the rest.

Everything random in step `n` is drawn from a generator seeded by (seed, n): there is no loader position and
no RNG state to save, and a killed run resumes to the same weights, bit for bit at the same thread count.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.errors import StageError
from audiollm.measured_choices import CHOICES
from audiollm.models.attention import leave_attention_uncompiled
from audiollm.models.frozen.shrink import num_stored
from audiollm.recipe.runner import Context
from audiollm.train.loop.budget import StepCost, step_cost, steps_of_budget
from audiollm.train.loop.checkpoint import Best, Readers, load_part, open_part, read_state, save_checkpoint
from audiollm.train.loop.guard import BadStep, Guard, LeftOut
from audiollm.train.loop.modules import announce_weights, checkpoint_activations
from audiollm.train.loop.monitor import Monitor, Speed
from audiollm.train.loop.optim import (
    Averages,
    autocast,
    build_optimizer,
    compute_dtype,
    freeze,
    learning_rate_factor,
)
from audiollm.train.loop.task import (
    PHASE_PREFIX,
    DrawsOnBoards,
    Figures,
    ReadsWeights,
    StopsEarly,
    Task,
    Update,
    check_groups,
    step_generator,
)
from audiollm.train.parallel.deepspeed_internals import num_elements
from audiollm.train.parallel.strategy import Optimizers, choose_strategy
from audiollm.train.settings import LoopConfig

STOPPED = "stopped"
"""Kind of the alarm of a training that its task ended before the last step."""
REMEDY = "raise rollbacks to go on from the last checkpoint, or lower the learning rate to begin again"

__all__ = ["Figures", "LoopConfig", "Task", "Update", "step_generator", "train"]


def train(
    task: Task, config: LoopConfig, folder: Path, context: Context, device: torch.device
) -> dict[str, Any]:
    """Train to the end of the budget, resuming from `folder/checkpoint` where there is one.

    Called on every rank of `context.ranks`. Where a strategy keeps weights in parts (fsdp2, zero2, zero3), the
    modules end in parts too: `checkpoint.trained_weights` reads them as a whole.

    Returns:
        figures: `steps` (those done), `parameters` and `cpu_seconds`, the CPU time of the training steps (evaluation
            and checkpoints not counted; over all attempts, without what a kill undid); `tokens` where the task tells;
            `best_step` where the best weights are kept: the step that they are of, 0 for those that the run began from;
            `stopped` where the task ended the run before its last step: the reason;
            and what the task's `evaluate` gave for the weights that the run ends with, by the same names.

    Raises:
        StageError: the settings ask for what the task or the strategy cannot do (exit code 2); or a loss or a
            gradient is not finite, or a spike, once more than `rollbacks` allows.
        ValueError: the task's `optimizers` do not fit its modules, or an update or a rate names none of them.
    """
    check_groups(task, config)
    with _refusals():
        run = _Run(task, config, folder, context, device)
    run.restore()
    started, first = time.monotonic(), run.step
    run.go()
    seconds = (time.monotonic() - started - run.speed.paused_seconds) / max(1, run.step - first)
    parameters = run.finish()
    context.say(f"{parameters / 1e6:.1f} M parameters, {run.step} steps, {seconds * 1000:.0f} ms a step")
    figures: dict[str, Any] = {
        "steps": run.step,
        "parameters": parameters,
        "cpu_seconds": round(run.cpu_seconds, 3),
    }
    if run.tokens:
        figures["tokens"] = int(run.tokens)
    if run.best_step is not None:
        figures["best_step"] = run.best_step
    if run.stopped is not None:
        figures["stopped"] = run.stopped
    return {**run.evaluated, **figures}


class _Run:
    """One attempt at a training run: what it holds, in the order in which things happen."""

    def __init__(
        self, task: Task, config: LoopConfig, folder: Path, context: Context, device: torch.device
    ) -> None:
        self.task, self.config, self.folder, self.context, self.device = task, config, folder, context, device
        self.ranks = context.ranks
        self.modules = task.modules()
        self.step, self.cpu_seconds, self.tokens = 0, 0.0, 0.0
        self.own_tokens = 0.0  # of this rank since the last checkpoint
        self.evaluated: dict[str, float] = {}  # by the last evaluation
        self.saving_seconds = 0.0  # of the last checkpoint
        self.last_figures: Figures = {}  # of the last step that was finished
        if config.steps is None and config.strategy in ("zero2", "zero3") and self.ranks.world > 1:
            raise ValueError(f"{config.strategy} cannot try steps out: give steps in place of minutes")
        freeze(self._named(self.modules), config.rules)
        if config.activation_checkpointing:
            checkpoint_activations(self.modules)
        dtype = compute_dtype(config.precision, device)
        self.strategy = choose_strategy(
            config.strategy, self.ranks, device, dtype, config.clip_norm, config.unused_parameters
        )
        wrapped = self.strategy.prepare(self.modules, task.optimizers(), self._build_optimizers)
        if config.compile:
            leave_attention_uncompiled()
            for module in wrapped.values():
                module.compile()
        task.adopt(wrapped)
        if isinstance(task, ReadsWeights):
            task.read_by(self.strategy.read)
        self.wrapped = wrapped
        averaged = self._named({name: self.modules[name] for name in task.optimizers()["main"]})
        self.averages = Averages(averaged if config.ema_decay else (), config.ema_decay, self.strategy.local)
        self.best = Best(folder / "best", config.best, config.best_is, self.ranks) if config.best else None
        self.guard = Guard(config.spike_deviations, self.ranks)
        self.left_out = LeftOut(folder / "left_out.jsonl")
        self.monitor: Monitor | None = None
        self.best_step: int | None = None
        """Step of the weights that the run ends with, where the best are kept."""
        self.stopped: str | None = None
        """Why the task ended the training before its last step."""
        self.connected: set[str] = set()
        """Optimizers all of whose parameters have been seen to get gradients."""

    def restore(self) -> None:
        """Go on from the last checkpoint; without one, find the number of steps and write the first."""
        config = self.config
        with _refusals():
            is_resumed = self._load()
        self.steps = steps_of_budget(config, self.folder, self.context, self._measured_cost)
        if (config.warmup_steps or 0) >= self.steps:
            raise StageError(
                f"warmup_steps is {config.warmup_steps}, and the run has {self.steps} steps",
                "set fewer, or leave it out: a tenth of the steps at most",
                2,
            )
        if is_resumed:
            self.context.say(f"resuming at step {self.step} of {self.steps}")
            if self.best:
                self.best.settle()
        elif self.best:  # the weights that the run begins from may stay the best
            self.best.keep(self._figures_of_evaluation(), 0, self._readers_of(self._tensors()))
        if not is_resumed and config.rollbacks:
            self._save()  # what the first rollback goes back to
        self._open_monitor()

    def go(self) -> None:
        """Train to the end."""
        self.speed, self.last_saved = Speed(self.device, self.ranks.world), time.monotonic()
        self._check_stop()  # a resumed run may have stopped before
        with self.context.progress(
            "training", self.steps, unit="step", completed=self.step, figures=self._figures_in_words
        ) as bar:
            while self.step < self.steps and self.stopped is None:
                bar.update(bar.task_ids[0], completed=self.step)
                bad = self._train_step()
                last = self.step == self.steps
                log = self.step % self.config.log_every == 0 or last
                evaluate = self.config.is_evaluated(self.step, self.steps)
                save = last or self._is_time_to_save()
                if bad is None and (log or evaluate or save):
                    bad = self.guard.check()  # a checkpoint is worth something only with sound weights
                if bad is None and log:
                    self._log()
                with self.speed.paused():
                    if bad is not None:
                        self._roll_back(bad)
                        continue
                    if evaluate:
                        self._evaluate()
                        self._check_stop()
                    if save or self.stopped is not None:
                        self._save()
            bar.update(bar.task_ids[0], completed=self.step)

    def _figures_in_words(self) -> str:
        """The loss of the last step, and its reward, for a line of a log."""
        figures = self.last_figures
        names = [name for name in ("loss", "reward") if name in figures]
        return ", ".join(f"{name} {float(figures[name]):.4g}" for name in names)

    def finish(self) -> int:
        """Put the weights that the run ends with into the modules; returns how many parameters there are."""
        if self.monitor:
            self.monitor.close()
        state = self.best.state() if self.best else None
        if self.best and state is not None:
            self.evaluated, self.best_step = dict(state["figures"]), int(state["step"])
            load_part(self.best.folder, "modules", self._tensors(), self.strategy.write)
            announce_weights(self.modules.values())
        else:
            self._swap_averages()
        for module in self.modules.values():
            module.eval()
        whole = sum(num_elements(p) for module in self.modules.values() for p in module.parameters())
        return whole + num_stored(self.modules.values())

    def _train_step(self) -> BadStep | None:
        """One step further. Returns what a task found to be wrong by itself."""
        cpu_started = time.process_time()
        self.figures: Figures = {}
        if self.step + 1 in self.left_out_steps:
            self.step += 1
            return None
        try:
            self.figures = self._update_all(self.step, self.steps)
        except FloatingPointError as error:
            # where an earlier step is the cause, it is named
            return self.guard.check() or BadStep(self.step + 1, "not finite", str(error))
        tokens, flops = (float(self.figures.pop(key, 0.0)) for key in ("tokens", "flops"))
        phases = [key for key in self.figures if key.startswith(PHASE_PREFIX)]
        self.speed.add(tokens, flops, {key: float(self.figures.pop(key)) for key in phases})
        self.averages.update(self.step)
        self.cpu_seconds += time.process_time() - cpu_started
        self.own_tokens += tokens
        self.step += 1
        self.guard.add(self.step, self.figures)
        self.last_figures = self.figures
        return None

    def _update_all(self, step: int, steps: int) -> Figures:
        config, rank = self.config, self.ranks.rank
        for module in self.wrapped.values():
            module.train()
        for optimizer in self.strategy.optimizers.values():
            optimizer.zero_grad(set_to_none=True)  # a batch that is sampled can use the memory
        torch.manual_seed(step_generator(config.seed, step, "dropout", rank).initial_seed())
        batch = self.task.batch(step, step_generator(config.seed, step, "batch", rank), self.ranks)
        rate = config.learning_rate * learning_rate_factor(config.schedule, step, steps, config.warmup(steps))
        figures: Figures = {}
        updates = iter(self.task.updates(batch, step, steps))
        unreached: dict[str, set[str]] = {}
        while True:
            with autocast(config.precision, self.device):  # anew: casts of weights are cached within one
                update = next(updates, None)
            if update is None:
                self._check_connected(unreached)
                return {**figures, "learning_rate": rate}
            if not update.losses:
                figures.update(update.figures)
                continue
            figures.update(self._apply(update, rate))
            if update.optimizer not in self.connected:
                names = self.strategy.without_gradient(update.optimizer)
                unreached[update.optimizer] = unreached.get(update.optimizer, names) & names
            del update  # with its loss goes what is left of the graph

    def _check_connected(self, unreached: Mapping[str, set[str]]) -> None:
        """Raises: StageError: parameters that are to be trained got no gradient in the optimizer's first step."""
        names = sorted(name for module_names in unreached.values() for name in module_names)
        if names and not self.config.unused_parameters:
            some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise StageError(
                f"no gradient reaches {some}: set to be trained, but the loss does not depend on it",
                "freeze it (`trained`, `lora`, `rules`), or mend the model that leaves it out",
                2,
            )
        self.connected |= unreached.keys()

    def _apply(self, update: Update, rate: float) -> Figures:
        """One optimizer step. Returns the update's figures, its loss and its gradient's norm."""
        name, optimizers = update.optimizer, self.strategy.optimizers
        if name not in optimizers:
            raise ValueError(f"an update names the optimizer {name!r}; the task has {sorted(optimizers)}")
        for group in optimizers[name].param_groups:
            group["lr"] = rate * self.config.rate_factors.get(name, 1.0) * group.get("rate_factor", 1.0)
        optimizers[name].zero_grad(set_to_none=True)
        loss = self._backward(update)
        norm = self.strategy.step(name, self.config.clip_norm)
        announce_weights(self.modules.values())
        suffix = "" if name == "main" else f"/{name}"
        figures = {k: v.detach() if isinstance(v, Tensor) else v for k, v in update.figures.items()}
        figures = {f"loss{suffix}": loss, **figures}
        scale = self.strategy.scaler_state().get("scale")
        if scale is None:
            return {**figures, f"gradient_norm{suffix}": norm}
        if scale < 2.0**-16:
            raise FloatingPointError(
                "gradients overflow fp16 at any scale: lower the learning rate, or take bf16"
            )
        # fp16 overflows now and then: the scaler leaves the step out and takes a smaller scale
        finite = bool(norm.isfinite())
        return {**figures, "loss_scale": scale, **({f"gradient_norm{suffix}": norm} if finite else {})}

    def _backward(self, update: Update) -> Tensor:
        """The gradients of all the update's losses; returns their sum."""
        if isinstance(update.loss, Tensor):
            self.strategy.backward(update.loss, update.optimizer, last=True)
            return update.loss.detach()
        losses, total = iter(update.loss), None
        for number in range(1, update.losses + 1):
            last = number == update.losses
            with self.strategy.accumulate(update.optimizer, last):
                with autocast(self.config.precision, self.device):
                    loss = next(losses, None)
                if loss is None:
                    raise ValueError(f"an update says it has {update.losses} losses and gives {number - 1}")
                self.strategy.backward(loss, update.optimizer, last)
            total = loss.detach() if total is None else total + loss.detach()
            del loss
        if next(losses, None) is not None:
            raise ValueError(f"an update says it has {update.losses} losses and gives more")
        assert total is not None
        return total

    def _check_stop(self) -> None:
        """Ask a task that can end the training whether this is the end.

        Raises:
            StageError: it is, and no better weights are kept that the run could end with.
        """
        if not isinstance(self.task, StopsEarly) or not self.step or self.step == self.steps:
            return
        reason = self.task.stop_reason(self.step)
        if reason is None:
            return
        self.stopped = reason
        text = f"{reason}; stopped at step {self.step} of {self.steps}"
        is_new = self.monitor is not None and self.monitor.alarm(self.step - 1, STOPPED, text)
        if self.best is None:
            raise StageError(
                text,
                "lower the learning rate, or train the start longer; keep_best: true ends with its best weights",
            )
        if is_new:
            self.context.say(f"alarm at step {self.step}, {STOPPED}: {text}")

    def _log(self) -> None:
        """The figures of the last step: losses summed over ranks, others averaged; and how fast it goes."""
        if self.figures:
            row = self.ranks.mean(self.figures)
            losses = {key for key in row if key.partition("/")[0] == "loss"}
            self._report({k: v * self.ranks.world if k in losses else v for k, v in row.items()})
        rows = self.ranks.gather(self.speed.take_rank_figures())
        if self.monitor:
            self.monitor.performance(self.step - 1, self.speed.figures(rows))

    def _report(self, figures: Mapping[str, float]) -> None:
        """Write the figures of the steps done, and the alarms that they give rise to."""
        if self.monitor:
            self.monitor.write(self.step - 1, figures)
            for kind, text in self.task.alarms(figures, self.step).items():
                if self.monitor.alarm(self.step - 1, kind, text):
                    self.context.say(f"alarm at step {self.step}, {kind}: {text}")

    def _evaluate(self) -> None:
        """With the averaged weights, where there are any; the best are kept."""
        self._swap_averages()
        self.evaluated = self._figures_of_evaluation()
        if self.best:
            self.best.keep(self.evaluated, self.step, self._readers_of(self._tensors()))
        self._swap_averages()
        if self.evaluated:
            self._report({f"evaluation/{key}": value for key, value in self.evaluated.items()})

    def _swap_averages(self) -> None:
        self.averages.swap()
        announce_weights(self.modules.values())

    def _figures_of_evaluation(self) -> dict[str, float]:
        """The same on all ranks."""
        for module in self.wrapped.values():
            module.eval()
        casts = self.strategy.casts_weights
        cast = autocast(self.config.precision, self.device) if casts else nullcontext()
        with torch.no_grad(), cast:
            figures = {key: float(value) for key, value in self.task.evaluate(self.step).items()}
        self.strategy.settle()
        first_figures: dict[str, float] = self.ranks.of_first(figures)
        return first_figures

    def _is_time_to_save(self) -> bool:
        """Every rank must say the same, so several ask the first one's clock, and only when they meet anyway."""
        if self.ranks.world > 1 and self.step % self.config.log_every:
            return False
        if not self.config.checkpoint_seconds:
            return True
        patience = max(self.config.checkpoint_seconds, 20 * self.saving_seconds)
        return bool(self.ranks.of_first(time.monotonic() - self.last_saved > patience))

    def _save(self) -> None:
        started = time.monotonic()
        self.tokens, self.own_tokens = self.tokens + sum(self.ranks.gather(self.own_tokens)), 0.0
        state = {
            "step": self.step,
            "cpu_seconds": self.cpu_seconds,
            "tokens": self.tokens,
            "seed": self.config.seed,
            "evaluation": self.evaluated,
            "guard": self.guard.state(),
            "scaler": self.strategy.scaler_state(),
            "fastest_ways": CHOICES.state(),
        }
        parts: dict[str, Readers] = {
            "modules": self._readers_of(self._tensors()),
            "optimizers": self.strategy.optimizer_state(),
            "ema": self._readers_of(self.averages.tensors),
        }
        save_checkpoint(self.folder / "checkpoint", parts, state, self.ranks)
        self.last_saved = time.monotonic()
        self.saving_seconds = self.last_saved - started

    def _load(self) -> bool:
        """The last checkpoint, in place; False where there is none."""
        self.left_out_steps, self.own_tokens = self.left_out.steps(), 0.0
        folder = self.folder / "checkpoint"
        state = read_state(folder, self.ranks)
        if state is None:
            return False
        load_part(folder, "modules", self._tensors(), self.strategy.write)
        announce_weights(self.modules.values())
        with open_part(folder, "optimizers") as readers:
            self.strategy.restore_optimizers(readers)
        if self.averages.tensors:
            load_part(folder, "ema", self.averages.tensors, self.strategy.write)
        self.step, self.cpu_seconds, self.tokens = state["step"], state["cpu_seconds"], state["tokens"]
        self.evaluated = state.get("evaluation", {})
        self.guard.restore(state["guard"])
        CHOICES.restore(state.get("fastest_ways", {}))
        self.strategy.restore_scaler(state["scaler"])
        return True

    def _roll_back(self, bad: BadStep) -> None:
        """Back to the last checkpoint; the step is left out from now on. Raises: StageError: one too many."""
        limit, so_far = self.config.rollbacks, len(self.left_out_steps)
        if so_far >= limit:
            if self.monitor:
                self.monitor.alarm(bad.step - 1, bad.kind, bad.text)
            already = f" ({so_far} steps were left out before)" if so_far else ""
            raise StageError(bad.text + already, REMEDY)
        self.context.say(f"{bad.text}: back to the last checkpoint, and on without this step")
        if self.monitor:
            self.monitor.close()
            self.left_out.add(bad)
        self.ranks.barrier()
        self.guard.forget()
        self._load()
        self._open_monitor()

    def _open_monitor(self) -> None:
        if self.ranks.first:
            self.monitor = Monitor(self.folder, self.step, self.config.report_to, self.context.say)
            if isinstance(self.task, DrawsOnBoards):
                self.task.draw_on(self.monitor.boards)
            for bad in self.left_out_steps.values():
                self.monitor.alarm(bad.step - 1, bad.kind, f"{bad.text}; this step is left out")

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers."""
        return {
            f"{name}.{key}": tensor
            for name, module in self.modules.items()
            for key, tensor in module.state_dict(keep_vars=True).items()
        }

    def _readers_of(self, tensors: Mapping[str, Tensor]) -> Readers:
        return {name: partial(self.strategy.held, tensor) for name, tensor in tensors.items()}

    @staticmethod
    def _named(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
        return ((f"{name}.{key}", p) for name, m in modules.items() for key, p in m.named_parameters())

    def _build_optimizers(self) -> Optimizers:
        config = self.config
        return {
            optimizer: build_optimizer(
                self._named({name: self.modules[name] for name in names}),
                config.weight_decay,
                config.betas,
                config.rules,
            )
            for optimizer, names in self.task.optimizers().items()
        }

    def _measured_cost(self) -> StepCost:
        """Measure the cost of a step by trials with optimizers of their own, which are forgotten afterwards."""
        optimizers, scaler = self.strategy.optimizers, self.strategy.scaler_state()
        self.strategy.optimizers = self._build_optimizers()
        cost = step_cost(self._update_all, self.modules, self.device)
        announce_weights(self.modules.values())
        self.strategy.optimizers = optimizers
        self.strategy.restore_scaler(scaler)
        return cost


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn a `ValueError` of the set-up, which lies in the settings, into a `StageError` without a traceback."""
    try:
        yield
    except ValueError as error:
        raise StageError(str(error), exit_code=2) from error
