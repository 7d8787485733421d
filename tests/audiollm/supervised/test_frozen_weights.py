"""`frozen_weights` of the training stages: what is saved, exact resume, merged adapters, measured errors, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import yaml
from peft import PeftModel
from torch import Tensor

from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.errors import StageError
from audiollm.families.dual_ffn.adapting import merge_adapter
from audiollm.families.dual_ffn.planning import Counts, count_parameters, plan_training
from audiollm.families.dual_ffn.shape import planned_shape
from audiollm.families.frozen_weights import RECORD, FrozenWeights
from audiollm.families.target_logits import LogitDifference
from audiollm.files.tensors import load_tensors
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.frozen.layers import FrozenLinear
from audiollm.recipe.stages import StagePlan
from audiollm.supervised.sft import SFTTask
from tests.audiollm.supervised.heard_samples import write_manifest
from tests.audiollm.supervised.train_samples import run_stage, settings_of

FORMATS = ("bf16", "int8", "nf4")
LARGEST_ERROR = {"bf16": 0.03, "int8": 0.1, "nf4": 0.6}
"""Of the logits of two layers of random weights."""
PROJECTOR = {"trained": ["audio_encoder_proj.*"]}
ADAPTER = {
    "trained": "adapter",
    "lora": {"rank": 2, "alpha": 4, "trained_beside": ["audio_encoder_proj"]},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with its vocabulary, a Whisper, and recordings."""
    folder = tmp_path_factory.mktemp("published")
    tokenizer = train_text_tokenizer(["system user assistant which tone? high low"] * 3, 300)
    words = tokenizer.get_vocab_size()
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=words, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, tie_word_embeddings=True, initializer_range=0.1,
        )
    )  # fmt: skip
    llama.save_pretrained(folder / "llama")
    tokenizer.save(str(folder / "llama" / "tokenizer.json"))
    whisper = transformers.WhisperModel(
        transformers.WhisperConfig(
            d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=24, num_mel_bins=20,
            max_source_positions=60, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=24, vocab_size=60,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )
    )  # fmt: skip
    whisper.save_pretrained(folder / "whisper")
    (folder / "data").mkdir()
    write_manifest(folder / "data", 9)
    return folder


def settings(place: Path, **values: Any) -> dict[str, Any]:
    encoder = {"path": str(place / "whisper"), "trained": False, "padded": False, "stride": 4}
    return {
        "start": str(place / "llama"),
        "audio_in": "features",
        "shape": {"audio_ffn_layers": [], "audio_encoder": {**encoder, "projector_size": 24}},
        "audio_weight": 0.0,
        "text_weight": 1.0,
        "learning_rate": 1e-2,
        "report_to": [],
        "evaluations": 2,
        "ema_decay": 0.5,
        **values,
    }


def train(place: Path, folder: Path, **values: Any) -> dict[str, Any]:
    return run_stage(folder, str(place / "data" / "samples.jsonl"), **settings(place, **values))


def saved(folder: Path) -> dict[str, Tensor]:
    return load_tensors(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[str, Tensor]:
    """The model that a projector was trained in, with frozen weights in float32."""
    train(place, place / "whole", **PROJECTOR)
    return saved(place / "whole")


@pytest.mark.parametrize("format", FORMATS)
def test_frozen_weights_are_saved_as_they_were(place: Path, whole: dict[str, Tensor], format: str) -> None:
    folder = place / format
    figures = train(place, folder, **PROJECTOR, frozen_weights=format)
    model = saved(folder)
    assert model.keys() == whole.keys()
    changed = {name for name in whole if not torch.equal(whole[name], model[name])}
    assert changed and all(name.startswith("audio_encoder_proj.") for name in changed)
    record = json.loads((folder / RECORD).read_text())
    assert 0 < record["start"]["error"] < LARGEST_ERROR[format]
    assert 0 < record["saved"]["error"] < LARGEST_ERROR[format]
    assert record["weights_mb"] < record["weights_mb_in_fp32"]
    assert figures["logit_error_start"] == pytest.approx(record["start"]["error"], abs=1e-5)
    assert 0 < figures["same_tokens_saved"] <= 1
    checkpoint = load_tensors(folder / "checkpoint" / "modules.safetensors")
    assert not any(name.endswith("_proj.weight") or "embed_tokens" in name for name in checkpoint)
    assert all(value.dtype in (torch.float32, torch.int64) for value in checkpoint.values())
    DualFFN.from_pretrained(folder)


def test_with_fp32_nothing_is_measured_or_left_out(place: Path, whole: dict[str, Tensor]) -> None:
    assert not (place / "whole" / RECORD).exists()
    checkpoint = load_tensors(place / "whole" / "checkpoint" / "modules.safetensors")
    assert len(checkpoint) == len(whole)


@pytest.mark.parametrize(("values", "format"), [(PROJECTOR, "int8"), (ADAPTER, "bf16"), (ADAPTER, "nf4")])
def test_a_run_that_was_cut_short_ends_as_one_that_was_not(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], format: str
) -> None:
    values = {**values, "frozen_weights": format, "checkpoint_seconds": 0}
    unbroken = train(place, tmp_path / "unbroken", **values)
    batch = SFTTask.batch

    def cut(task: SFTTask, step: int, *inputs: Any) -> Any:
        if step == 7:
            raise KeyboardInterrupt
        return batch(task, step, *inputs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SFTTask, "batch", cut)
        train(place, tmp_path / "cut", **values)
    resumed = train(place, tmp_path / "cut", **values)
    for name in (
        "model/model.safetensors",
        "checkpoint/modules.safetensors",
        "checkpoint/optimizers.safetensors",
    ):
        first, second = (load_tensors(tmp_path / run / name) for run in ("unbroken", "cut"))
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    assert {k: v for k, v in unbroken.items() if k != "cpu_seconds"} == {
        k: v for k, v in resumed.items() if k != "cpu_seconds"
    }


