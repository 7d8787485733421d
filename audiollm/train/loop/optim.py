"""Optimizers (AdamW, Muon), parameter groups, learning-rate schedules, precision and weight averaging."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.devices import is_bf16_fast
from audiollm.train.settings import ParameterRule, Precision, ScheduleName

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def freeze(named: NamedParameters, rules: Sequence[ParameterRule]) -> None:
    """Take the parameters out of training whose rule says so.

    Raises:
        ValueError: a rule fits no parameter at all, or gives Muon a vector.
    """
    parameters = dict(named)
    for rule in rules:
        if not any(fnmatchcase(name, rule.pattern) for name in parameters):
            some = ", ".join(list(parameters)[:3])
            raise ValueError(f"no parameter is named like {rule.pattern!r}; the names are like {some}")
    for name, parameter in parameters.items():
        rule = _rule_of(name, rules)
        if rule.frozen:
            parameter.requires_grad_(False)
        elif rule.optimizer == "muon" and parameter.ndim < 2:
            raise ValueError(
                f"{rule.pattern!r} gives Muon {name}, which is a vector: narrow it, to *_proj.weight for one"
            )


def parameter_groups(
    named: NamedParameters, weight_decay: float, rules: Sequence[ParameterRule] = ()
) -> list[dict[str, Any]]:
    """Groups for an optimizer: matrices with decay and vectors (biases, norms) without, by `rate_factor`.

    Parameters that are frozen are in none. Each group carries its `rate_factor`, which the loop reads, and whether
    it is `muon`'s.
    """
    parameters_of: dict[tuple[float, float, bool], list[nn.Parameter]] = {
        (1.0, weight_decay, False): [],
        (1.0, 0.0, False): [],
    }
    for name, parameter in named:
        if parameter.requires_grad:
            rule = _rule_of(name, rules)
            decay = rule.weight_decay
            if decay is None:
                decay = weight_decay if parameter.ndim >= 2 else 0.0
            kind = (rule.rate_factor, decay, rule.optimizer == "muon")
            parameters_of.setdefault(kind, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "rate_factor": factor, "muon": muon}
        for (factor, decay, muon), parameters in parameters_of.items()
        if parameters
    ]


def build_optimizer(
    named: NamedParameters,
    weight_decay: float,
    betas: tuple[float, float],
    rules: Sequence[ParameterRule] = (),
) -> torch.optim.Optimizer:
    """AdamW over `parameter_groups`, and Muon where rules ask for it; the loop sets the rate at every step."""
    groups = parameter_groups(named, weight_decay, rules)
    if any(group["muon"] for group in groups):
        return MuonAndAdamW(groups, betas)
    return torch.optim.AdamW(groups, lr=1.0, betas=betas, weight_decay=0.0, fused=True)


def learning_rate_factor(
    name: ScheduleName, step: int, steps: int, warmup_steps: int, final_share: float = 0.02
) -> float:
    """Factor on the peak learning rate at `step` of `steps`: a linear warm-up, then the schedule of that name."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return final_share + (1 - final_share) * SCHEDULES[name](done)


