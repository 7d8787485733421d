"""Requests of the loop to modules that support them: checkpoint activations, and take notice of new weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    pass


def announce_weights(modules: Iterable[nn.Module]) -> None:
    """Tell all parts that keep copies of their weights (those with `weights_changed`) that these were written."""
    for module in modules:
        for submodule in module.modules():
            if hasattr(submodule, "weights_changed"):
                submodule.weights_changed()  # type: ignore[operator]


def checkpoint_activations(modules: Mapping[str, nn.Module]) -> None:
    """Compute activations again in the backward pass, in all modules that offer it.

    Raises:
        ValueError: none does.
    """
    able = [
        m
        for module in modules.values()
        for m in module.modules()
        if hasattr(m, "gradient_checkpointing_enable")
    ]
    if not able:
        raise ValueError(
            "activation_checkpointing is set, but no module of this task offers gradient_checkpointing_enable"
        )
    for module in able:
        module.gradient_checkpointing_enable()  # type: ignore[operator]
