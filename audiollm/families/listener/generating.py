"""Transformers' `generate` for audio LLMs that answer in words: whole answers, or what it prepares for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class GenerationPlan:
    """The preparation of `generate` for one prompt of L tokens, before the model reads it."""

    ids_1L: Tensor
    """int64: ids of the prompt."""
    logits_processor: Callable[[Tensor, Tensor], Tensor]
    """Apply the generation config's penalties, top-p and their like to logits `[1, V]`, given the ids so far."""
    stopping_criteria: Callable[[Tensor, Any], Tensor]
    """Tell from the ids so far whether the answer is over, `[1]`."""
    config: Any
    """The `GenerationConfig` with all options."""
    arguments: dict[str, Any]
    """Arguments of the model's first forward pass: features, positions, an empty cache and the like."""


@torch.inference_mode()
def generate_ids(model: Any, inputs: Mapping[str, Tensor], **options: Any) -> Tensor:
    """Return the ids `[A, N]` that `generate` puts behind the prompts, padded behind the end of an answer.

    Args:
        model: in eval mode.
        inputs: of the processor, on any device; those of `A` prompts are padded on the left.
        options: of `generate`; what is not given comes from the model's own generation config.
    """
    sequences: Tensor = model.generate(**_moved_inputs(model, inputs), **options)
    return sequences[:, inputs["input_ids"].shape[1] :]


@torch.inference_mode()
def prepare_generation(model: Any, inputs: Mapping[str, Tensor], **options: Any) -> GenerationPlan:
    """Let `generate` prepare one answer, and draw none of its tokens; arguments as those of `generate_ids`."""

    def prepared(
        _model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **arguments: Any,
    ) -> GenerationPlan:
        return GenerationPlan(input_ids, logits_processor, stopping_criteria, generation_config, arguments)

    plan: GenerationPlan = model.generate(**_moved_inputs(model, inputs), **options, custom_generate=prepared)
    return plan


def drawn_options(temperature: float, top_p: float) -> dict[str, Any]:
    """Options of `generate` that draw from the model's own distribution; at a temperature of 0, the likeliest words."""
    if temperature <= 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": 0,
        "repetition_penalty": 1.0,
    }


def stopping_criteria(check_stop: Callable[[], None] | None) -> list[Callable[..., Tensor]]:
    """Criteria that stop nothing by themselves, and call `check_stop` after each token."""

    def check(ids_BT: Tensor, scores: Any, **more: Any) -> Tensor:
        assert check_stop is not None
        check_stop()
        return torch.zeros(len(ids_BT), dtype=torch.bool, device=ids_BT.device)

    return [] if check_stop is None else [check]


def _moved_inputs(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs on the model's device, numbers in its dtype."""
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    return {
        key: value.to(weight.device, weight.dtype if value.is_floating_point() else value.dtype)
        for key, value in inputs.items()
    }