def _cosine_schedule(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


def _warmup_stable_decay(done: float, decay_share: float = 0.2) -> float:
    """MiniCPM's (arXiv 2404.06395): at the peak until the last `decay_share`, then in a line to the end."""
    return min(1.0, (1.0 - done) / decay_share)


def _constant(done: float) -> float:
    return 1.0


SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "cosine": _cosine_schedule,
    "wsd": _warmup_stable_decay,
    "constant": _constant,
}
"""From the share done after the warm-up to the share of the way between the final and the peak rate."""


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """Return the dtype of matrix products; None for the parameters' own.

    `auto` takes bf16 on a GPU and on CPUs where its products were measured to be faster.
    """
    if precision == "auto":
        return torch.bfloat16 if is_bf16_fast(device) else None
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Products in `compute_dtype`; the parameters stay as they are."""
    dtype = compute_dtype(precision, device)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@torch.no_grad()
def update_ema(averages: Sequence[Tensor], weights: Sequence[Tensor], decay: float) -> None:
    """`averages <- decay * averages + (1 - decay) * weights`, in place."""
    if averages:
        torch._foreach_lerp_(list(averages), list(weights), 1 - decay)


class Averages:
    """Exponential moving averages of weights, each beside its weight: in parts where the weight is in parts.

    Args:
        parameters: by name, as the strategy left them; frozen ones are not averaged.
        local: this rank's part of a tensor, sharing its memory.

    Raises:
        ValueError: the strategy cannot average (from `local`).
    """

    def __init__(self, parameters: NamedParameters, decay: float, local: Callable[[Tensor], Tensor]) -> None:
        self._weights = {name: p for name, p in parameters if p.requires_grad}
        self._decay, self._local = decay, local
        for parameter in list(self._weights.values())[:1]:
            local(parameter)  # says so where a strategy cannot average
        self.tensors = {name: p.detach().clone() for name, p in self._weights.items()}

    def update(self, step: int) -> None:
        """After the update of that step, from 0. In the first steps the averages follow faster."""
        averages, weights = self._look_up_local()
        update_ema(averages, weights, min(self._decay, (step + 1) / (step + 10)))

    @torch.no_grad()
    def swap(self) -> None:
        """Averages into the modules and their weights into the averages; a second time puts all back."""
        for average, weight in zip(*self._look_up_local(), strict=True):
            previous_weight = weight.clone()
            weight.copy_(average)
            average.copy_(previous_weight)

    def _look_up_local(self) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's parts: looked up anew, as a strategy may move them."""
        averages = [self._local(tensor) for tensor in self.tensors.values()]
        return averages, [self._local(parameter) for parameter in self._weights.values()]


def _rule_of(name: str, rules: Sequence[ParameterRule]) -> ParameterRule:
    return next((rule for rule in rules if fnmatchcase(name, rule.pattern)), ParameterRule("*"))


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon (momentum, made orthogonal) over the groups marked `muon`, and its AdamW over the others.

    Muon's rate is scaled by `0.2 * sqrt(the longer side)`, so that its updates are as large as AdamW's
    (arXiv 2502.16982); a rule's `rate_factor` goes on top. The weights of a convolution are a matrix whose rows are
    its outputs, as a linear layer over what it sees would have them.

    Args:
        groups: as of `parameter_groups`, each with `muon`.

    Raises:
        ValueError: a parameter for Muon is a vector.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float]) -> None:
        muon = [group for group in groups if group["muon"]]
        adamw = [group for group in groups if not group["muon"]]
        # each sets its own defaults in the groups
        with _as_matrices(parameter for group in muon for parameter in group["params"]):
            self._parts: list[torch.optim.Optimizer] = [
                torch.optim.Muon(muon, lr=1.0, adjust_lr_fn="match_rms_adamw")
            ]
        if adamw:
            self._parts.append(torch.optim.AdamW(adamw, lr=1.0, betas=betas, fused=True))
        super().__init__([*muon, *adamw], {})
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make a step of both optimizers; a closure is called once, before either."""
        first, *more_optimizers = self._parts
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with _as_matrices(parameter for group in first.param_groups for parameter in group["params"]):
            first.step()
        for optimizer in more_optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """The parts work on the groups and the state of the whole."""
        for optimizer in self._parts:
            of_muon = isinstance(optimizer, torch.optim.Muon)
            optimizer.param_groups = [group for group in self.param_groups if group["muon"] is of_muon]
            optimizer.state = self.state


# Private


@contextmanager
def _as_matrices(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let weights of convolutions and their gradients be matrices for a while, in the same memory."""
    reshaped = [
        (parameter, parameter.shape, parameter.grad) for parameter in parameters if parameter.ndim > 2
    ]
    try:
        for parameter, _, gradient in reshaped:
            parameter.grad = None
            parameter.data = parameter.data.flatten(1)
            parameter.grad = None if gradient is None else gradient.flatten(1)
        yield
    finally:
        for parameter, shape, gradient in reshaped:
            parameter.grad = None
            parameter.data = parameter.data.view(shape)
            parameter.grad = gradient
