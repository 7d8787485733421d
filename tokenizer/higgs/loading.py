"""Folders of transformers' `HiggsAudioV2TokenizerModel`, read and written without it.

Weights may lie in one safetensors file or in shards, with the weight norm of training merged or not.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DacConfig, HiggsAudioV2TokenizerConfig, HubertConfig, HubertModel

from audiollm.errors import ConfigError
from audiollm.files.atomic import atomic_path, write_text
from audiollm.files.json_files import OFFLINE, read_json_file
from audiollm.files.tensors import load_tensors
from audiollm.files.transformers_folders import open_model
from audiollm.models.pretrained import model_folder

MODEL_TYPE = "higgs_audio_v2_tokenizer"


def published_config(teacher: HubertConfig | None = None) -> HiggsAudioV2TokenizerConfig:
    """The published shape, with another HuBERT where one is given.

    24 kHz at 25 frames a second, 8 codebooks of 1024, 2 kbps, 200 M parameters with the teacher.

    The defaults of transformers' class are another codec: 75 frames a second, 5 codebooks.
    """
    return HiggsAudioV2TokenizerConfig(
        target_bandwidths=[0.5, 1, 1.5, 2],
        acoustic_model_config=DacConfig(
            encoder_hidden_size=64,
            downsampling_ratios=[8, 5, 4, 2, 3],
            decoder_hidden_size=1024,
            upsampling_ratios=[8, 5, 4, 2, 3],
            hidden_size=256,
        ),
        semantic_model_config=teacher or HubertConfig(mask_time_prob=0.0),
    )


UNUSED = "semantic_model.masked_spec_embed"
"""The teacher's mask in its own training; present or absent with its configuration."""
SCALE, DIRECTION = ".parametrizations.weight.original0", ".parametrizations.weight.original1"


def save_folder(folder: Path, config: Any, state: dict[str, Tensor]) -> None:
    """Write `config.json` and `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / "model.safetensors") as temporary:
        weights = {key: value.contiguous() for key, value in state.items()}
        save_file(weights, temporary, metadata={"format": "pt"})
    config.architectures = ["HiggsAudioV2TokenizerModel"]
    write_text(folder / "config.json", config.to_json_string(use_diff=False))


def load_folder(folder: Path) -> tuple[HiggsAudioV2TokenizerConfig, dict[str, Tensor]]:
    """The configuration and the weights (float32, weight norm merged) in `folder` or its `model`.

    Raises:
        ConfigError: nothing there, or another kind of model.
    """
    folder = model_folder(folder)
    where = str(folder / "config.json")
    found_type = read_json_file(folder / "config.json", dict).get("model_type")
    if found_type != MODEL_TYPE:
        raise ConfigError(
            f"model_type: {found_type!r}, not {MODEL_TYPE!r}", where, "give the folder of another model"
        )
    config = HiggsAudioV2TokenizerConfig.from_pretrained(folder, **OFFLINE)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json_file(index, dict)["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    weights: dict[str, Tensor] = {}
    for name in names:
        if not (folder / name).exists():
            raise ConfigError(
                f"{name} is missing",
                str(folder),
                "download all of its files; a model.pth must first go through transformers' "
                "convert_higgs_audio_v2_tokenizer_to_hf.py",
            )
        weights |= load_tensors(folder / name)
    return config, merge_weight_norm(weights)


def load_hubert(folder: Path) -> nn.Module:
    """A HuBERT by local path, from safetensors.

    Raises:
        ConfigError: nothing there, or another kind of model.
    """
    config = folder / "config.json"
    found_type = read_json_file(config, dict).get("model_type") if config.exists() else None
    if found_type != "hubert":
        raise ConfigError(f"model_type: {found_type!r}, not 'hubert'", str(config), "give a HuBERT's folder")
    hubert: nn.Module = open_model(HubertModel, folder)
    return hubert


def assign(model: nn.Module, weights: dict[str, Tensor], where: str) -> nn.Module:
    """Make `weights` the model's own; it may be on the meta device.

    Raises:
        ConfigError: keys are missing or surplus, or shapes differ.
    """
    state = model.state_dict()
    if UNUSED not in state:
        weights.pop(UNUSED, None)
    elif UNUSED not in weights:
        weights[UNUSED] = torch.zeros(state[UNUSED].shape)
    missing, surplus = sorted(state.keys() - weights.keys()), sorted(weights.keys() - state.keys())
    if missing or surplus:
        raise ConfigError(
            f"the weights do not fit: {len(missing)} missing {missing[:3]}, {len(surplus)} surplus {surplus[:3]}",
            where,
            "config.json and the weights must be of one model",
        )
    for key, value in state.items():
        if value.shape != weights[key].shape:
            raise ConfigError(
                f"{key} is {list(weights[key].shape)}, not {list(value.shape)}",
                where,
                "config.json and the weights must be of one model",
            )
    model.load_state_dict(weights, assign=True)
    return model


def merge_weight_norm(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Float32, and one weight for a scale and a direction, except in the teacher, where HuBERT keeps them."""
    merged: dict[str, Tensor] = {}
    for key, value in weights.items():
        key = re.sub(r"\.weight_g$", SCALE, re.sub(r"\.weight_v$", DIRECTION, key))
        merged[key] = value.float()
    for key in [key for key in merged if key.endswith(DIRECTION) and not key.startswith("semantic_model.")]:
        name = key.removesuffix(DIRECTION)
        direction, scale = merged.pop(key), merged.pop(name + SCALE)
        merged[name + ".weight"] = torch._weight_norm(direction, scale, 0)
    return merged
