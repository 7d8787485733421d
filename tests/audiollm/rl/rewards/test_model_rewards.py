"""Rewards by reward models of a local folder: whole answers, and the steps of a thought."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from audiollm.errors import ConfigError
from audiollm.rl.reward_models.model import RewardModel, Scored
from audiollm.rl.rewards.batch import RewardBatch, SampledAnswer
from audiollm.rl.rewards.catalog import reward_terms
from audiollm.rl.rewards.models import ModelReward, StepModelReward
from audiollm.rl.rewards.registry import load_rewards
from audiollm.rl.rewards.scoring import RewardSuite
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import tone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reward_model")
    save_tiny("qwen2_audio", made / "llm")
    for n in range(2):
        tone(made / f"{n}.wav", 150.0 + 400 * n, 0.4)
    kinds: tuple[Scored, ...] = ("answers", "steps")
    for scored in kinds:
        torch.manual_seed(0)
        RewardModel.begin(made / "llm", scored=scored).save(made / scored)
    return made


def answers(folder: Path, recording: int) -> list[SampledAnswer]:
    heard = Message(
        role="user", content=[AudioPart(path=str(folder / f"{recording}.wav")), TextPart(text="what?")]
    )
    key = Message(role="assistant", content=[TextPart(text="a dog")])
    sample = Sample(id="s", messages=[heard, key], task="t")
    return [SampledAnswer(sample, text, 4) for text in ("a dog", "<think>a low. a cat.</think>a dog", "")]


@pytest.mark.parametrize(("name", "scored"), [("reward_model", "answers"), ("step_model", "steps")])
def test_a_model_of_a_folder_scores_what_it_hears(folder: Path, name: str, scored: str) -> None:
    terms = reward_terms({name: {"folder": str(folder / scored)}})
    suite = RewardSuite(terms, load_rewards(terms))
    first, second = (suite.score(RewardBatch(answers(folder, n))) for n in range(2))
    assert first.kept_A == [True, True, False], "an empty answer has no score"
    assert first.problems[0].reason == "gave None"
    assert first.total_A[0] != first.total_A[1]
    assert first.total_A[0] != second.total_A[0], "another recording"
    assert first.total_A == suite.score(RewardBatch(answers(folder, 0))).total_A


def test_steps_have_a_probability_each(folder: Path) -> None:
    terms = reward_terms({"step_model": {"folder": str(folder / "steps")}})
    reward = load_rewards(terms)["step_model"]
    assert isinstance(reward, StepModelReward)
    scored = RewardSuite(terms, {"step_model": reward}).score(RewardBatch(answers(folder, 0)))
    steps = scored.steps_by_name["step_model"][1] or []
    assert [(step.text, step.end) for step in steps] == [("a low.", 13), ("a cat.", 20), ("a dog", None)]
    assert all(0 < step.score < 1 for step in steps)
    (alone,) = reward(RewardBatch([answers(folder, 0)[1]]))
    assert [step.score for step in alone or []] == pytest.approx([step.score for step in steps], rel=1e-5)
    assert scored.by_name["step_model"][1] == pytest.approx(sum(step.score for step in steps) / 3)


def test_a_model_of_the_other_kind_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="scores answers\n.*name it reward_model"):
        load_rewards(reward_terms({"step_model": {"folder": str(folder / "answers")}}))
    with pytest.raises(ConfigError, match="scores steps\n.*name it step_model"):
        load_rewards(reward_terms({"reward_model": {"folder": str(folder / "steps")}}))


def test_a_model_scores_on_the_device_of_the_training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A published model on a CPU would not be done before the time-out of a step."""
    monkeypatch.setattr(
        "audiollm.rl.rewards.models.default_device", lambda: torch.device("meta"), raising=False
    )
    for given, device in (({}, "meta"), ({"device": "cpu"}, "cpu")):
        terms = reward_terms({"reward_model": {"folder": str(folder / "answers"), **given}})
        reward = load_rewards(terms)["reward_model"]
        assert isinstance(reward, ModelReward)
        assert next(reward.model.root.parameters()).device.type == device