def test_an_adapter_is_merged_into_the_weights_of_the_start(place: Path, whole: dict[str, Tensor]) -> None:
    figures = train(place, place / "merged", **ADAPTER, frozen_weights="nf4")
    base = DualFFN.from_pretrained(place / "whole")
    adapted = PeftModel.from_pretrained(base, str(place / "merged" / "adapter"))
    expected, merged = merge_adapter(adapted).state_dict(), saved(place / "merged")
    for name, value in merged.items():
        torch.testing.assert_close(value, expected[name], msg=name)
    changed = {name for name in whole if not torch.equal(whole[name], merged[name])}
    assert any("self_attn.q_proj" in name for name in changed)
    assert all("self_attn" in name or "audio_encoder_proj" in name for name in changed)
    assert 0 < figures["logit_error_saved"] < LARGEST_ERROR["nf4"]


def test_products_of_trained_layers_stay_in_float32(place: Path, tmp_path: Path) -> None:
    """With `precision: fp32`, whatever the type of the products with frozen weights."""
    seen: set[torch.dtype] = set()

    def look(layer: Any, _inputs: Any, output: Tensor) -> None:
        if type(layer) is FrozenLinear or type(layer).__name__ == "Projector":
            seen.add(output.dtype)

    with torch.nn.modules.module.register_module_forward_hook(look):
        train(place, tmp_path / "run", **PROJECTOR, frozen_weights="bf16")
    assert seen == {torch.float32}


# Refusals and the plan


def test_a_training_of_all_weights_is_refused(place: Path) -> None:
    values = settings(place, samples="x.jsonl", frozen_weights="int8", trained="all")
    settings_of({**values, "samples": [str(place / "data" / "samples.jsonl")]})  # its encoder is frozen
    values["shape"] = {"audio_ffn_layers": []}
    with pytest.raises(ValueError, match="frozen_weights is int8, and trained is `all`"):
        settings_of({**values, "samples": [str(place / "data" / "samples.jsonl")]})


@pytest.mark.parametrize("format", FORMATS)
def test_the_plan_counts_the_bytes_that_are_stored(
    place: Path, whole: dict[str, Tensor], format: Any
) -> None:
    """To the byte, beside the figures that the training tells."""
    samples = [str(place / "data" / "samples.jsonl")]

    def planned(**values: Any) -> tuple[Counts, StagePlan]:
        config = settings_of(settings(place, samples=samples, **PROJECTOR, **values))
        shape = planned_shape(config, {})
        assert shape is not None
        return count_parameters(config, shape), plan_training(config, {})

    counts, plan = planned(frozen_weights=format)
    whole_counts, whole_plan = planned()
    assert (counts.total, counts.trained, whole_counts.small) == (whole_counts.total, whole_counts.trained, 0)
    train(place, place / f"planned-{format}", **PROJECTOR, frozen_weights=format, steps=10)
    record = json.loads((place / f"planned-{format}" / RECORD).read_text())
    saved_mb = (4 * counts.small - counts.small_bytes) / 2**20
    assert record["weights_mb_in_fp32"] - record["weights_mb"] == pytest.approx(saved_mb, abs=0.11)
    assert plan.disk_mb < whole_plan.disk_mb and plan.memory_mb <= whole_plan.memory_mb
    assert f"M in {format}" in plan.note


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
def test_strategies_that_shard_weights_are_refused(place: Path, tmp_path: Path, strategy: str) -> None:
    samples = [str(place / "data" / "samples.jsonl")]
    values = settings(
        place, samples=samples, frozen_weights="int8", strategy=strategy, ema_decay=0.0, **PROJECTOR
    )
    context: Any = SimpleNamespace(folder=tmp_path, ranks=SimpleNamespace(world=2))
    with pytest.raises(StageError, match=f"strategy {strategy} shards"):
        FrozenWeights(settings_of(values), context)


def test_differences_of_logits() -> None:
    logits_TV = torch.tensor([[1.0, -1.0, 0.0], [0.0, 2.0, -2.0]])
    same = LogitDifference.between([logits_TV], [logits_TV])
    assert same is not None and (same.error, same.same_tokens, same.targets) == (0.0, 1.0, 2)
    other = LogitDifference.between([logits_TV], [torch.stack([logits_TV[0], -logits_TV[1]])])
    assert other is not None and other.same_tokens == 0.5
    assert other.error == pytest.approx((32 / 10) ** 0.5)
    assert LogitDifference.between([], []) is None


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_two_ranks_train_as_one(place: Path, tmp_path: Path, format: str) -> None:
    """By DDP: what is stored in fewer bytes is the same on both."""
    values = settings(
        place, samples=str(place / "data" / "samples.jsonl"), steps=10, batch_size=4, max_tokens=128,
        precision="fp32", frozen_weights=format, **PROJECTOR,
    )  # fmt: skip
    for name, ranks in (("one", []), ("two", ["--launch", "2"])):
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump({"name": name, "stages": [{"train": values}]}))
        command = [sys.executable, "-m", "audiollm.commands.cli", "run", str(recipe), "--runs", str(tmp_path)]
        subprocess.run([*command, *ranks], check=True, timeout=240)
    one, two = (saved(tmp_path / name / "train") for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=5e-3, rtol=0, msg=name)
