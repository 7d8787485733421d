"""Weights that a policy and its reference have in common."""

from __future__ import annotations

import torch
from torch import nn


def share_frozen_weights(trained: nn.Module, reference: nn.Module | None) -> None:
    """Keep the weights that are not trained once in memory, where the reference has the same."""
    trained_weights = dict(trained.named_parameters())
    for name, parameter in [] if reference is None else list(reference.named_parameters()):
        weight = trained_weights.get(name)
        if weight is not None and not weight.requires_grad and torch.equal(parameter, weight):
            parameter.data = weight.data
