"""Models from folders and back: transformers' layouts, Boson's, plain language models, and what cannot be loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.errors import ConfigError
from audiollm.files.atomic import read_json, write_json
from audiollm.models.attention import RopeScaling
from audiollm.models.audio_encoder import AudioEncoderConfig
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import save_pretrained
from audiollm.models.model_card import ModelCard
from audiollm.models.pretrained import save_model

transformers = pytest.importorskip("transformers")

CONFIG = DualFFNConfig(
    vocab_size=400, num_codebooks=3, codebook_size=34, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, intermediate_size=48, rope_scaling=RopeScaling(32.0, 0.125, 0.5, 1024), dropout=0.1,
)  # fmt: skip


def random_model(config: DualFFNConfig = CONFIG, seed: int = 0) -> DualFFN:
    torch.manual_seed(seed)
    model = DualFFN(config).eval()
    for parameter in model.parameters():  # far from the symmetric start, norms and biases included
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def assert_same(one: DualFFN, two: DualFFN) -> None:
    assert one.config == two.config
    ours, theirs = one.state_dict(), two.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_text_tokenizer(["seven zebras sang to the moon"] * 3, 320)


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_transformers_loads_what_is_saved_here(tokenizer: Tokenizer, tmp_path: Path, shard: str) -> None:
    model = random_model()
    repetition = {"ras_win_len": 7, "ras_win_max_num_repeat": 3}
    save_pretrained(model, tmp_path, tokenizer, max_shard_size=shard, generation=repetition)
    peer, info = transformers.HiggsAudioV2ForConditionalGeneration.from_pretrained(
        tmp_path, use_text_head=True, output_loading_info=True
    )
    assert not any(info.values()), info
    theirs = peer.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, theirs[key]), key
    assert (
        type(transformers.AutoModel.from_pretrained(tmp_path)).__name__
        == "HiggsAudioV2ForConditionalGeneration"
    )
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == (shard == "20KB")
    names = {
        "audio_token_id": "<|AUDIO_OUT|>",
        "audio_bos_token_id": "<|audio_out_bos|>",
        "eos_token_id": "<|eot_id|>",
    }
    for name, word in names.items():
        assert getattr(peer.config, name) == tokenizer.token_to_id(word)
    assert (peer.config.codebook_size, peer.config.audio_stream_bos_id, peer.config.audio_stream_eos_id) == (
        34,
        32,
        33,
    )
    assert peer.generation_config.ras_win_len == 7 and peer.generation_config.ras_win_max_num_repeat == 3
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("<|eot_id|>seven").input_ids == (
        tokenizer.encode("<|eot_id|>seven").ids
    )


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_what_transformers_saves_is_loaded_here(tmp_path: Path, shard: str) -> None:
    model = random_model(replace(CONFIG, dropout=0.0))
    save_pretrained(model, tmp_path / "ours")
    peer = transformers.HiggsAudioV2ForConditionalGeneration.from_pretrained(
        tmp_path / "ours", use_text_head=True
    )
    peer.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    assert_same(DualFFN.from_pretrained(tmp_path / "theirs"), model)


def test_fields_that_are_left_out_are_those_of_transformers_class(tmp_path: Path) -> None:
    save_pretrained(random_model(), tmp_path)
    data = read_json(tmp_path / "config.json")
    del data["rope_parameters"], data["rms_norm_eps"]
    write_json(tmp_path / "config.json", data)
    config = DualFFN.from_pretrained(tmp_path).config
    assert config.rope_scaling == RopeScaling(32.0, 0.125, 0.5, 1024) and config.norm_eps == 1e-5


def test_a_model_without_its_text_head_takes_the_embedding_and_says_so(tmp_path: Path) -> None:
    """transformers drops the head on `from_pretrained` without `use_text_head`."""
    model = random_model()
    save_pretrained(model, tmp_path / "ours")
    peer = transformers.HiggsAudioV2ForConditionalGeneration.from_pretrained(tmp_path / "ours")
    peer.save_pretrained(tmp_path / "theirs")
    with pytest.warns(UserWarning, match="no text head; it begins as a copy"):
        again = DualFFN.from_pretrained(tmp_path / "theirs")
    assert torch.equal(again.text_lm_head.weight, model.model.embed_tokens.weight)
    assert again.text_lm_head.weight.data_ptr() != again.model.embed_tokens.weight.data_ptr()
    assert torch.equal(again.audio_lm_head.weight, model.audio_lm_head.weight)


OWN_SHAPES: list[dict[str, Any]] = [
    {"audio_ffn_layers": (1,)},
    {"audio_ffn_layers": ()},
    {"qkv_bias": True},
    {"qk_norm": True, "rope_scaling": None},
    {"sliding_window": 7, "num_heads": 3, "num_kv_heads": 1},
]


@pytest.mark.parametrize("changes", OWN_SHAPES)
def test_what_transformers_cannot_hold_has_a_layout_of_its_own(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = random_model(replace(CONFIG, **changes))
    save_pretrained(model, tmp_path / "model", max_shard_size="20KB")
    data = read_json(tmp_path / "model" / "config.json")
    assert data["model_type"] == "audiollm_dual_ffn" and data["num_hidden_layers"] == 2
    assert_same(DualFFN.from_pretrained(tmp_path), model)  # as a stage's folder


def test_all_layers_named_is_all_layers(tmp_path: Path) -> None:
    model = random_model(replace(CONFIG, audio_ffn_layers=(0, 1)))
    save_pretrained(model, tmp_path)
    assert read_json(tmp_path / "config.json")["model_type"] == "higgs_audio_v2"
    assert_same(DualFFN.from_pretrained(tmp_path), random_model())


def test_folders_as_they_were_first_written_are_loaded(tmp_path: Path) -> None:
    config = replace(CONFIG, sliding_window=7, audio_ffn_layers=(1,))
    save_model(tmp_path, random_model(config), "audiollm_dual_ffn", config)
    assert_same(DualFFN.from_pretrained(tmp_path), random_model(config))


def test_another_dtype(tmp_path: Path) -> None:
    model = random_model()
    save_pretrained(model.bfloat16(), tmp_path)
    assert DualFFN.from_pretrained(tmp_path).model.norm.weight.dtype == torch.float32
    for dtype in (None, torch.bfloat16):
        assert_same(DualFFN.from_pretrained(tmp_path, dtype), model)
    assert DualFFN.from_pretrained(tmp_path, torch.float64).model.norm.weight.dtype == torch.float64
    assert read_json(tmp_path / "config.json")["dtype"] == "bfloat16"


def boson_folder(model: DualFFN, folder: Path, **changes: Any) -> Path:
    """The layout of boson-ai/higgs-audio (configuration_higgs_audio.py, modeling_higgs_audio.py), in two shards."""
    config = model.config
    renamed = {}
    for key, value in model.state_dict().items():
        name = key.removeprefix("model.").replace(
            "embed_audio_tokens.embed_audio_tokens", "audio_codebook_embeddings"
        )
        renamed[f"audio_decoder_proj.{name}" if "lm_head" in name else name] = value
    for name, inner in (
        ("embed_tokens", "embedding"),
        ("audio_decoder_proj.text_lm_head", "linear"),
        ("audio_decoder_proj.audio_lm_head", "linear"),
    ):
        whole = renamed.pop(f"{name}.weight")
        renamed[f"{name}.{inner}_trainable.weight"] = whole[60:].clone()
        renamed[f"{name}.{inner}_frozen.weight"] = whole[:60].clone()
    renamed["audio_codebook_weights"] = torch.full((config.num_codebooks,), 1 / config.num_codebooks)
    if config.audio_encoder is None:
        renamed["audio_tower.conv1.weight"] = torch.zeros(4, 3, 3)  # left behind, and not the model's
    folder.mkdir(parents=True)
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    halves = [dict(list(renamed.items())[half::2]) for half in (0, 1)]
    for name, half in zip(names, halves, strict=True):
        save_file(half, folder / name)
    index = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    text = {
        "model_type": "llama", "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0, "rope_scaling": {
            "factor": 32.0, "low_freq_factor": 0.125, "high_freq_factor": 0.5,
            "original_max_position_embeddings": 1024, "rope_type": "llama3",
        },
    }  # fmt: skip
    top = {
        "model_type": "higgs_audio", "text_config": text, "audio_adapter_type": "dual_ffn_fast_forward",
        "audio_dual_ffn_layers": [0, 1], "audio_num_codebooks": 3, "audio_codebook_size": 32,
        "skip_audio_tower": True,
    }  # fmt: skip
    write_json(folder / "config.json", {**top, **changes})
    return folder


def test_bosons_layout(tmp_path: Path) -> None:
    model = random_model(replace(CONFIG, dropout=0.0))
    assert_same(DualFFN.from_pretrained(boson_folder(model, tmp_path / "boson")), model)


def test_bosons_layout_with_chosen_layers(tmp_path: Path) -> None:
    model = random_model(replace(CONFIG, dropout=0.0, audio_ffn_layers=(1,)))
    folder = boson_folder(model, tmp_path / "boson", audio_adapter_type="dual_ffn", audio_dual_ffn_layers=[1])
    assert_same(DualFFN.from_pretrained(folder), model)


def test_bosons_layout_with_its_encoder(tmp_path: Path) -> None:
    """The layout of Boson's understanding variant, which is not published."""
    encoder = AudioEncoderConfig(16, 1, 2, 32, num_mel_bins=8, max_source_positions=20, reduction="mean")
    model = random_model(replace(CONFIG, dropout=0.0, audio_encoder=encoder))
    shape = {
        name: getattr(encoder, name)
        for name in encoder.__dict__
        if name.startswith(("enc", "d_", "n", "max"))
    }
    folder = boson_folder(model, tmp_path / "boson", skip_audio_tower=False, audio_encoder_config=shape)
    assert_same(DualFFN.from_pretrained(folder), model)
    save_pretrained(model, tmp_path / "ours")
    assert_same(DualFFN.from_pretrained(tmp_path / "ours"), model)


