"""The trained part of a model: patterns, the audio path, LoRA through PEFT; adapters are saved, loaded and merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn

from audiollm.families.adapters import save_adapter
from audiollm.families.dual_ffn.adapting import adapt, add_lora, merge_adapter, train_only
from audiollm.train.loop.modules import checkpoint_activations
from audiollm.train.settings import LoRASettings


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.mlp, self.audio_mlp = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.audio_input_layernorm, self.audio_post_attention_layernorm = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.audio_mlp(self.mlp(self.q_proj(hidden)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens, self.embed_audio_tokens = nn.Embedding(9, 8), nn.Embedding(9, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.audio_lm_head, self.text_lm_head = nn.Linear(8, 9), nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(ids) + self.embed_audio_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.audio_lm_head(hidden)


IDS = torch.arange(9)
SETTINGS = LoRASettings(rank=2, target_modules=("q_proj", "mlp"), trained_beside=("audio_lm_head",))


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_all_patterns_and_the_audio_path() -> None:
    model = Model()
    assert adapt(model, "all") is model and len(trained(model)) == len(list(model.parameters()))
    adapt(model, "audio_ffn")
    assert trained(model) == {name for name, _ in model.named_parameters() if "audio" in name}
    adapt(model, ["layers.1.*", "*lm_head.bias"])
    assert trained(model) == {
        *(f"layers.1.{name}" for name, _ in model.layers[1].named_parameters()),
        "audio_lm_head.bias", "text_lm_head.bias",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"named like 'layer\.\*'; the names are like embed_tokens"):
        train_only(model, ["layer.*"])


def test_an_adapter_alone_is_trained_saved_loaded_and_merged(tmp_path: Path) -> None:
    model, fresh = Model(), Model()
    adapted = adapt(model, "adapter", SETTINGS)
    assert all("lora_" in name or "audio_lm_head" in name for name in trained(adapted))
    assert len(trained(adapted)) == 2 * 2 * 2 + 2
    torch.testing.assert_close(adapted(IDS), fresh(IDS))  # an adapter begins as nothing
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.02)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(adapted(IDS), IDS).backward()
        optimizer.step()
    made = adapted(IDS).detach()
    assert (made - fresh(IDS)).abs().max() > 0.01
    save_adapter(adapted, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == 10 and not any("embed" in name or ".mlp.weight" in name for name in saved)
    torch.testing.assert_close(PeftModel.from_pretrained(Model(), str(tmp_path))(IDS), made)
    merged = merge_adapter(adapted)
    torch.testing.assert_close(merged(IDS), made)
    assert merged.state_dict().keys() == fresh.state_dict().keys()


def test_names_of_modules_are_saved_in_a_stable_order(tmp_path: Path) -> None:
    """PEFT wrote them as their set is ordered, by the seed of a process's hashes: a resumed run differed in a byte."""
    names = tuple(name for name, module in Layer().named_children() if isinstance(module, nn.Linear))
    beside = tuple(
        f"layers.{index}.audio_{kind}_layernorm" for index in (1, 0) for kind in ("post_attention", "input")
    )
    adapted = add_lora(
        Model(), LoRASettings(target_modules=(*names, "text_lm_head", "audio_lm_head"), trained_beside=beside)
    )
    save_adapter(adapted, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["audio_lm_head", "audio_mlp", "mlp", "q_proj", "text_lm_head"]
    assert config["modules_to_save"] == list(beside)
    assert PeftModel.from_pretrained(Model(), str(tmp_path))(IDS).shape == (9, 9)


def test_no_layer_of_that_name() -> None:
    with pytest.raises(ValueError, match="w_q"):
        add_lora(Model(), LoRASettings(target_modules=("w_q",)))


def test_activations_are_computed_again_where_that_is_offered() -> None:
    class Offers(nn.Module):
        on = False

        def gradient_checkpointing_enable(self) -> None:
            self.on = True

    inner = Offers()
    checkpoint_activations({"other": nn.Linear(1, 1), "model": nn.Sequential(inner)})
    assert inner.on
    with pytest.raises(ValueError, match="no module of this task offers"):
        checkpoint_activations({"other": nn.Linear(1, 1)})
