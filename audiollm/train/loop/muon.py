"""Muon for the matrices and convolutions that a rule gives it, AdamW for all else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


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
