"""Folders of models, stored again in half precision as most are published, or in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""Half precisions by name."""


def stored_as(folder: Path, dtype: str) -> Path:
    """A copy of a model's folder beside it, with its floating-point weights in `dtype`."""
    copy = folder.with_name(f"{folder.name}_{dtype}")
    shutil.copytree(folder, copy)
    for path in copy.rglob("*.safetensors"):
        weights = {
            name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
            for name, tensor in load_file(path).items()
        }
        save_file(weights, path, metadata={"format": "pt"})
    for path in copy.rglob("config.json"):
        config = json.loads(path.read_text())
        if "dtype" in config:  # transformers' configs; ours have no such setting
            path.write_text(json.dumps({**config, "dtype": dtype}))
    return copy
