"""The one call of transformers' `generate` for audio LLMs that answer in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


@torch.inference_mode()
def generate_ids(model: Any, inputs: Mapping[str, Tensor], **options: Any) -> Tensor:
    """Return the ids `[A, N]` that `generate` puts behind the prompts, padded behind the end of an answer.

    Args:
        model: in eval mode.
        inputs: of the processor, on any device; those of `A` prompts are padded on the left.
        options: of `generate`; what is not given comes from the model's own generation config.
    """
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    moved = {
        key: value.to(weight.device, weight.dtype if value.is_floating_point() else value.dtype)
        for key, value in inputs.items()
    }
    sequences: Tensor = model.generate(**moved, **options)
    return sequences[:, inputs["input_ids"].shape[1] :]


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
