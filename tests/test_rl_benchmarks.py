"""The benchmarks learn-grpo, compare-rl and learn-tts-grpo: typed recipes, controls that are ones, what is reported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from audiollm.recipe.stages import load_recipe
from audiollm.rl.rewards.batch import RewardBatch, SampledAnswer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import compare_rl
import learn_grpo
import learn_tts_grpo
import shuffled_rewards


def stage_names(recipe: dict[str, Any], folder: Path) -> list[str]:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return [stage.name for stage in load_recipe(path, absent=[]).stages]


@pytest.fixture(autouse=True)
def working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_trainings_of_learn_grpo_are_typed(tmp_path: Path) -> None:
    found = stage_names(learn_grpo.recipe_of(tmp_path, (1, 2)), tmp_path)
    assert found == ["first", "grpo_1", "shuffled_1", "grpo_2", "shuffled_2", "exchanged_1"]


@pytest.mark.parametrize("part", compare_rl.PARTS)
def test_trainings_of_compare_rl_are_typed_and_sample_alike(part: str, tmp_path: Path) -> None:
    recipe = compare_rl.recipe_of(tmp_path, part, (1,), 12)
    names = stage_names(recipe, tmp_path)
    assert names == ["first", *(compare_rl.stage_name(part, name, 1) for name in compare_rl.TRAININGS[part])]
    held = {stage["name"] for stage in recipe["stages"][1:] if "kl" in stage["train_policy"]}
    assert set(names[1:]) - held == (
        {"methods_online_dpo_1", "methods_rft_1"} if part == "methods" else set()
    )
    sampled = set()
    for stage in recipe["stages"][1:]:
        settings = stage["train_policy"]
        greedy = settings.get("advantage") == "remax"
        sampled.add(settings["steps"] * settings["batch_size"] * (settings["group_size"] + greedy))
    assert len(sampled) == 1


def test_trainings_of_learn_tts_grpo_are_typed(tmp_path: Path) -> None:
    found = stage_names(learn_tts_grpo.firsts_of(tmp_path, (1,)), tmp_path)
    assert found == ["first_1", "first_1_says", "first_1_as_sampled", "judges", "reward_judges"]
    found = stage_names(learn_tts_grpo.recipe_of(tmp_path, tmp_path, (1,)), tmp_path)
    trained = [
        f"{kind}_1{says}" for kind in ("grpo", "grpo_shuffled") for says in ("", "_as_sampled", "_says")
    ]
    assert found == [*trained, "report"]


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
    answers = compare_rl.GRPO["batch_size"] * compare_rl.GRPO["group_size"]
    assert compare_rl.answers_until(tmp_path, 0.5) == 10 * answers
    assert compare_rl.answers_until(tmp_path, 0.7) is None


def test_all_methods_are_drawn(tmp_path: Path) -> None:
    for name in compare_rl.METHODS:
        stage = tmp_path / f"methods_{name}_1"
        stage.mkdir()
        rows = [json.dumps({"step": step, "reward": step / 10}) + "\n" for step in range(5)]
        (stage / "metrics.jsonl").write_text("".join(rows))
    compare_rl.draw(tmp_path, 1, 5)
    assert (tmp_path / "methods.png").stat().st_size > 1000
