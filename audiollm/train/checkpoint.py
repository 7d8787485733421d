"""Resumable training state in safetensors: weights, optimizers, EMA and counters, whole or absent. No pickle.

A checkpoint folder holds `modules.safetensors`, `optimizers.safetensors` (keys `name/index.entry`),
`ema.safetensors` (where there is an EMA) and `state.json`. It is written under a temporary name and renamed,
so one that exists is complete.

What a module remembers from step to step must be a parameter or a persistent buffer (EMA codebooks, counters,
flags such as "initialised"): attributes of another kind, and buffers with `persistent=False`, are not saved.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def save_checkpoint(
    folder: Path,
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    ema: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> None:
    """Write everything a run needs to go on, replacing an older checkpoint only when the new one is whole."""
    temporary, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(_module_tensors(modules), temporary / "modules.safetensors")
    tensors, scalars = _flatten_optimizers(optimizers)
    save_file(tensors, temporary / "optimizers.safetensors")
    if ema:
        save_file({name: tensor.contiguous() for name, tensor in ema.items()}, temporary / "ema.safetensors")
    (temporary / "state.json").write_text(json.dumps({**state, "optimizers": scalars}))
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(
    folder: Path,
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    ema: dict[str, Tensor],
) -> dict[str, Any] | None:
    """Restore in place; returns the saved `state`, or None where there is no whole checkpoint.

    Raises:
        KeyError, RuntimeError: the checkpoint belongs to other modules.
    """
    old = folder.with_name(folder.name + ".old")
    if not folder.exists() and old.exists():  # killed between the two renames
        os.replace(old, folder)
    if not (folder / "state.json").exists():
        return None
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    tensors = load_file(folder / "modules.safetensors")
    for name, module in modules.items():
        prefix = f"{name}."
        own = {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
        module.load_state_dict(own)
    entries = {**load_file(folder / "optimizers.safetensors"), **state.pop("optimizers")}
    for name, optimizer in optimizers.items():
        _restore_optimizer(optimizer, name, entries)
    if (folder / "ema.safetensors").exists():
        for name, tensor in load_file(folder / "ema.safetensors").items():
            ema[name].copy_(tensor)
    return state


def _module_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.detach().cpu().clone().contiguous()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }


def _flatten_optimizers(
    optimizers: Mapping[str, torch.optim.Optimizer],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state as `name/index.entry`: tensors and plain numbers apart. One that never stepped has none."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for name, optimizer in optimizers.items():
        for index, entries in optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"{name}/{index}.{key}"] = value.contiguous()
                else:
                    scalars[f"{name}/{index}.{key}"] = value
    return tensors, scalars


def _restore_optimizer(optimizer: torch.optim.Optimizer, name: str, entries: Mapping[str, Any]) -> None:
    state: dict[int, dict[str, Any]] = {}
    for full, value in entries.items():
        owner, _, rest = full.rpartition("/")
        if owner == name:
            index, _, key = rest.partition(".")
            state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
