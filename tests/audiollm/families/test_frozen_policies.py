"""`frozen_weights` of the trainings of policies, reward models and answers, in both families."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from audiollm.data.records.manifest import ManifestSource
from audiollm.families.frozen_weights import RECORD, FrozenWeights
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policies import load_policy
from audiollm.models.frozen.shrink import shrink_frozen, small_weights
from audiollm.models.frozen.stored import StoredWeight
from audiollm.recipe.ranks import ALONE
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.train.loop.whole import unmerged_tensors, whole_tensors
from audiollm.train.settings import LoRASettings
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts
from tests.audiollm.rl.preference.records import write_records

ADAPTER: dict[str, Any] = {"trained": "adapter", "lora": {"rank": 2, "alpha": 4}}
STAGES: dict[str, dict[str, Any]] = {
    "train": {"samples": "prompts.jsonl", **ADAPTER},
    "train_preference": {"samples": "records.jsonl", "objective": "dpo", "eval_answers": 2, **ADAPTER},
    "train_reward": {"samples": "records.jsonl", **ADAPTER},
    "train_policy": {
        "samples": "prompts.jsonl", "rewards": {f"{OWN}brevity": 1.0}, "group_size": 2, "max_answer_tokens": 6,
        **ADAPTER,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    write_records(folder, 12)
    write_prompts(folder)
    save_tiny("qwen2_audio", folder / "listener")
    save_model(folder / "dual_ffn", hears="features")
    return folder


def run(place: Path, name: str, kind: str, **values: Any) -> tuple[dict[str, Any], Path]:
    stage = {
        "steps": 10, "batch_size": 2, "evaluations": 1, "ema_decay": 0.0, "learning_rate": 1e-2, "report_to": [],
        **values, "samples": str(place / values["samples"]),
    }  # fmt: skip
    recipe = place / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump({"name": name, "seed": 1, "stages": [{kind: stage}]}))
    loaded = load_recipe(recipe, runs=place / "runs")
    run_recipe(loaded, Console(quiet=True))
    return json.loads((loaded.folder / kind / "stage.json").read_text())["figures"], loaded.folder / kind


def weights(folder: Path) -> dict[str, Tensor]:
    return {
        name: value
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


@pytest.mark.parametrize("kind", STAGES)
def test_the_saved_model_has_the_weights_of_the_start(place: Path, kind: str) -> None:
    """But those that the adapter changes; the step that samples, too, reads what is stored in fewer bytes."""
    start = place / "listener"
    figures, folder = run(place, kind, kind, **STAGES[kind], start=str(start), frozen_weights="int8")
    before, after = weights(start), weights(folder / "model")
    after.pop("bias", None)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(".self_attn." in name for name in changed)
    record = json.loads((folder / RECORD).read_text())
    assert 0 < record["start"]["error"] < 0.1 and 0 < record["saved"]["error"] < 0.1
    assert figures["frozen_weights_mb"] == record["weights_mb"]
    names = weights(folder / "checkpoint")
    assert not any(name.endswith("base_layer.weight") or "embed_tokens" in name for name in names)
    load_policy(folder)


@pytest.mark.parametrize("objective", ["dpo", "dro"])
def test_a_reference_and_a_critic_beside_patterns(place: Path, objective: str) -> None:
    start, values = place / "dual_ffn", {"samples": "records.jsonl", "eval_answers": 0}
    figures, folder = run(
        place, objective, "train_preference", **values, objective=objective, trained=["*mlp*"],
        start=str(start), frozen_weights="int8",
    )  # fmt: skip
    before, after = weights(start / "model"), weights(folder / "model")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("mlp" in name for name in changed)
    assert figures["logit_error_saved"] > 0


@pytest.mark.parametrize("family", ["listener", "dual_ffn"])
def test_a_reference_gives_what_the_policy_gives_at_the_start(place: Path, family: str) -> None:
    """It has the same frozen weights, in the same memory."""
    policy: Any = load_policy(
        place / family, ["*.mlp.down_proj.*", "*.fc2.*"][family == "listener" :][:1], needs_reference=True
    )
    source = ManifestSource(place / "records.jsonl")
    config: Any = SimpleNamespace(frozen_weights="nf4", seed=0, strategy="auto")
    context: Any = SimpleNamespace(folder=place / family, ranks=ALONE, say=lambda text: None)
    FrozenWeights(config, context).shrink_policy(policy, [source[0]])
    batch = policy.batch(policy.encode(policy.take(source[0], [0, 1])))
    answers = policy.answer_logprobs(policy.root, batch, TokenRequest())
    torch.testing.assert_close(answers.policy_T, answers.reference_T, rtol=0, atol=0)
    stored = [
        {id(m) for m in model.modules() if isinstance(m, StoredWeight)}
        for model in (policy.root, policy.frozen["reference"])
    ]
    assert stored[0] == stored[1]


@pytest.mark.parametrize("family", ["listener", "dual_ffn"])
@pytest.mark.parametrize("format", ["bf16", "int8", "nf4"])
def test_engines_are_given_the_weights_that_are_trained(place: Path, family: str, format: Any) -> None:
    """By the names of a model without adapters, in float32."""
    policy = load_policy(place / family, "adapter", LoRASettings(rank=2, alpha=4))
    model: Any = policy.root.model
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = set(unmerged_tensors(model))
    shrink_frozen(policy.root, format)
    tensors = dict(whole_tensors(model))
    assert tensors.keys() == names
    assert all(not value.is_floating_point() or value.dtype == torch.float32 for value in tensors.values())
    stored = {name.replace(".base_layer.", "."): value for name, value in small_weights(model)}
    assert stored and all(
        torch.equal(tensors[name], value) for name, value in stored.items()
    )  # B of LoRA is 0
    with pytest.raises(ValueError, match="made anew"):
        policy.save(place / "unsaved")
