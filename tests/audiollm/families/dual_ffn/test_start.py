"""Starts of the stage `train`: our folders, transformers' Higgs Audio V2, plain language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import TokenStream
from audiollm.data.packing import pack
from audiollm.data.text.tokenizer import AUDIO_TOKENS, load_text_tokenizer, train_text_tokenizer
from audiollm.errors import ConfigError, StageError
from audiollm.families.dual_ffn.planning import plan_training
from audiollm.families.dual_ffn.start import start_template, start_vocabulary
from audiollm.families.dual_ffn.training import build_decoder, choose_trained
from audiollm.files.atomic import read_json
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import save_pretrained
from tests.audiollm.supervised.train_samples import SMALL, run_stage, settings_of, write_shards

transformers = pytest.importorskip("transformers")
TEXTS = ["system user assistant Speaker: theo seven"] * 3


def plain_vocabulary(folder: Path, marks: tuple[str, ...], size: int = 300) -> Tokenizer:
    """That of a language model which never saw audio."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(marks),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


@pytest.mark.parametrize(("marks", "style"), [(CHATML, CHATML), (LLAMA3, LLAMA3), (("<s>", "</s>"), CHATML)])
def test_a_language_model_learns_to_speak(
    tmp_path: Path, marks: tuple[str, ...], style: tuple[str, ...]
) -> None:
    """Its vocabulary grows by the tokens that it lacks, in spare rows first; the codec's codes become its own."""
    folder = tmp_path / "language_model"
    folder.mkdir()
    words = plain_vocabulary(folder, marks)
    size = words.get_vocab_size()
    config = transformers.Qwen3Config(
        vocab_size=size + 2, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    shards = str(write_shards(tmp_path / "a", 7))
    run_stage(
        tmp_path / "run",
        shards,
        start=str(folder),
        shape={"audio_ffn_layers": [1]},
        trained="audio_ffn",
        ema_decay=0,
    )
    model, tokenizer = (
        DualFFN.from_pretrained(tmp_path / "run"),
        load_text_tokenizer(tmp_path / "run" / "model"),
    )
    assert all(tokenizer.token_to_id(token) is not None for token in (*AUDIO_TOKENS, *style))
    assert model.config.vocab_size == tokenizer.get_vocab_size() > size + 2
    assert model.config.qk_norm and model.config.audio_ffn_layers == (1,) and model.config.num_codebooks == 4
    before = transformers.Qwen3ForCausalLM.from_pretrained(folder).model.embed_tokens.weight
    after = model.model.embed_tokens.weight
    assert torch.equal(after[:size], before[:size])
    torch.testing.assert_close(after[size:], before[:size].mean(dim=0).expand(len(after) - size, -1))
    trained, begun = (
        model.model.layers[1].audio_mlp.up_proj.weight,
        model.model.layers[1].mlp.up_proj.weight,
    )
    assert not torch.equal(trained, begun)
    card = (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    assert "| Begun from | language_model |" in card and "4 codebooks of 32" in card
    adapter: dict[str, Any] = {"start": str(folder), "trained": "adapter", "ema_decay": 0}
    with pytest.raises(StageError, match="embed_audio_tokens and audio_lm_head of a language model are new"):
        run_stage(tmp_path / "lora", shards, **adapter)
    beside = {"trained_beside": ["embed_audio_tokens", "audio_lm_head"]}
    run_stage(tmp_path / "lora", shards, **adapter, lora=beside)
    config = settings_of({"samples": shards, **adapter})
    decoder = build_decoder(config, start_template(tmp_path / "run"))
    choose_trained(
        decoder, config, is_coded=False
    )  # texts alone, or recordings as features: no code is read or said


def test_transformers_higgs_is_trained_on_and_given_back(tmp_path: Path) -> None:
    tokenizer = train_text_tokenizer(TEXTS, 300)
    config = DualFFNConfig(tokenizer.get_vocab_size(), 4, 34, 32, 2, 2, 2, 16, 64)
    save_pretrained(DualFFN(config), tmp_path / "ours", tokenizer)
    peer = transformers.HiggsAudioV2ForConditionalGeneration.from_pretrained(
        tmp_path / "ours", use_text_head=True
    )
    peer.save_pretrained(tmp_path / "higgs")
    tokenizer.save(str(tmp_path / "higgs" / "tokenizer.json"))
    shards = str(write_shards(tmp_path / "a", 7))
    run_stage(tmp_path / "run", shards, start=str(tmp_path / "higgs"))
    data = read_json(tmp_path / "run" / "model" / "config.json")
    assert data["model_type"] == "higgs_audio_v2" and data["vocab_size"] == config.vocab_size
    assert data["audio_token_id"] == tokenizer.token_to_id("<|AUDIO_OUT|>")
    _, info = transformers.HiggsAudioV2ForConditionalGeneration.from_pretrained(
        tmp_path / "run" / "model", use_text_head=True, output_loading_info=True
    )
    assert not any(info.values()), info


def test_what_does_not_fit_the_model_to_start_from(tmp_path: Path) -> None:
    shards = str(write_shards(tmp_path / "a", 7))
    words = train_text_tokenizer(TEXTS, 300)
    shape = DualFFNConfig(words.get_vocab_size(), 4, 18, 32, 2, 2, 2, 16, 64)
    save_pretrained(DualFFN(shape), tmp_path / "other_codec", words)
    with pytest.raises(ConfigError, match="4 codebooks of 16 codes, the shards 4 of 32"):
        run_stage(tmp_path / "one", shards, start=str(tmp_path / "other_codec"))
    shape = DualFFNConfig(words.get_vocab_size(), 4, 34, 32, 2, 2, 2, 16, 64)
    save_pretrained(DualFFN(shape), tmp_path / "base", words)
    others = tmp_path / "other_words"
    others.mkdir()
    train_text_tokenizer(["a wholly different text of zebras"] * 3, 300).save(str(others / "tokenizer.json"))
    with pytest.raises(ConfigError, match="has another id than in the vocabulary of the model"):
        run_stage(tmp_path / "two", shards, start=str(tmp_path / "base"), text_tokenizer=str(others))
    with pytest.raises(ConfigError, match="the model to start from has its own: all"):
        run_stage(tmp_path / "three", shards, start=str(tmp_path / "base"), shape={"audio_ffn_layers": [1]})


def test_a_vocabulary_with_all_its_tokens_stays_as_it_is(tmp_path: Path) -> None:
    words = train_text_tokenizer(TEXTS, 300)
    save_pretrained(DualFFN(DualFFNConfig(words.get_vocab_size(), hidden_size=32)), tmp_path / "model", words)
    assert start_vocabulary(tmp_path).get_vocab() == words.get_vocab()


def test_chosen_layers_are_a_setting_of_the_model(tmp_path: Path) -> None:
    shards = str(write_shards(tmp_path / "a", 7))
    run_stage(tmp_path / "run", shards, shape={**SMALL, "audio_ffn_layers": [0]}, max_length=200)
    config = DualFFN.from_pretrained(tmp_path / "run").config
    assert config.audio_ffn_layers == (0,) and config.max_position_embeddings == 200
    some: dict[str, Any] = {"samples": "shards", "shape": {**SMALL, "audio_ffn_layers": [1]}}
    all_layers, one = (settings_of(each) for each in ({"samples": "shards", "shape": SMALL}, some))
    assert (
        plan_training(all_layers, {}).parameters - plan_training(one, {}).parameters == 3 * 32 * 64 + 2 * 32
    )
    with pytest.raises(ValidationError, match=r"audio_ffn_layers: no layer \[2\] among 2"):
        settings_of({"samples": "shards", "shape": {**SMALL, "audio_ffn_layers": [0, 2]}})


def test_windows_of_layers_and_muon_are_settings(tmp_path: Path) -> None:
    shards = str(write_shards(tmp_path / "a", 7))
    windows = {"sliding_window": 4, "sliding_window_layers": [0]}
    rules = [{"pattern": "*_proj.weight", "optimizer": "muon", "rate_factor": 10}]
    run_stage(tmp_path / "run", shards, shape={**SMALL, **windows}, rules=rules)
    config = DualFFN.from_pretrained(tmp_path / "run").config
    assert [config.window_of(layer) for layer in range(2)] == [4, None]
    state = load_file(tmp_path / "run" / "checkpoint" / "optimizers.safetensors")
    with_muon = {key.rpartition(".")[0] for key in state if key.endswith(".momentum_buffer")}
    with_adamw = {key.rpartition(".")[0] for key in state if key.endswith(".exp_avg")}
    assert with_muon and all(name.endswith("_proj.weight") for name in with_muon)
    assert with_adamw and not any(name.endswith("_proj.weight") for name in with_adamw)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"shape": {**SMALL, "sliding_window": 4, "sliding_window_layers": [2]}}, r"no layer \[2\] among 2"),
        ({"shape": {**SMALL, "sliding_window_layers": [0]}}, "sliding_window, how far they see, is not"),
        ({"rules": rules, "strategy": "fsdp2"}, "fsdp2 has no Muon"),
        ({"rules": [{"pattern": "*", "optimizer": "sgd"}]}, "'adamw' or 'muon'"),
    ]
    for changes, reason in wrong:
        with pytest.raises(ValidationError, match=reason):
            settings_of({"samples": "shards", "shape": SMALL, **changes})


def test_a_model_from_a_start_gets_the_window_of_the_settings(tmp_path: Path) -> None:
    """It then sees no further than a model that was made with the window, and keeps it in its folder."""
    shards = str(write_shards(tmp_path / "a", 7))
    run_stage(tmp_path / "first", shards)
    settings = settings_of(
        {"samples": shards, "start": str(tmp_path / "first"), "shape": {"sliding_window": 3}}
    )
    template = start_template(tmp_path / "first")
    windowed = build_decoder(settings, template)
    assert windowed.config.sliding_window == 3
    made = DualFFN(windowed.config)
    made.load_state_dict(windowed.state_dict())
    whole = DualFFN.from_pretrained(tmp_path / "first")
    ids_S = torch.arange(12) % 7 + 40
    none_SK = torch.full((12, whole.config.num_codebooks), IGNORE)
    stream = TokenStream(ids_S, torch.zeros_like(none_SK), torch.zeros_like(ids_S), ids_S, none_SK)
    found, expected, other = (model.eval()(pack([stream])) for model in (windowed, made, whole))
    assert torch.equal(found, expected) and not torch.allclose(found, other)
