"""The benchmarks learn-grpo and compare-rl: arms that sample alike, controls that are ones, what is reported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from audiollm.rl.rewards.batch import RewardBatch, SampledAnswer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import compare_rl
import learn_grpo
import make_reasoning
import proof
import shuffled_rewards


@pytest.fixture(autouse=True)
def working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_arms_of_compare_rl_are_held_alike_and_sample_alike(tmp_path: Path) -> None:
    run = proof.Proof(tmp_path / "run", (1,), (), [compare_rl.BENCH])
    recipe = run.load(compare_rl.BENCH, absent=[], steps=12)
    configs = {stage.name: stage.config.model_dump() for stage in recipe.stages}
    arms = {arm for part_arms, _ in compare_rl.PARTS.values() for arm in part_arms}
    assert {f"by_{arm}_1" for arm in arms} == configs.keys()
    assert {name for name, config in configs.items() if config["kl"] is None} == {
        "by_online_dpo_1",
        "by_rft_1",
    }
    sampled = {
        config["steps"]
        * config["batch_size"]
        * (config["group_size"] + (config["advantage"]["name"] == "remax"))
        for config in configs.values()
    }
    assert sampled == {12 * compare_rl.ANSWERS_PER_STEP}
    names = configs["by_process_1"]["rewards"]["steps"]["names"]
    grpo = proof.Proof(tmp_path / "run", (1,)).load(learn_grpo.BENCH, absent=[]).stages[0].config.model_dump()
    assert tuple(names) == tuple(grpo["rewards"]["steps"]["names"]) == make_reasoning.NAMES


def batch_of(texts: list[str], codes: list[torch.Tensor] | None = None) -> RewardBatch:
    asked = [Message(role="user", content=[AudioPart(path="x.wav"), TextPart(text="Which?")])]
    key = Message(role="assistant", content=[TextPart(text="<answer>yes</answer>")])
    sample = Sample(id="a", messages=[*asked, key], task="audio-qa", metadata={"choices": ["yes", "no"]})
    return RewardBatch(
        [
            SampledAnswer(sample, text, 1, codes_KT=None if codes is None else codes[place])
            for place, text in enumerate(texts)
        ]
    )


def test_shuffled_rewards_are_the_rewards_in_an_order_of_the_answers_alone() -> None:
    texts = ["<think>a</think><answer>yes</answer>"] * 8 + ["<think>a</think><answer>no</answer>"] * 24
    found = shuffled_rewards.accuracy(batch_of(texts))
    assert sorted(found, key=float) == [0.0] * 24 + [1.0] * 8  # type: ignore[arg-type]
    assert found == shuffled_rewards.accuracy(batch_of(texts))
    assert found != [1.0] * 8 + [0.0] * 24
    given = [float(number) for number in range(16)]
    one, other = (
        shuffled_rewards.shuffled(
            given, batch_of([""] * 16, [torch.full((2, 3), n + first) for n in range(16)])
        )
        for first in (0, 100)
    )
    assert sorted(one, key=float) == sorted(other, key=float) == given  # type: ignore[arg-type]
    assert one != other  # speech counts, too


def test_answers_until_an_accuracy(tmp_path: Path) -> None:
    key = "evaluation/reward/accuracy"
    rows = [{"step": 4, key: 0.4}, {"step": 5, "reward": 1.0}, {"step": 9, key: 0.6}, {"step": 14, key: 0.55}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = compare_rl.ANSWERS_PER_STEP
    assert compare_rl.answers_until(tmp_path, 0.5) == 10 * answers
    assert compare_rl.answers_until(tmp_path, 0.7) is None


def test_all_methods_are_drawn(tmp_path: Path) -> None:
    for name in compare_rl.METHODS:
        stage = tmp_path / f"by_{name}_1"
        stage.mkdir()
        rows = [json.dumps({"step": step, "reward": step / 10}) + "\n" for step in range(5)]
        (stage / "metrics.jsonl").write_text("".join(rows))
    compare_rl.draw(tmp_path, 1, 5)
    assert (tmp_path / "methods.png").stat().st_size > 1000
