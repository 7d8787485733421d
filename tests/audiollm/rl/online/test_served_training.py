"""`train_policy` with `rollouts: vllm` and `sglang`, by stand-ins: it learns, goes on after they died, and refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from audiollm.errors import ConfigError, StageError
from audiollm.files.atomic import read_jsonl
from audiollm.files.tensors import load_tensors
from audiollm.models.pretrained import StoredWeights
from audiollm.recipe.stages import load_recipe
from audiollm.rl.online.planning import plan_policy_training
from audiollm.rl.online.settings import PolicyTrainingConfig
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts
from tests.audiollm.rl.online.stage_runs import error_of, run, write_recipe
from tests.audiollm.rl.rollouts.server_stand_ins import use_stand_in

VLLM = {"name": "vllm", "dtype": "float32", "bucket_mb": 0.02}
SETTINGS: dict[str, Any] = {
    "rollouts": VLLM, "steps": 10, "evaluations": 1, "batch_size": 2, "group_size": 3, "max_answer_tokens": 5,
    "correction": {"level": "token", "mode": "truncate"}, "checkpoint_seconds": 0,
    "rewards": {f"{OWN}evenness": 1.0}, "learning_rate": 1e-2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_tiny("qwen2_audio", tmp_path / "llm")
    write_prompts(tmp_path)
    monkeypatch.chdir(tmp_path)
    use_stand_in(monkeypatch)
    return tmp_path


def children() -> set[str]:
    """Command lines of the processes of this one that run a server's side."""
    lines = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            status, line = (path / "status").read_text(), (path / "cmdline").read_text()
        except OSError:
            continue
        if f"PPid:\t{os.getpid()}\n" in status and "_server.py" in line:
            lines.add(line)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_a_run_goes_on_after_its_server_died(
    server: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SETTINGS, "rollouts": {**VLLM, "name": server}}
    whole = run(folder, "whole", **settings)
    rows = [row for row in read_jsonl(whole / "metrics.jsonl") if "mismatch_kl" in row]
    assert len(rows) == 10 and all(
        row["mismatch_largest"] < 1.001 for row in rows
    )  # sampled from the weights of now
    start = StoredWeights(folder / "llm")
    moved = load_tensors(whole / "model" / "model.safetensors")
    assert max(float((moved[name] - start.read(name)).abs().max()) for name in start.names) > 0.02
    assert not children()
    rollouts = folder / "killed" / "train_policy" / "rollouts"
    monkeypatch.setenv("STAND_IN_DIES_BESIDE", str(rollouts))
    with pytest.raises(StageError) as died:
        run(folder, "killed", **settings)
    assert "its process ended (exit code 9) in the call sample" in str(died.value)
    assert "| out of memory, says the stand-in" in str(died.value) and "goes on" in str(died.value)
    assert not children()
    killed = run(folder, "killed", **settings)
    for name in ("model/model.safetensors", "rollouts/000009.jsonl", "answers.jsonl"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.fixture
def fork_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server of this test's own: that of an earlier test has its environment, in which there is no stand-in."""
    server = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
    yield
    server._stop()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_it_samples_a_step_ahead_with_a_merged_adapter(folder: Path, fork_server: None) -> None:
    out = run(folder, "ahead", **SETTINGS, ahead=1, trained="adapter", lora={"rank": 2, "alpha": 4})
    rows = [row for row in read_jsonl(out / "metrics.jsonl") if "mismatch_largest" in row]
    assert rows[0]["mismatch_largest"] < 1.001 < rows[-1]["mismatch_largest"]  # behind by a step
    assert (out / "adapter" / "adapter_model.safetensors").exists()


def test_the_plan_says_what_it_does_not_estimate(folder: Path) -> None:
    (stage,) = load_recipe(write_recipe(folder, **SETTINGS), runs=folder).stages
    assert isinstance(stage.config, PolicyTrainingConfig)
    assert "vllm's are not known" in plan_policy_training(stage.config, {}).note


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"rollouts": {"name": "my:Engine", "gpus": 1}},
            "gpus is a setting of vllm and sglang, and name is my:Engine",
        ),
        ({"rollouts": "vlm"}, "'vlm' is no import path: give vllm, sglang, or package.module:Engine"),
        ({"rollouts": {**VLLM, "options": {"dtype": "half"}}}, "options.dtype is set by the training"),
        (
            {"rollouts": {"name": "sglang", "options": {"tp_size": 2}}},
            "options.tp_size is set by the training",
        ),
        ({"rollouts": {**VLLM, "buckets": 3}}, "buckets"),
        ({"answer": "any"}, "vllm samples words alone"),
        ({"placement": {"rollout": {"actors": 1}}}, "vllm samples in a process of its own"),
    ],
)
def test_settings_that_cannot_work(folder: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_recipe(write_recipe(folder, **{**SETTINGS, **settings}), runs=folder)
    assert reason in str(refused.value)


def test_models_that_vllm_cannot_sample_are_refused_before_any_work(folder: Path) -> None:
    save_model(folder / "speaks", "features")
    assert "this model writes codes of speech" in error_of(folder, **{**SETTINGS, "start": "speaks"})
    save_tiny("qwen2_5_omni_thinker", folder / "thinker")
    assert "the thinker of a Qwen-Omni alone" in error_of(folder, **{**SETTINGS, "start": "thinker"})
    assert not (folder / "bad" / "train_policy" / "rollouts").exists()


def test_an_environment_without_vllm_ends_a_run_before_its_first_stage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    assert "vllm is not installed in this environment" in error_of(
        folder, **{**SETTINGS, "rollouts": {**VLLM, "python": "/usr/bin/env"}}
    )
