"""Adapters (LoRA, through PEFT) of any model: alone on disk, and added into the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from peft import PeftModel


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write the adapter alone, in PEFT's layout: `adapter_config.json`, `adapter_model.safetensors`.

    PEFT keeps names of modules in sets, whose order differs from process to process; they are written sorted, so that a
    run that was killed and resumed writes the same bytes.
    """
    for config in model.peft_config.values():
        for key, value in vars(config).items():
            if isinstance(value, set):
                setattr(config, key, sorted(value))
    model.save_pretrained(str(folder), safe_serialization=True)


class MergedWeights(Mapping[str, Tensor]):
    """The weights of a `PeftModel` with the adapter added, by the names of the model without one.

    Each is added when it is read, so that one at a time takes memory. The model itself stays as it is: taking an
    adapter out again would leave rounding errors in its weights.
    """

    def __init__(self, model: Any) -> None:
        from peft.tuners.lora import LoraLayer

        base = model.get_base_model()
        self._layers = {
            f"{name}.weight": module for name, module in base.named_modules() if isinstance(module, LoraLayer)
        }
        self._weights: dict[str, Tensor] = {}
        for key, value in base.state_dict().items():
            if ".lora_" not in key and ".original_module." not in key:
                name = key.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")
                self._weights[name] = value

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        value, layer = self._weights[name], self._layers.get(name)
        if layer is None:
            return value
        delta: Tensor = layer.get_delta_weight("default")  # type: ignore[attr-defined]
        return value + delta.to(value.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __contains__(self, name: object) -> bool:
        return name in self._weights  # without adding an adapter


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Switch a `PeftModel`'s adapter off within; PEFT changes what is trainable on the way, and this undoes it."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    try:
        with model.disable_adapter():
            yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
