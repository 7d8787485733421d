"""Weights of a published folder: read into a model of the same names, and written back as they were stored.

What is written has the files, the names, the dtypes and the index of the folder that the training began from; tensors
that the model does not have (of a codec, of an encoder) and all other files go on unchanged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from audiollm.errors import ConfigError
from audiollm.files.atomic import atomic_path
from audiollm.models.pretrained import StoredWeights, fill, weight_files

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Types of weights by their names in the header of a safetensors file."""


def load_published(
    model: nn.Module, folder: Path, tied: Mapping[str, str], dtype: torch.dtype = torch.float32
) -> None:
    """Give a model on the meta device the weights of a folder.

    Args:
        tied: names of weights that are the same tensor as others, by name -> the other's name; the files may have
            either, or both, and the model both, or the other.

    Raises:
        ConfigError: weights are missing or of other shapes, or tied ones differ.
    """
    weights = StoredWeights(folder)
    names = set(weights.names)
    expected = model.state_dict().keys()
    sources = {name: [name] for name in expected if name in names}
    where = str(folder)
    for name, other in tied.items():
        if name in names and other in names and not torch.equal(weights.read(name), weights.read(other)):
            raise ConfigError(
                f"{name} and {other} differ, and config.json says that they are one tensor",
                where,
                "config.json and weights must be of one model; set the flag that ties them to false if two are meant",
            )
        present = name if name in names else other
        if present in names:
            sources |= {end: [present] for end in (name, other) if end in expected}
    fill(model, sources, weights, dtype, where)
    tie_weights(model, tied)


def tie_weights(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Make weights of a model the same tensor as others.

    Args:
        tied: as `load_published` has it.
    """
    names = model.state_dict().keys()
    for name, other in tied.items():
        if name in names:
            _owner(model, name).register_parameter(name.rpartition(".")[2], model.get_parameter(other))


def write_published(
    start: Path, target: Path, weights: Mapping[str, Tensor], tied: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write a folder like the one that a training began from, with other weights; one tensor at a time is read.

    Args:
        weights: by name; each that is stored under this name takes the stored one's place.
        tied: names under which the weight of another name may be stored, too.

    Raises:
        ValueError: a weight has another shape than the stored one.
    """
    target.mkdir(parents=True, exist_ok=True)
    files = weight_files(start)
    skipped = {path.name for path in files}
    for path in sorted(start.iterdir()):
        if path.name in skipped:
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, target / path.name)
    for path in files:
        with atomic_path(target / path.name) as temporary:
            shutil.copyfile(path, temporary)
            _overwrite(temporary, weights, tied)


def check_stored(start: Path, weights: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """Check that every weight of a model has a place in the files of a folder.

    Raises:
        ConfigError: one has none.
    """
    stored = set(StoredWeights(start).names)
    others = {**tied, **{other: name for name, other in tied.items()}}
    lost = [name for name in weights if name not in stored and others.get(name) not in stored]
    if lost:
        raise ConfigError(
            f"{lost[0]} has no place in the files of the model that the training began from",
            str(start),
            "download the model again",
        )


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _overwrite(path: Path, weights: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """Put weights in the place of those of a safetensors file.

    The file begins with the length of a header, 8 bytes, and the header, which has dtype, shape and place of each
    tensor in what follows (https://huggingface.co/docs/safetensors).
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name, entry in header.items():
            source = name if name in weights else tied.get(name, name)
            if source not in weights:  # of a codec or an encoder, or what files say of themselves
                continue
            weight = weights[source].detach()
            if list(weight.shape) != entry["shape"]:
                raise ValueError(f"{name} is {list(weight.shape)}, and {entry['shape']} in {path.name}")
            values = weight.to("cpu", DTYPES[entry["dtype"]]).contiguous().reshape(-1)
            file.seek(8 + length + entry["data_offsets"][0])
            file.write(values.view(torch.uint8).numpy().data)
