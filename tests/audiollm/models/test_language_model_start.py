"""DualFFN on plain Llamas and Qwens: their text logits, what audio begins as, a vocabulary that grows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hub import CONFIG, random_model
from tokenizers import Tokenizer
from torch import Tensor

from audiollm.data.chat.template import Kind, TokenStream
from audiollm.data.packing import pack
from audiollm.data.text.tokenizer import AUDIO_TOKENS, add_special_tokens, train_text_tokenizer
from audiollm.errors import ConfigError
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import grow_vocabulary, save_pretrained

transformers = pytest.importorskip("transformers")

LANGUAGE_MODEL = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def text_stream(ids_S: Tensor, num_codebooks: int = 3) -> TokenStream:
    none_SK = torch.zeros(len(ids_S), num_codebooks, dtype=torch.long)
    kinds_S = torch.full_like(ids_S, int(Kind.TEXT))
    return TokenStream(ids_S, none_SK, kinds_S, torch.full_like(ids_S, -100), none_SK - 100)


def text_logits(model: DualFFN, ids_S: Tensor) -> Tensor:
    batch = pack([text_stream(ids_S, model.config.num_codebooks)])
    with torch.no_grad():
        return model.text_logits(model(batch)[batch.row_of_S][: len(ids_S)])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_text_tokenizer(["seven zebras sang to the moon"] * 3, 320)


def language_model(kind: str, **changes: Any) -> Any:
    torch.manual_seed(1)
    settings = {**LANGUAGE_MODEL, **changes}
    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    }
    config_class, model_class = classes[kind]
    model = model_class(config_class(**settings)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_a_language_model_gives_exactly_its_text_logits(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    peer = language_model(kind, **changes)
    peer.save_pretrained(tmp_path, max_shard_size="20KB")
    model = DualFFN.from_language_model(tmp_path, num_codebooks=3, codebook_size=34)
    ids_S = torch.randint(300, (17,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = peer(ids_S[None]).logits[0]
    ours = text_logits(model, ids_S)
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert model.text_lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    save_pretrained(model, tmp_path / "again")
    assert torch.equal(text_logits(DualFFN.from_pretrained(tmp_path / "again"), ids_S), ours)


def test_audio_begins_as_the_language_models_text(tmp_path: Path) -> None:
    language_model("llama").save_pretrained(tmp_path)
    model = DualFFN.from_language_model(tmp_path, 3, 34, audio_ffn_layers=[1])
    assert not model.model.layers[0].has_audio_ffn and model.config.audio_ffn_layers == (1,)
    weights = model.state_dict()
    audio = [key for key in weights if ".audio_" in key]
    assert len(audio) == 5
    for key in audio:
        of_text = weights[key.replace(".audio_", ".")]
        assert torch.equal(weights[key], of_text) and weights[key].data_ptr() != of_text.data_ptr()
    codes_KT = torch.randint(34, (500, 3))
    loudness = model.model.embed_audio_tokens(codes_KT).std() / model.model.embed_tokens.weight.std()
    assert 0.9 < loudness.item() < 1.1
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("mistral", {}, "'mistral' is none of llama, qwen2, qwen3"),
        ("llama", {"attention_bias": True}, "attention_bias: True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "'linear'"),
    ],
)
def test_language_models_of_other_kinds_are_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], reason: str
) -> None:
    language_model(kind, **changes).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        DualFFN.from_language_model(tmp_path)


def test_a_language_model_is_not_taken_for_a_dual_ffn(tmp_path: Path) -> None:
    language_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="begin a training from it with `start`"):
        DualFFN.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no layer \[9\].*\n.*2 layers"):
        DualFFN.from_language_model(tmp_path, audio_ffn_layers=[9])


def test_a_grown_vocabulary_keeps_what_it_knew(tokenizer: Tokenizer) -> None:
    words = Tokenizer.from_str(tokenizer.to_str())
    words.add_special_tokens([f"<|more_{n}|>" for n in range(5)])
    size = tokenizer.get_vocab_size()
    model = random_model(replace(CONFIG, vocab_size=size))
    before, ids_S = model.state_dict(), torch.arange(size)
    before, logits = {key: value.clone() for key, value in before.items()}, text_logits(model, ids_S)
    assert grow_vocabulary(model, words) == 5 and model.config.vocab_size == size + 5
    torch.testing.assert_close(text_logits(model, ids_S)[:, :size], logits)
    for key in ("model.embed_tokens.weight", "text_lm_head.weight"):
        after = model.state_dict()[key]
        assert torch.equal(after[:size], before[key])
        torch.testing.assert_close(after[size:], before[key].mean(dim=0).expand(5, -1))
    assert grow_vocabulary(model, words) == 0


def test_words_in_rows_that_a_model_has_to_spare(tokenizer: Tokenizer) -> None:
    """Qwen's embedding has more rows than its vocabulary words."""
    model = random_model()
    size, before = tokenizer.get_vocab_size(), model.model.embed_tokens.weight.detach().clone()
    assert size < 400 and grow_vocabulary(model, tokenizer, num_known=size - 3) == 0
    after = model.model.embed_tokens.weight
    assert torch.equal(after[: size - 3], before[: size - 3]) and torch.equal(after[size:], before[size:])
    torch.testing.assert_close(after[size - 3 : size], before[: size - 3].mean(dim=0).expand(3, -1))


def test_special_tokens_that_a_vocabulary_lacks_can_be_appended(tmp_path: Path) -> None:
    """A plain language model and its vocabulary, made ready for audio."""
    plain = train_text_tokenizer(["seven zebras sang to the moon"] * 3, 320)
    data = json.loads(plain.to_str())
    kept = [token for token in data["added_tokens"] if token["content"] not in AUDIO_TOKENS]
    gone = [token["content"] for token in data["added_tokens"] if token["content"] in AUDIO_TOKENS]
    order = [word for word in data["model"]["vocab"] if word not in gone]
    data["model"]["vocab"] = {word: place for place, word in enumerate(order)}
    data["added_tokens"] = [{**token, "id": order.index(token["content"])} for token in kept]
    words = Tokenizer.from_str(json.dumps(data))
    size = words.get_vocab_size()
    language_model("llama", vocab_size=size).save_pretrained(tmp_path)
    model = DualFFN.from_language_model(tmp_path, 3, 34)
    before = text_logits(model, torch.arange(size))
    added = add_special_tokens(words, "llama3")
    assert added > 4 and grow_vocabulary(model, words, num_known=size) == added
    torch.testing.assert_close(text_logits(model, torch.arange(size))[:, :size], before)
