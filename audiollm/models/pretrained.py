"""Saved models: `config.json` (with a `model_type`) beside safetensors, in one file or in shards, checked when loaded.

Only safetensors are read: a pickle can run any code when it is opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from audiollm.errors import ConfigError, suggestion
from audiollm.files.atomic import atomic_path, write_json
from audiollm.files.json_files import REMEDY, config_folder, read_json_file
from audiollm.hub_models.folders import hub_folder

Config = TypeVar("Config")
Model = TypeVar("Model", bound=nn.Module)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
STORED_WEIGHTS = "stored.safetensors"
"""File of a model for generation whose weights are in fewer bytes, in place of `WEIGHTS`."""


def save_model(folder: Path, module: nn.Module, model_type: str, config: Any) -> None:
    """Write the weights and the dataclass `config`."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / WEIGHTS) as temporary:
        save_file({key: value.contiguous() for key, value in module.state_dict().items()}, temporary)
    write_json(folder / "config.json", {"model_type": model_type, **asdict(config)})


def load_model(folder: Path, model_type: str, config_type: type[Config]) -> tuple[Config, dict[str, Tensor]]:
    """The config and weights in `folder`, or in its `model` where `folder` is a stage's.

    Raises:
        ConfigError: nothing there, another kind of model, settings that this version does not know or that are missing,
            or a damaged file.
    """
    folder = model_folder(folder)
    data = read_json_file(folder / "config.json", dict)
    where = str(folder / "config.json")
    stored_type = data.pop("model_type", None)
    if stored_type != model_type:
        raise ConfigError(
            f"model_type: {stored_type!r}, not {model_type!r}", where, "give the folder of another model"
        )
    field_names = [field.name for field in fields(config_type)]  # type: ignore[arg-type]
    for key in data:
        if key not in field_names:
            raise ConfigError(f"{key}: no such setting of {model_type}", where, suggestion(key, field_names))
    shape = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    path = weight_files(folder)[0]
    try:
        return config_type(**shape), load_file(path)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"invalid {model_type} config: {error}", where, REMEDY) from error
    except SafetensorError as error:
        raise ConfigError(f"not whole: {error}", str(path), REMEDY) from error


def load_whole(
    folder: Path | str, model_type: str, config_type: type[Config], make: Callable[[Config], Model]
) -> Model:
    """The model that `save_model` wrote to `folder` or to its `model`, for inference.

    Args:
        make: builds the model of a config; the weights are loaded into it.

    Raises:
        ConfigError: see `load_model`; or weights that are not those of the config.
    """
    config, weights = load_model(Path(folder), model_type, config_type)
    with report_model_errors(Path(folder)):
        model = make(config)
        model.load_state_dict(weights)
    return model.eval()


def model_folder(folder: Path) -> Path:
    """The folder that holds the model: `folder` itself or, for a stage's folder, its `model`; or that of the model of
    the hub that `folder` names.

    Raises:
        ConfigError: see `config_folder` and `hub_folder`.
    """
    return config_folder(hub_folder(folder), "model", "give a trained model's folder")


