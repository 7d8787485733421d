"""Saved models: `config.json` (with a `model_type`) beside `model.safetensors`, checked when they are loaded."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from audiollm.config import ConfigError, nearest
from audiollm.files import atomic_path, read_json, write_json

Config = TypeVar("Config")


def save_model(folder: Path, module: nn.Module, model_type: str, config: Any) -> None:
    """Write the weights and the dataclass `config`."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / "model.safetensors") as temporary:
        save_file({key: value.contiguous() for key, value in module.state_dict().items()}, temporary)
    write_json(folder / "config.json", {"model_type": model_type, **asdict(config)})


def load_model(folder: Path, model_type: str, config_type: type[Config]) -> tuple[Config, dict[str, Tensor]]:
    """The config and weights in `folder`, or in its `model` where `folder` is a stage's.

    Raises:
        ConfigError: nothing there, another kind of model, or a setting that this version does not know.
    """
    folder = model_folder(folder)
    data: dict[str, Any] = read_json(folder / "config.json")
    where = str(folder / "config.json")
    found = data.pop("model_type", None)
    if found != model_type:
        raise ConfigError(
            f"model_type: {found!r}, not {model_type!r}", where, "give the folder of another model"
        )
    known = [field.name for field in fields(config_type)]  # type: ignore[arg-type]
    for key in data:
        if key not in known:
            raise ConfigError(f"{key}: no such setting of {model_type}", where, nearest(key, known))
    shape = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return config_type(**shape), load_file(folder / "model.safetensors")


def model_folder(folder: Path) -> Path:
    """The folder that holds the model: `folder` itself or, for a stage's folder, its `model`.

    Raises:
        ConfigError: neither has a config.json.
    """
    for candidate in (folder, folder / "model"):
        if (candidate / "config.json").exists():
            return candidate
    raise ConfigError("no model here: config.json is missing", str(folder), "give a trained model's folder")
