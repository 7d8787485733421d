"""Weights that a policy and its reference have in common."""

from __future__ import annotations

import torch
from torch import nn


def share_frozen_weights(trained: nn.Module, reference: nn.Module | None) -> None:
    """Keep the weights that are not trained once in memory, where the reference has the same."""
    known = dict(trained.named_parameters())
    for name, parameter in [] if reference is None else list(reference.named_parameters()):
        other = known.get(name)
        if other is not None and not other.requires_grad and torch.equal(parameter, other):
            parameter.data = other.data
