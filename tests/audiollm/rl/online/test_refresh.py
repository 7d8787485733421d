"""The reference that follows its policy: mixing, in full and with an adapter, and runs of the stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from audiollm.families.adapters import MergedWeights
from audiollm.files.atomic import read_jsonl
from audiollm.rl.online.weight_copies import ReferenceRefresh
from audiollm.train.loop.checkpoint import open_part
from tests.audiollm.families.dual_ffn.packed_samples import load, save_model
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts
from tests.audiollm.rl.online.stage_runs import error_of, run

KL: dict[str, Any] = {"kl": {"controller": {"name": "fixed", "coefficient": 0.1}}}
REWARDS = {"rewards": {f"{OWN}evenness": 1.0}}
LORA = {"trained": "adapter", "lora": {"rank": 2, "alpha": 4}, "learning_rate": 3e-2}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_model(tmp_path / "llm", "features")
    save_tiny("qwen2_audio", tmp_path / "qwen")
    write_prompts(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_a_refresh_mixes_the_MergedWeights(folder: Path, trained: Any) -> None:
    policy = load(folder / "llm", trained)
    reference = load(folder / "llm").root.model
    with torch.no_grad():
        for number, parameter in enumerate(reference.parameters()):
            parameter.add_(0.1 * number)
    model = policy.root.adapted.get_base_model() if policy.root.adapted else policy.root.model  # type: ignore[operator]
    whole = MergedWeights(policy.root.adapted) if policy.root.adapted else model.state_dict()
    expected = {name: 0.6 * whole[name] + 0.4 * value for name, value in reference.state_dict().items()}
    refresh = ReferenceRefresh(model, reference, 3, 0.6)
    assert [refresh.after(step) for step in range(3)] == [False, False, True]
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12, msg=name)
    saved = dict(refresh.saved.named_buffers())
    assert all(torch.equal(saved[n.replace(".", "/")], v) for n, v in reference.state_dict().items())
    assert not list(refresh.saved.parameters())


def test_tied_weights_are_mixed_once() -> None:
    def tied(value: float) -> nn.Module:
        module = nn.ModuleDict({"embed": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 2, bias=False)})
        module["head"].weight = module["embed"].weight
        nn.init.constant_(module["embed"].weight, value)
        return module

    reference = tied(0.0)
    ReferenceRefresh(tied(1.0), reference, 1, 0.25).after(0)
    assert torch.equal(reference["head"].weight, torch.full((2, 2), 0.25))  # type: ignore[index]


@pytest.mark.parametrize(("model", "settings"), [("llm", {}), ("qwen", LORA)], ids=["all", "adapter"])
def test_the_policy_is_held_to_where_the_refresh_left_it(
    folder: Path, model: str, settings: dict[str, Any]
) -> None:
    out = run(folder, start=model, steps=10, refresh_reference={"every": 3}, **KL, **REWARDS, **settings)
    kl = [row["kl"] for row in read_jsonl(out / "metrics.jsonl") if "kl" in row]
    assert max(kl[3], kl[6], kl[9]) < 1e-5 < 1e-4 < min(kl[5], kl[8]), (
        kl
    )  # steps 3, 6, 9 begin at the reference
    with open_part(out / "checkpoint", "modules") as readers:
        names = [name for name in readers if name.startswith("reference.")]
        moved = [float((readers[name]() - 0).abs().sum()) for name in names]
    assert names and any(moved)


def test_a_refresh_without_a_reference_is_refused(folder: Path) -> None:
    assert "refresh_reference is set, but kl is not" in error_of(folder, refresh_reference={})
    assert "less than or equal to 1" in error_of(folder, refresh_reference={"mix": 2}, **KL)
    run(
        folder, objective="online_dpo", refresh_reference={"every": 4}, steps=10
    )  # its own objective reads one
