"""Adapters (LoRA, through PEFT) of any model: alone on disk, and added into the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def merged_weights(model: Any) -> dict[str, Tensor]:
    """Return the weights of a `PeftModel` with the adapter added, by the names of the model without one.

    The model itself stays as it is: taking an adapter out again would leave rounding errors in its weights.
    """
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()
    deltas = {
        f"{name}.weight": module.get_delta_weight("default")  # type: ignore[attr-defined]
        for name, module in base.named_modules()
        if isinstance(module, LoraLayer)
    }
    weights: dict[str, Tensor] = {}
    for key, value in base.state_dict().items():
        if ".lora_" in key or ".original_module." in key:
            continue
        name = key.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")
        delta = deltas.get(name)
        weights[name] = value if delta is None else value + delta.to(value.dtype)
    return weights


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
