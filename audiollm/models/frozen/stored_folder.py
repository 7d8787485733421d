"""A model for generation on disk, its linear layers in int8 or int4: `stored.safetensors` in place of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from audiollm.errors import ConfigError
from audiollm.files.atomic import atomic_path
from audiollm.files.json_files import REMEDY
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.frozen.formats import SmallFormat
from audiollm.models.frozen.shrink import SMALL_LAYERS, frozen_layers, place_stored
from audiollm.models.frozen.stored import FORMATS, StoredWeight
from audiollm.models.hub import read_config
from audiollm.models.layouts import config_of
from audiollm.models.pretrained import STORED_WEIGHTS, model_folder


def has_stored_weights(folder: Path) -> bool:
    """Return whether a model's folder has its weights in fewer bytes."""
    return (folder / STORED_WEIGHTS).is_file()


def save_stored(model: nn.Module, format: SmallFormat, folder: Path) -> None:
    """Write the weights of a model that `shrink_frozen` has stored in a format."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    written: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, SMALL_LAYERS):
            stored: StoredWeight = module.stored
            if id(stored) not in written:  # of layers that share a weight, the first one has it
                written[id(stored)] = name
                for key, buffer in stored.named_buffers():
                    tensors[f"{name}.weight/{type(stored).__name__}/{key}"] = buffer.contiguous()
            else:
                tensors[f"{name}.weight/shared/{written[id(stored)]}"] = torch.empty(0)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / STORED_WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": format})


def load_stored_model(folder: Path | str) -> DualFFN:
    """Load a DualFFN of `audiollm export --to int8` or `int4`, for generation alone.

    Raises:
        ConfigError: nothing there, another kind of model, or a damaged file.
    """
    folder = model_folder(Path(folder))
    config = config_of(read_config(folder), str(folder / "config.json"))
    with torch.device("meta"):
        model = DualFFN(config)
    load_stored(model, folder)
    return model.eval()


def load_stored(model: nn.Module, folder: Path) -> SmallFormat:
    """Give a model that was built on the meta device the weights that `save_stored` wrote.

    Returns:
        the format.

    Raises:
        ConfigError: a damaged file, or weights that are not the model's.
    """
    path = folder / STORED_WEIGHTS
    try:
        with safe_open(str(path), framework="pt") as opened:
            metadata = opened.metadata() or {}
            # in memory of their own: the file's is not aligned as kernels want it
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118  a method
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"not whole: {error}", str(path), REMEDY) from error
    format = metadata.get("format")
    if format not in FORMATS:
        raise ConfigError(f"format: {format!r} is none of {', '.join(FORMATS)}", str(path), REMEDY)
    plain = {name: tensor for name, tensor in tensors.items() if "/" not in name}
    parts: dict[str, dict[str, Tensor]] = {}
    shared: dict[str, str] = {}
    classes: dict[str, str] = {}
    for name, tensor in tensors.items():
        if "/" in name:
            weight, kind, key = name.split("/", 2)
            if kind == "shared":
                shared[weight] = f"{key}.weight"
            else:
                classes[weight] = kind
                parts.setdefault(weight, {})[key] = tensor
    try:
        _place_all(model, parts, classes, shared)
        missing, unexpected = model.load_state_dict(plain, strict=False, assign=True)
    except (KeyError, RuntimeError, ValueError, AttributeError) as error:
        raise ConfigError(f"weights that are not this model's: {error}", str(path), REMEDY) from error
    empty = [name for name, tensor in _all_tensors(model) if tensor.is_meta]
    if missing or unexpected or empty:
        some = ", ".join([*missing, *unexpected, *empty][:3])
        raise ConfigError(f"weights that are not this model's: {some}", str(path), REMEDY)
    return format


def _place_all(
    model: nn.Module, parts: dict[str, dict[str, Tensor]], classes: dict[str, str], shared: dict[str, str]
) -> None:
    kinds: dict[str, Any] = {kind.__name__: kind for kind in FORMATS.values()}
    model.requires_grad_(False)
    layers = {frozen.name: frozen for frozen in frozen_layers(model)}
    weights: dict[str, StoredWeight] = {}
    for name, buffers in parts.items():
        weights[name] = kinds[classes[name]].restore(tuple(layers[name].layer.weight.shape), buffers)
    for name in (*parts, *shared):
        place_stored(layers[name], weights[shared.get(name, name)])


def _all_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
