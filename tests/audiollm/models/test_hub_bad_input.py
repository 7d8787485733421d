"""Model folders that cannot be loaded, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_hub import random_model

from audiollm.autoencoder import load_autoencoder
from audiollm.codec import load_codec
from audiollm.errors import ConfigError
from audiollm.files.atomic import read_json, write_json
from audiollm.flow.conditions.pretrained import load_text_encoder
from audiollm.models.audio_encoder import encoder_config
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import save_pretrained
from audiollm.rl.reward_models.model import RewardModel


def test_missing_and_surplus_keys_are_named(tmp_path: Path) -> None:
    save_pretrained(random_model(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in ("model.norm.weight", *(f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkvo")):
        del weights[name]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # of old checkpoints: no weight
    weights["model.gate.weight"] = torch.zeros(2)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"5 missing \(model\S+, \S+, \S+, \.\.\.\), 1 surplus \(model.gate.weight\)"
    ):
        DualFFN.from_pretrained(tmp_path)


def test_another_shape_is_named(tmp_path: Path) -> None:
    save_pretrained(random_model(), tmp_path)
    data = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", {**data, "intermediate_size": 64})
    with pytest.raises(ConfigError, match=r"audio_mlp.* is \[.*48.*\], config.json says \[.*64.*\]"):
        DualFFN.from_pretrained(tmp_path)


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    save_pretrained(random_model(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"pickled \(pytorch_model.bin\)(.|\n)*save it again"):
        DualFFN.from_pretrained(tmp_path)


LOADERS: dict[str, Callable[[Path], Any]] = {
    "model": DualFFN.from_pretrained,
    "codec": load_codec,
    "autoencoder": load_autoencoder,
    "encoder": load_text_encoder,
    "audio encoder": encoder_config,
    "reward model": RewardModel.load,
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_folder_that_does_not_exist_is_not_one_without_a_config(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "train" / "model").mkdir(parents=True)
    (run / "train" / "model" / "config.json").write_text("{}")
    (run / "tokenize").mkdir()
    (run / "tokenize" / "stage.json").write_text("{}")
    (run / "file").write_text("")
    reasons = {
        "trian": r"no such folder(.|\n)*did you mean 'train'",
        "nowhere/deep": "no such folder",
        "file": "it is a file",
        "tokenize": "the stage makes none, or has not finished",
        "": r"the folder of a whole run(.|\n)*train",
    }
    for name, reason in reasons.items():
        with pytest.raises(ConfigError, match=reason) as caught:
            LOADERS[kind](run / name)
        assert "config.json is missing" not in str(caught.value)
    (run / "empty").mkdir()
    with pytest.raises(ConfigError, match="config.json is missing"):
        LOADERS[kind](run / "empty")


def test_folders_that_are_not_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json is missing"):
        DualFFN.from_pretrained(tmp_path)
    save_pretrained(random_model(), tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:100])
    with pytest.raises(ConfigError, match="not whole(.|\n)*write it again"):
        DualFFN.from_pretrained(tmp_path)
    shard.unlink()
    with pytest.raises(ConfigError, match=f"1 of .* weight files missing: {shard.name}"):
        DualFFN.from_pretrained(tmp_path)
    index = read_json(tmp_path / "model.safetensors.index.json")
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../elsewhere.safetensors")
    write_json(tmp_path / "model.safetensors.index.json", index)
    with pytest.raises(ConfigError, match="not a file name in this folder"):
        DualFFN.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="not JSON"):
        DualFFN.from_pretrained(tmp_path)
    write_json(tmp_path / "config.json", {"model_type": "bert"})
    with pytest.raises(ConfigError, match="'bert' is none of"):
        DualFFN.from_pretrained(tmp_path)
