"""The critic of `train_policy`: PPO's step against sums in plain Python, saving, refusing, and runs that are killed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.data.records.manifest import ManifestSource
from audiollm.data.records.mixture import Mixture
from audiollm.data.records.sample import RatedAnswer
from audiollm.data.records.source import LoadedSample
from audiollm.errors import ConfigError
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policies import load_policy
from audiollm.files.atomic import read_json, read_jsonl, write_json
from audiollm.recipe.ranks import ALONE
from audiollm.recipe.stages import load_recipe
from audiollm.rl.critic.model import CriticModel
from audiollm.rl.online.settings import PolicyTrainingConfig
from audiollm.rl.reward_models.model import RewardModel
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.online.fresh_tasks import gradient_of_step, make_task
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts
from tests.audiollm.rl.online.stage_runs import check_killed_run, error_of, run

DEEPSPEED_CHAT: dict[str, Any] = {
    "objective": "clip", "advantage": {"name": "gae", "gamma": 1.0, "lam": 0.95, "score_clip": 5, "whiten": False},
    "critic": {"clip": 0.2},
    "kl": {"controller": {"name": "fixed", "coefficient": 0.1}, "place": "reward", "estimator": "k1"},
}  # fmt: skip
"""The settings of DeepSpeed-Chat: -0.1 k1 at every token, the score cut to +-5 on the last, both clips 0.2."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_model(tmp_path / "llm", "features")
    write_prompts(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("model", ["dual", "qwen"])
def test_a_step_of_ppo_is_that_of_the_equations(folder: Path, model: str) -> None:
    save_tiny("qwen2_audio", folder / "qwen")
    save_model(folder / "dual", "features")
    task, _ = make_task(folder, model, {"rewards": {f"{OWN}brevity": 1.0}, **DEEPSPEED_CHAT})
    loss, _, update = gradient_of_step(task, ALONE)
    rows = read_jsonl(folder / "rollouts" / "000001.jsonl")
    errors, advantages = [], []
    for row in rows:
        assert row["rewards"][f"{OWN}brevity"] == -row["tokens"]
        rewards = [-0.1 * (old - ref) for old, ref in zip(row["old"], row["reference"], strict=True)]
        rewards[-1] += max(-5.0, row["reward"])
        running, following = 0.0, 0.0
        for place in reversed(range(row["tokens"])):
            value = row["values"][place]
            running = rewards[place] + following - value + 0.95 * running
            following = value
            assert row["advantages"][place] == pytest.approx(running, abs=2e-3)
            assert row["returns"][place] == pytest.approx(running + value, abs=2e-3)
            errors.append(-running)
            advantages.append(running)
    assert any(row["reward"] < -5 for row in rows) and len({*rows[0]["values"]}) > 1
    mean = math.fsum(errors) / len(errors)
    squares = math.fsum(error**2 for error in errors) / len(errors)
    assert loss == pytest.approx(squares / 2 - math.fsum(advantages) / len(advantages), abs=5e-3)
    assert float(update.figures["value_error"]) == pytest.approx(squares, abs=1e-2)
    assert float(update.figures["ratio"]) == 1.0 and float(update.figures["value_clipped"]) == 0.0
    critic: Any = task.modules()["policy"].critic
    assert float(critic.score.bias.grad) == pytest.approx(mean, abs=2e-3)
    apart = [old - ref for row in rows for old, ref in zip(row["old"], row["reference"], strict=True)]
    k1 = math.fsum(apart) / len(
        rows
    )  # what a controller follows: of an answer, by the estimator of the reward
    k3 = math.fsum(math.exp(-each) - 1 + each for each in apart) / len(rows)
    assert float(update.figures["kl"]) == pytest.approx(k1, abs=5e-3) and abs(k1 - k3) > 0.05


def test_advantages_are_whitened_over_the_step(folder: Path) -> None:
    settings = {**DEEPSPEED_CHAT, "advantage": "gae", "rewards": {f"{OWN}evenness": 1.0}}
    save_model(folder / "dual", "features")
    task, _ = make_task(folder, "dual", settings, 300)
    gradient_of_step(task, ALONE)
    rows = read_jsonl(folder / "rollouts" / "000001.jsonl")
    values = torch.tensor([value for row in rows for value in row["advantages"]], dtype=torch.float64)
    assert float(values.mean()) == pytest.approx(0, abs=1e-4) and float(values.std()) == pytest.approx(
        1, abs=1e-4
    )


@pytest.mark.parametrize("model", ["dual", "qwen"])
def test_ptx_is_the_mean_cross_entropy_of_answers(folder: Path, model: str) -> None:
    save_tiny("qwen2_audio", folder / "qwen")
    save_model(folder / "dual", "features")
    settings = {"rewards": {f"{OWN}brevity": 1.0}, **DEEPSPEED_CHAT}
    alone, _, _ = gradient_of_step(make_task(folder, model, settings)[0])
    ptx = {"samples": str(folder / "prompts.jsonl"), "weight": 0.25}
    task, policy = make_task(folder, model, {**settings, "ptx": ptx}, 300)
    source = ManifestSource(str(folder / "prompts.jsonl"))
    drawn = Mixture([8], None, 4, window_runs=64).items(
        4, 8
    )  # the samples of step 1; the last two are held out
    sums, tokens = 0.0, 0
    for item in drawn:
        loaded = source[item.index]
        answer = RatedAnswer(content=loaded.sample.messages[-1].content)
        asked = LoadedSample(
            loaded.sample.model_copy(update={"messages": loaded.sample.messages[:-1], "answers": [answer]}),
            [],
            loaded.audio,
        )
        encoded = policy.encode(policy.take(asked, [0], ""))
        with torch.no_grad():
            found = policy.answer_logprobs(policy.root, policy.batch(encoded), TokenRequest(reference=False))
        sums, tokens = sums - float(found.policy_T.sum()), tokens + len(found.policy_T)
    loss, _, update = gradient_of_step(task)
    assert tokens > 8 and float(update.figures["ptx_loss"]) == pytest.approx(sums / tokens, rel=1e-9)
    assert loss == pytest.approx(alone + 0.25 * sums / tokens, rel=1e-9)


def test_the_critic_learns_at_its_own_rate_and_is_saved(folder: Path) -> None:
    out = run(
        folder,
        **{**DEEPSPEED_CHAT, "critic": {"learning_rate": 3e-2}},
        learning_rate=1e-12,
        steps=20,
        updates=2,
    )
    rows = [row for row in read_jsonl(out / "metrics.jsonl") if "value_error" in row]
    assert rows[-1]["value_error"] < 0.5 * rows[0]["value_error"]
    assert abs(rows[-1]["answer_length"] - rows[0]["answer_length"]) < 4  # the policy has hardly moved
    assert read_json(out / "critic" / "model" / "reward.json") == {"scored": "tokens"}
    config = PolicyTrainingConfig(
        samples=str(folder / "prompts.jsonl"), start=folder / "llm", rewards={f"{OWN}brevity": 1.0},  # type: ignore[arg-type]
        advantage="gae", critic=out / "critic",
    )  # fmt: skip
    again = CriticModel.begin(config, 1000)
    assert float(again.root.score.bias.detach()) != 0.0
    with pytest.raises(ConfigError, match="this is a critic"):
        RewardModel.load(out / "critic")


def test_a_later_stage_names_the_critic_of_an_earlier_one(folder: Path) -> None:
    shared = f"start: {folder}/llm, samples: {folder}/prompts.jsonl, rewards: {{{OWN}brevity: 1.0}}"
    path = folder / "recipe.yaml"
    path.write_text(
        f"""
        name: two
        stages:
          - {{name: plain, train_policy: {{{shared}}}}}
          - train_policy: {{{shared}, advantage: gae, critic: {{}}}}
          - {{name: later, train_policy: {{{shared}, advantage: gae, critic: "${{train_policy.critic}}"}}}}
        """
    )
    plain, first, second = load_recipe(path, runs=folder / "runs").stages
    assert isinstance(second.config, PolicyTrainingConfig) and second.config.critic is not None
    assert second.config.critic.start == first.folder / "critic" / "model" == first.artifacts["critic"]
    assert "critic" not in plain.artifacts
    path.write_text(path.read_text().replace("${train_policy.critic}", "${plain.critic}"))
    with pytest.raises(ConfigError, match="stage 'plain' makes no 'critic'"):
        load_recipe(path, runs=folder / "runs")


def test_a_reward_model_becomes_the_critic(folder: Path) -> None:
    reward = RewardModel.begin(folder / "llm")
    reward.save(folder / "reward")
    config = PolicyTrainingConfig(
        samples=str(folder / "prompts.jsonl"), start=folder / "llm", rewards={f"{OWN}brevity": 1.0},  # type: ignore[arg-type]
        advantage="gae", critic=folder / "reward",
    )  # fmt: skip
    critic = CriticModel.begin(config, 1000)
    assert torch.equal(critic.root.score.weight, reward.root.score.weight)
    assert float(critic.root.score.bias.detach()) == 0.0


def test_a_kill_changes_nothing_of_actor_and_critic(folder: Path) -> None:
    kl = {"controller": {"name": "proportional", "coefficient": 0.1, "target": 0.1}, "place": "reward"}
    settings = {**DEEPSPEED_CHAT, "kl": {**kl, "estimator": "k1"}, "updates": 2, "steps": 12}
    whole = check_killed_run(folder, settings, kills=(6,))
    assert (whole / "critic" / "model" / "model.safetensors").exists()


def test_what_a_critic_cannot_do_is_refused(folder: Path) -> None:
    save_tiny("qwen2_audio", folder / "other")
    assert "advantage: gae reads the values of a critic: set critic" in error_of(folder, advantage="gae")
    assert "critic is set, but advantage: grpo reads none" in error_of(folder, critic={})
    assert "critic: is no DualFFN" in error_of(folder, advantage="gae", critic="other")
    assert "critic.lora is set" in error_of(folder, advantage="gae", critic={"lora": {"rank": 2}})
    assert "score_clip cuts rewards of whole answers" in error_of(
        folder, advantage={"name": "gae", "steps": True, "score_clip": 5}, critic={}
    )
    assert not (folder / "bad" / "train_policy" / "checkpoint").exists()


def test_a_critic_that_cannot_read_the_batches_is_refused(folder: Path) -> None:
    save_tiny("qwen2_audio", folder / "qwen")
    save_tiny("qwen2_5_omni", folder / "omni")
    save_model(folder / "codes", "codes")
    save_model(folder / "words", "features")
    save_tiny("qwen2_audio", folder / "qwords")
    for name in ("words", "qwords"):
        (path,) = (folder / name).rglob("tokenizer.json")
        tokenizer = read_json(path)
        words = tokenizer["model"]["vocab"]
        words["a"], words["b"] = words["b"], words["a"]
        write_json(path, tokenizer)

    def refusal(policy: str, critic: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_policy(folder / policy).check_reader(load_policy(folder / critic), "critic")
        return str(caught.value)

    assert "critic: its audio encoder takes other features" in refusal("llm", "codes")
    assert "critic: its vocabulary" in refusal("llm", "words")
    assert "critic: its vocabulary" in refusal("qwen", "qwords")
    assert "critic: is a DualFFN" in refusal("qwen", "llm")
    assert "and the policy a qwen2_audio" in refusal("qwen", "omni")
    load_policy(folder / "qwen").check_reader(load_policy(folder / "qwen"), "critic")