@pytest.mark.parametrize(
    "changes",
    [
        {"audio_adapter_type": "stack"},
        {"audio_adapter_type": "dual_ffn_fast_forward", "audio_dual_ffn_layers": [1]},
        {"use_audio_out_self_attention": True},
        {"audio_embed_avg": True},
    ],
)
def test_variants_of_bosons_that_are_no_dual_ffn_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = boson_folder(random_model(), tmp_path / "boson", **changes)
    with pytest.raises(ConfigError, match=next(iter(changes))):
        DualFFN.from_pretrained(folder)


def test_saved_again_nothing_is_left_of_the_model_before(tmp_path: Path) -> None:
    save_pretrained(random_model(), tmp_path, max_shard_size="20KB")
    save_pretrained(random_model(seed=2), tmp_path)
    assert sorted(path.name for path in tmp_path.glob("model*")) == ["model.safetensors"]
    assert_same(DualFFN.from_pretrained(tmp_path), random_model(seed=2))
    save_pretrained(random_model(seed=3), tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    assert_same(DualFFN.from_pretrained(tmp_path), random_model(seed=3))


def test_the_card_says_what_is_known_and_what_is_not(tmp_path: Path) -> None:
    model = random_model()
    save_pretrained(model, tmp_path, card=ModelCard(codec="dac, 24 kHz", license="apache-2.0"))
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for part in (
        f"{parameters:,}",
        "dac, 24 kHz",
        "license: apache-2.0",
        "3 codebooks of 32",
        "Training data | not st",
    ):
        assert part in text
    save_pretrained(model, tmp_path, card=ModelCard(data="LJ Speech"))
    assert "LJ Speech" in (tmp_path / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text("my own words", encoding="utf-8")
    save_pretrained(model, tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "my own words"
