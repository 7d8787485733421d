"""Adapters and modules trained beside them on `DualFFN` itself: trained, saved, merged, reloaded, the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from audiollm.data.hearing.features import PackedFeatures, mel_features
from audiollm.errors import StageError
from audiollm.families.dual_ffn import training
from audiollm.families.dual_ffn.adapting import adapt, add_lora, merge_adapter
from audiollm.families.dual_ffn.losses import linear_cross_entropy
from audiollm.models.dual_ffn import DualFFN, through_head
from audiollm.train.loop import loop
from audiollm.train.settings import LoRASettings
from tests.audiollm.supervised.heard_samples import (
    small_model,
    small_template,
    sound,
    understanding,
    write_manifest,
)
from tests.audiollm.supervised.train_samples import SMALL, run_stage, write_shards

PARTS: dict[str, dict[str, Any]] = {
    "embed_tokens": {"trained_beside": ["embed_tokens"]},
    "embed_audio_tokens": {"trained_beside": ["embed_audio_tokens"]},
    "text_lm_head": {"trained_beside": ["text_lm_head"]},
    "audio_lm_head": {"trained_beside": ["audio_lm_head"]},
    "LoRA on audio_lm_head": {"target_modules": ["q_proj", "audio_lm_head"], "dropout": 0.1},
    "LoRA on text_lm_head": {"target_modules": ["q_proj", "text_lm_head"]},
    "audio_tower": {"trained_beside": ["audio_tower"]},
    "audio_encoder_proj": {"trained_beside": ["audio_encoder_proj"]},
}
HEARD = ("audio_tower", "audio_encoder_proj")


def outputs_of(model: Any) -> list[Tensor]:
    """Logits of text and audio rows, and what is heard where the model hears."""
    config = model.eval().config
    codes_YK = torch.arange(5 * config.num_codebooks).view(5, -1) % config.codebook_size
    with torch.no_grad():
        hidden_SC = model.model.norm(model.embed(torch.arange(20), codes_YK))
        outputs = [model.text_logits(hidden_SC), model.audio_logits(hidden_SC)]
        if config.audio_encoder is not None:
            clip = mel_features(sound(0.4), config.audio_encoder.features)
            outputs.append(model.audio_encoder_proj(model.audio_tower(PackedFeatures.of(clip.windows))))
    return outputs


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_trained_saved_merged_and_reloaded(part: str, tmp_path: Path) -> None:
    lora = {"rank": 2, "alpha": 4, **PARTS[part]}
    if part in HEARD:
        shards = str(write_manifest(tmp_path, 8))
        common = understanding(steps=10, batch_size=4)
        run_stage(tmp_path / "base", shards, **common)
        common = {**common, "shape": {}}
    else:
        shards = str(write_shards(tmp_path / "shards", 7))
        common = {"ema_decay": 0, "steps": 10}
        run_stage(tmp_path / "base", shards, **common, shape=SMALL)
    start = str(tmp_path / "base")
    settings = {**common, "start": start, "trained": "adapter", "lora": lora, "learning_rate": 0.05}
    run_stage(tmp_path / "tuned", shards, **settings)
    base, merged = DualFFN.from_pretrained(start), DualFFN.from_pretrained(tmp_path / "tuned")
    name = part.removeprefix("LoRA on ")
    before, after = base.state_dict(), merged.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert any(f"{name}." in key for key in changed), (
        f"{part} is as before; changed are {sorted(changed)[:5]}"
    )
    assert before.keys() == after.keys()
    adapted = PeftModel.from_pretrained(DualFFN.from_pretrained(start), str(tmp_path / "tuned" / "adapter"))
    inner = adapted.base_model.model
    for found, loaded in zip(outputs_of(inner), outputs_of(merged), strict=True):
        torch.testing.assert_close(found, loaded, atol=1e-5, rtol=1e-4)
    for found, loaded in zip(outputs_of(merge_adapter(adapted)), outputs_of(merged), strict=True):
        torch.testing.assert_close(found, loaded, atol=1e-5, rtol=1e-4)


def test_a_killed_adapter_training_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = str(write_shards(tmp_path / "shards", 7))
    run_stage(tmp_path / "base", shards, shape=SMALL)
    lora = {
        "rank": 2,
        "target_modules": ["q_proj", "audio_lm_head"],
        "trained_beside": ["embed_audio_tokens"],
    }
    settings = {"start": str(tmp_path / "base"), "trained": "adapter", "lora": lora, "steps": 10}
    run_stage(tmp_path / "whole", shards, **settings, checkpoint_seconds=0)
    step = loop._Run._train_step

    def killed_at_five(run: Any) -> Any:
        if run.step == 5:
            raise KeyboardInterrupt
        return step(run)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop._Run, "_train_step", killed_at_five)
        run_stage(tmp_path / "parts", shards, **settings, checkpoint_seconds=0)
    run_stage(tmp_path / "parts", shards, **settings, checkpoint_seconds=0)
    whole, parts = (DualFFN.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(value, parts[key]) for key, value in whole.items())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_loss_through_an_adapted_head_is_that_of_its_logits(dropout: float) -> None:
    model = small_model(small_template())
    add_lora(model, LoRASettings(rank=3, dropout=dropout, target_modules=("text_lm_head",)))
    head = model.text_lm_head
    nn.init.normal_(head.lora_B["default"].weight)
    hidden = torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    targets, weights = torch.arange(9)[:, None], torch.rand(9, 1, dtype=torch.float64)
    parameters = [head.lora_A["default"].weight, head.lora_B["default"].weight, hidden]

    def loss_by_chunks() -> Tensor:
        return through_head(head, hidden, lambda h, w: linear_cross_entropy(h, w, targets, weights)).total

    def loss_by_logits() -> Tensor:
        each = nn.functional.cross_entropy(head(hidden), targets[:, 0], reduction="none")
        return (each * weights[:, 0]).sum()

    made = []
    for loss in (loss_by_chunks, loss_by_logits):
        torch.manual_seed(1)  # the same dropout
        value = loss()
        made.append((value, *torch.autograd.grad(value, parameters)))
    for ours, plain in zip(*made, strict=True):
        torch.testing.assert_close(ours, plain)


def test_a_module_beside_the_adapter_that_is_not_there_is_named() -> None:
    with pytest.raises(
        ValueError, match="no module is named 'audio_head'; the outer ones are model, text_lm_head"
    ):
        add_lora(small_model(small_template()), LoRASettings(trained_beside=("audio_head",)))


def test_a_trained_parameter_without_a_gradient_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a module is called past the wrapper that holds its trained copy."""
    shards = str(write_shards(tmp_path / "shards", 7))
    made = adapt

    def adapt_and_leave_out(model: nn.Module, *others: Any) -> nn.Module:
        adapted = made(model, *others)
        model.model.unused = nn.Parameter(torch.zeros(3))  # type: ignore[union-attr]
        return adapted

    monkeypatch.setattr(training, "adapt", adapt_and_leave_out)
    with pytest.raises(
        StageError, match=r"no gradient reaches model\.model\.model\.unused: set to be trained"
    ):
        run_stage(tmp_path / "run", shards, shape=SMALL)
    assert not (tmp_path / "run" / "model").exists()
