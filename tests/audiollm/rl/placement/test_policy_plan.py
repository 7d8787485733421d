"""The plan of `train_policy`: who is where, and memory and time that follow layout and sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from audiollm.commands.cli import build_app
from audiollm.rl.online.planning import (
    CPU,
    GPU,
    OWN_MB,
    PlannedModel,
    PlannedTraining,
    actor_memory_mb,
    described,
    memory_mb,
    plan_policy_training,
    step_seconds,
)
from audiollm.rl.online.settings import PolicyTrainingConfig
from audiollm.rl.placement.settings import PlacementChoice
from audiollm.rl.reward_models.model import RewardModel
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts
from tests.audiollm.rl.online.stage_runs import write_recipe

N = 1_000_000_000
PLAN = PlannedTraining(
    PlannedModel(N), trained_share=1.0, prompts=32, group_size=8, prompt_length=290, answer_length=64, updates=1,
    max_tokens=16_384, shares_prompt=True, slots=256,
)  # fmt: skip
POSITIONS = 32 * 290 + 32 * 8 * 64


def placed(**shares: Any) -> PlacementChoice:
    return PlacementChoice.model_validate(shares)


def test_memory_follows_the_layout() -> None:
    """Float32: weights, gradients and two moments are 16 bytes a parameter; what is frozen, 4."""
    alone = (memory_mb(PLAN, 1) - OWN_MB) * 2**20 / N
    assert alone == pytest.approx(16)
    with_reference = replace(PLAN, reference=N, reads_reference=True)
    assert (memory_mb(with_reference, 1) - OWN_MB) * 2**20 / N == pytest.approx(20)
    there = replace(with_reference, placement=placed(reference={"actors": 1}))
    assert memory_mb(there, 1) == memory_mb(PLAN, 1)
    assert (actor_memory_mb(there, "reference") - OWN_MB) * 2**20 / N == pytest.approx(4)
    sharded = replace(PLAN, strategy="fsdp2")
    # an eighth of 16, a tenth of the weights gathered, and the whole copy that samples
    assert (memory_mb(sharded, 8) - OWN_MB) * 2**20 / N == pytest.approx(2 + 0.4 + 4)
    rollout = replace(sharded, placement=placed(rollout={"actors": 8}))
    assert (memory_mb(rollout, 8) - OWN_MB) * 2**20 / N == pytest.approx(2 + 0.4)
    ahead = replace(PLAN, samples_ahead=True)  # a second process with the weights
    assert (memory_mb(ahead, 1) - 2 * OWN_MB) * 2**20 / N == pytest.approx(20)
    critic = replace(PLAN, critic=N)
    assert (memory_mb(critic, 1) - OWN_MB) * 2**20 / N == pytest.approx(32)
    judged = replace(PLAN, rewards={"reward_model": N, "format": 0}, reward_parameters=N)
    assert (memory_mb(judged, 1) - OWN_MB) * 2**20 / N == pytest.approx(20)
    elsewhere = replace(judged, placement=placed(reward={"actors": 1}))
    assert memory_mb(elsewhere, 1) == memory_mb(PLAN, 1)


def test_a_reward_model_is_in_the_memory_of_the_device_that_it_is_on(tmp_path: Path) -> None:
    RewardModel.begin(save_model(tmp_path / "llm", "features")).save(tmp_path / "judge")
    write_prompts(tmp_path)
    told = {}
    for device, size in [(d, s) for d in ("auto", "cpu") for s in ("small", "tiny")]:
        reward = {"reward_model": {"folder": str(tmp_path / "judge"), "device": device}}
        config = PolicyTrainingConfig(
            samples=str(tmp_path / "prompts.jsonl"),
            start=tmp_path / "llm",
            rewards=reward,
            size=size,
            steps=10,
        )
        told[device, size] = plan_policy_training(config, {})
    without = PolicyTrainingConfig(
        samples=str(tmp_path / "prompts.jsonl"),
        start=tmp_path / "llm",
        rewards={"format": 1.0},
        size="small",
        steps=10,
    )
    assert told["cpu", "small"].memory_mb == plan_policy_training(without, {}).memory_mb
    assert told["auto", "small"].memory_mb > told["cpu", "small"].memory_mb
    assert told["auto", "tiny"].memory_mb == told["cpu", "tiny"].memory_mb  # trained on the CPU, too


def test_a_small_recipe_is_timed_for_the_machine_in_front_of_the_user(tmp_path: Path) -> None:
    """The plan of a small recipe measures this machine, so it names no rate of a GPU."""
    write_prompts(tmp_path)
    start = save_model(tmp_path / "llm", "features")
    bases, seconds = {}, {}
    for size in ("tiny", "small", "1b"):
        config = PolicyTrainingConfig(
            samples=str(tmp_path / "prompts.jsonl"), start=start, rewards={"format": 1.0}, size=size, steps=10,
            batch_size=8, max_tokens=4096,
        )  # fmt: skip
        plan = plan_policy_training(config, {})
        assert plan.details is not None and plan.seconds_on is not None
        bases[size], seconds[size] = "\n".join(plan.details(1, 0.05)), plan.seconds_on(1, 0.05)
    assert {size: "H100" in basis for size, basis in bases.items()} == {
        "tiny": False,
        "small": False,
        "1b": True,
    }
    assert seconds["small"] == seconds["tiny"]


def test_time_follows_the_work() -> None:
    seconds = step_seconds(PLAN, 1, 400, GPU)
    assert list(seconds) == ["rollout", "score", "update"]
    assert seconds["score"] == pytest.approx(2 * N * POSITIONS / 400e12)
    assert seconds["update"] == pytest.approx(3 * seconds["score"])
    assert seconds["rollout"] == pytest.approx(
        2 * N * 32 * 290 / 400e12 + 64 * (4 * N / GPU.read_bytes + GPU.step_s)
    )
    assert step_seconds(PLAN, 8, 400, GPU)["update"] == pytest.approx(seconds["update"] / 8)
    waited = step_seconds(replace(PLAN, samples_ahead=True), 1, 400, GPU)
    assert waited["rollout"] == pytest.approx(seconds["rollout"] - seconds["score"] - seconds["update"])
    actors = replace(PLAN, placement=placed(rollout={"actors": 4, "gpus": 1}))
    assert step_seconds(actors, 2, 400, GPU)["weights"] == pytest.approx(4 * N * 2 / GPU.sent_bytes)
    read = replace(PLAN, reads_reference=True, reference=N)
    assert step_seconds(read, 1, 400, GPU)["score"] == pytest.approx(2 * seconds["score"])
    beside = replace(read, placement=placed(reference={"actors": 1, "gpus": 0.5}))
    assert step_seconds(beside, 1, 400, GPU)["score"] == pytest.approx(2 * seconds["score"])  # half a GPU
    judged = replace(PLAN, rewards={"reward_model": N, "format": 0})
    assert step_seconds(judged, 1, 400, GPU)["reward"] == pytest.approx(2 * N * 256 * 354 / 400e12)
    assert step_seconds(replace(PLAN, shares_prompt=False), 1, 400, GPU)["score"] == pytest.approx(
        2 * N * 256 * 354 / 400e12
    )


def test_the_layout_is_told() -> None:
    choice = placed(rollout={"actors": 3, "gpus": 0.5}, reward={"actors": 2})
    plan = replace(PLAN, placement=choice, reads_reference=True, unknown_rewards=("judge",))
    lines = described(plan, 2, 400, CPU)
    assert lines[0].startswith("2 training ranks: policy, reference (the policy with its adapter off);")
    assert lines[1].startswith("3 rollout actors, each 1 CPU and 0.5 GPU:") and "up to 2 on a GPU" in lines[1]
    assert "REFUSED: not a multiple of 2 ranks" in lines[1]
    assert lines[2].startswith("2 reward actors, each 1 CPU: 0.7 GB each")
    assert "not in it: the time of judge" in lines[4] and "assumed" in lines[5]


def test_plan_reads_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "llm", "features")
    write_prompts(tmp_path)
    monkeypatch.chdir(tmp_path)
    placement = {"rollout": {"actors": 2}, "reward": {"actors": 1}}
    path = write_recipe(tmp_path, placement=placement, kl={"estimator": "k3"}, advantage="gae", critic={})
    result = CliRunner().invoke(build_app(), ["plan", str(path), "--launch", "2"])
    assert result.exit_code == 0, result.output
    assert "train_policy: 2 training ranks: policy, critic, reference;" in result.output
    assert "train_policy: 2 rollout actors, each 1 CPU" in result.output
    assert f"not in it: the time of {OWN}brevity" in result.output
    assert "3 prompts of 290 positions (assumed), 4 answers to each of 5 tokens (assumed)" in result.output


def test_an_adapter_whose_reference_is_refreshed_has_a_second_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "llm", "features")
    write_prompts(tmp_path)
    monkeypatch.chdir(tmp_path)
    settings = {"trained": "adapter", "lora": {"rank": 4}, "kl": {}}
    told = []
    for more in ({}, {"refresh_reference": {"every": 4}}):
        path = write_recipe(tmp_path, **settings, **more)
        told.append(CliRunner().invoke(build_app(), ["plan", str(path)]).output)
    assert "the policy with its adapter off" in told[0]
    assert "policy, rollouts, reference, rewards" in told[1]