@contextmanager
def report_model_errors(folder: Path) -> Iterator[None]:
    """Report an error during the building of a model as an error of the files in `folder`.

    Raises:
        ConfigError: sizes that no model has, or weights that are not those of config.json.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        files = f"{model_folder(folder) / 'config.json'}, {WEIGHTS}"
        message = " ".join(str(error).split())
        raise ConfigError(f"these files do not form a valid model: {message:.300}", files, REMEDY) from error


class StoredWeights:
    """The tensors in the safetensors files of a model's folder by name, read one at a time.

    Raises:
        ConfigError: see `weight_files`; or a damaged file.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, list[int]] = {}
        for path in weight_files(folder):
            try:
                with safe_open(str(path), framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118  a method, not a mapping
                        self._files[name] = path
                        self._shapes[name] = list(opened.get_slice(name).get_shape())
            except SafetensorError as error:
                raise ConfigError(f"not whole: {error}", str(path), REMEDY) from error

    @property
    def names(self) -> list[str]:
        return sorted(self._files)

    def shape(self, name: str) -> list[int]:
        return list(self._shapes[name])

    def read(self, name: str) -> Tensor:
        """Read a tensor into separate memory and close the file: pages of a mapped file count as used memory."""
        with safe_open(str(self._files[name]), framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor.clone()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model: those that the index names, or the one.

    Raises:
        ConfigError: some are missing or named outside of the folder, there are pickles alone, or the index is damaged.
    """
    names = [WEIGHTS]
    if not (folder / WEIGHTS).exists() and (folder / INDEX).exists():
        weight_map = read_json_file(folder / INDEX, dict).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ConfigError("weight_map: no mapping of weights to files", str(folder / INDEX), REMEDY)
        names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise ConfigError(
                f"{name!r} is not a file name in this folder", str(folder / INDEX), "do not trust it"
            )
    absent = [name for name in names if not (folder / name).exists()]
    if not absent:
        return [folder / name for name in names]
    if (folder / STORED_WEIGHTS).exists():
        raise ConfigError(
            "its weights are in fewer bytes, for `generate`, `serve` and `Generator` alone",
            str(folder),
            "give the folder that it was exported from",
        )
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles and names == [WEIGHTS]:
        raise ConfigError(
            f"the weights are pickled ({pickles[0]}), which can run any code when it is opened; {WEIGHTS} is missing",
            str(folder),
            "take the model's safetensors; or, if you trust its author, load it with transformers and save it again",
        )
    some = ", ".join(absent[:3])
    raise ConfigError(
        f"{len(absent)} of {len(names)} weight files missing: {some}", str(folder), "download them all"
    )


def save_shards(folder: Path, state: Mapping[str, Tensor], max_shard_size: int | str) -> None:
    """Write `model.safetensors`, or as many files and an index as it takes; other weights there are removed."""
    from huggingface_hub import split_torch_state_dict_into_shards

    folder.mkdir(parents=True, exist_ok=True)
    plan = split_torch_state_dict_into_shards(dict(state), max_shard_size=max_shard_size)
    for name, keys in plan.filename_to_tensors.items():
        with atomic_path(folder / name) as temporary:
            save_file({key: state[key].contiguous() for key in keys}, temporary, metadata={"format": "pt"})
    if plan.is_sharded:
        write_json(folder / INDEX, {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename})
    for path in [*folder.glob("model*.safetensors"), *folder.glob(INDEX)]:
        if path.name not in plan.filename_to_tensors and not (plan.is_sharded and path.name == INDEX):
            path.unlink()


def fill(
    model: nn.Module,
    sources: Mapping[str, Sequence[str]],
    weights: StoredWeights,
    dtype: torch.dtype | None,
    where: str,
    optional: Sequence[str] = (),
) -> None:
    """Give a model that was built on the meta device its weights.

    Args:
        sources: which tensors of the files, one below the other, each of the model's is made of.
        dtype: of floating-point weights; None: as they are stored.
        optional: tensors that the files may lack; they stay on the meta device.

    Raises:
        ConfigError: tensors are missing or surplus, of other shapes, or hold what is no number.
    """
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    missing = [name for name in expected if name not in sources and name not in optional]
    surplus = [name for name in sources if name not in expected]
    if missing or surplus:
        counted = [
            f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            for kind, names in (("missing", missing), ("surplus", surplus))
            if names
        ]
        raise ConfigError(
            f"the weights do not fit config.json: {', '.join(counted)}",
            where,
            "config.json and the weights must be of one model; download or save both again",
        )
    state = {}
    for name, parts in sources.items():
        joined, *other_shapes = [weights.shape(key) for key in parts]
        for shape in other_shapes:
            joined[0] += shape[0]
        if joined != expected[name]:
            raise ConfigError(
                f"{name} is {joined}, config.json says {expected[name]}",
                where,
                "config.json and the weights must be of one model",
            )
        tensors = [weights.read(key) for key in parts]
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        if not is_finite(tensor):
            raise ConfigError(
                f"{name} holds values that are no numbers (NaN or infinite)",
                where,
                "its training diverged, or the file is damaged: take an earlier checkpoint, or download it again",
            )
        state[name] = tensor
    model.load_state_dict(state, strict=False, assign=True)


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, by the extremes, which pass NaN on; `isfinite` would need a copy."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    return all(math.isfinite(extreme.item()) for extreme in torch.aminmax(tensor))
