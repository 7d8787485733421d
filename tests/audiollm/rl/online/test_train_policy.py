"""The stage `train_policy`: it learns, it goes on after a kill, and it refuses what it cannot do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from audiollm.families import registry
from audiollm.families.logprobs.answers import AnswerLogprobs
from audiollm.files.atomic import read_json, read_jsonl, write_jsonl
from audiollm.models.dual_ffn import DualFFN
from audiollm.recipe.stages import load_recipe
from audiollm.rl.online import run as stage
from audiollm.rl.online.task import PolicyTask
from audiollm.rl.rollouts.records import RolloutRecords
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts
from tests.audiollm.rl.online.stage_runs import check_killed_run, error_of, run, write_recipe


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_model(tmp_path / "llm", "features")
    write_prompts(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_learns_what_is_rewarded(folder: Path) -> None:
    out = run(
        folder, steps=40, kl={"controller": {"name": "proportional", "coefficient": 0.001, "target": 2.0}}
    )
    rows = read_jsonl(out / "metrics.jsonl")
    lengths = [row["answer_length"] for row in rows if "answer_length" in row]
    assert sum(lengths[-5:]) < 0.7 * sum(lengths[:5])
    trained = [row for row in rows if "reward" in row]
    assert (
        trained[0]["ratio"] == 1.0
        and trained[0]["mismatch_kl"] < 1e-6
        and trained[0]["kl"] == pytest.approx(0, abs=1e-6)
    )
    assert len({row["kl_weight"] for row in trained}) > 1  # the controller moves
    assert len(list((out / "rollouts").glob("*.jsonl"))) == 40
    figures = read_json(out / "stage.json")["figures"]
    assert figures["prompts"] == 8 and figures["held_out_prompts"] == 2 and "reward" in figures
    assert {"seconds/rollout", "seconds/reward", "seconds/update"} <= read_jsonl(out / "performance.jsonl")[
        -1
    ].keys()
    DualFFN.from_pretrained(out / "model")
    check_answers_and_tokens(out)


def check_answers_and_tokens(out: Path) -> None:
    """Every evaluation asks the same prompts, first of all the model before the training; tokens have their texts."""
    answers = read_jsonl(out / "answers.jsonl")
    assert [(row["step"], row["id"]) for row in answers] == [
        (step, id) for step in (0, 20, 40) for id in ("tone8", "tone9")
    ]
    figures = read_json(out / "stage.json")["figures"]
    assert sum(row["reward"] for row in answers[-2:]) / 2 == pytest.approx(figures["reward"])
    rows = RolloutRecords(out / "rollouts").groups(39)[0].answers
    assert all(len(answer.tokens) == len(answer.numbers("advantages")) > 0 for answer in rows)
    assert all("".join(token.text for token in answer.tokens).startswith(answer.text[:3]) for answer in rows)


def test_speech_of_answers_is_kept_as_codes(folder: Path) -> None:
    rows = read_jsonl(folder / "prompts.jsonl")
    for row in rows:  # the right answer is spoken, too
        row["messages"][-1]["content"] = [row["messages"][0]["content"][-1]]
    write_jsonl(folder / "prompts.jsonl", rows)
    out = run(folder, answer="audio", max_frames=3, steps=10, evaluations=1)
    for answer in RolloutRecords(out / "rollouts").groups(9)[0].answers:
        codes_KT, (speech,) = answer.codes(), [token for token in answer.tokens if token.is_speech]
        assert (
            codes_KT is not None and 0 <= speech.actions - codes_KT.numel() <= 1
        )  # with its end, where it ended
    assert (out / "answers" / "000010.safetensors").exists() and (
        out / "answers" / "000000.safetensors"
    ).exists()


class Beeps:
    """A codec of half a second a frame."""

    sample_rate = 16_000

    def decode(self, codes_KT: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, 8_000 * codes_KT.shape[1])


def test_a_reward_of_ones_own_hears_the_speech(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "codec").mkdir()
    monkeypatch.setattr(
        registry, "load_speech_generator", lambda model, codec: SimpleNamespace(codec=Beeps())
    )
    settings = {"rewards": {f"{OWN}duration": 1.0}, "codec": "codec"}
    out = run(folder, answer="audio", max_frames=3, steps=10, evaluations=1, **settings)
    rows = [row for path in sorted((out / "rollouts").glob("*.jsonl")) for row in read_jsonl(path)]
    found = {row["reward"] for row in rows}
    assert len(found) > 1 and found <= {0.0, 0.5, 1.0, 1.5}
    assert "no reward hears speech" in error_of(folder, **settings)


def test_a_kill_changes_nothing(folder: Path) -> None:
    settings = {
        "steps": 14,
        "updates": 2,
        "trained": "adapter",
        "lora": {"rank": 2, "alpha": 4},
        "kl": {"controller": {"name": "horizon", "coefficient": 0.1, "target": 0.1, "horizon": 50}},
    }
    check_killed_run(folder, settings, kills=(4, 9))


def test_folders_of_rewards_are_found_as_all_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    rewards = {
        "reward_model": {"folder": "~/llm"},
        "words": {"recognizer": "~/llm"},
        "voice": {"judge": "any:Judge"},
    }
    path = write_recipe(folder, start="~/llm", answer="any", rewards=rewards)
    config = load_recipe(path, runs=folder).stages[0].config
    assert config.start == folder / "llm"
    assert (
        config.rewards["reward_model"]["folder"]
        == config.rewards["words"]["recognizer"]
        == str(folder / "llm")
    )
    assert config.rewards["voice"] == {"judge": "any:Judge"}


class OverflowsOnce(PolicyTask):
    """The pass of step 5 overflows, the first time."""

    passes = 0

    def _first_passes(self, packs: Sequence[Any]) -> list[AnswerLogprobs]:
        found = super()._first_passes(packs)
        OverflowsOnce.passes += 1
        if OverflowsOnce.passes != 6:
            return found
        return [replace(each, policy_T=each.policy_T * torch.nan) for each in found]


def test_a_step_that_overflows_beside_a_reference_is_rolled_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller does not follow the KL of such a step, which is not finite either."""
    monkeypatch.setattr(stage, "PolicyTask", OverflowsOnce)
    monkeypatch.setattr(OverflowsOnce, "passes", 0)
    kl = {"controller": {"name": "proportional", "coefficient": 0.1, "target": 0.1}}
    out = run(folder, kl=kl, steps=10, evaluations=1)
    (left_out,) = read_jsonl(out / "left_out.jsonl")
    assert left_out["step"] == 6 and left_out["kind"] == "not finite"
    trained = [row for row in read_jsonl(out / "metrics.jsonl") if "kl_weight" in row]
    assert len(trained) >= 9 and all(row["kl"] == row["kl"] for row in trained)


def test_an_answer_without_a_reward_is_left_out_and_named(folder: Path) -> None:
    out = run(folder, rewards={f"{OWN}broken_for_one": 1.0})
    told = read_jsonl(out / "set_aside.jsonl")
    assert [row["id"] for row in told] == ["tone1"] and "cannot judge this" in told[0]["reason"]
    rows = [row for path in sorted((out / "rollouts").glob("*.jsonl")) for row in read_jsonl(path)]
    missing = [row for row in rows if row["id"] == "tone1" and row["number"] == 0]
    assert missing and all(row["reward"] is None and not any(row["advantages"]) for row in missing)
    assert all(row["reward"] is not None for row in rows if row["number"] == 1)
    assert "cannot judge this" in error_of(folder, rewards={f"{OWN}broken_for_one": 1.0}, on_error="stop")


def test_what_cannot_work_is_refused_before_any_work(folder: Path) -> None:
    assert "did you mean 'accuracy'" in error_of(folder, rewards={"acuracy": 1.0})
    assert "rewards.words: scores speech, and answer is text" in error_of(folder, rewards={"words": 1.0})
    for name, settings in (("reward_model", {"folder": "llm"}), ("accuracy", {})):
        told = error_of(folder, answer="audio", rewards={name: settings})
        assert f"rewards.{name}: scores words, and answer is audio" in told
    told = error_of(folder, rewards={"reward_model": {"folder": "nowhere"}})
    assert "recipe.yaml:" in told and "reward_model.folder: no such file or folder: nowhere" in told
    told = error_of(folder, overlong={}, max_answer_tokens=8)
    assert "recipe.yaml:" in told and "overlong.buffer is 16, and an answer has at most 8" in told
    assert "rewards.overlong: max_tokens or max_frames must be given" in error_of(
        folder, rewards={"overlong": {"buffer": 3}}
    )
    assert "codebooks: 99 of a model of" in error_of(folder, answer="audio", codebooks=99)
    told = error_of(folder, answer="audio", codebooks=1, objective="vespo")
    assert "the ratios of objective: vespo are those of whole answers" in told
    assert "group_size is 1" in error_of(folder, group_size=1)
    assert "did you mean 'grpo'" in error_of(folder, objective="grpoo")
    assert "reference is set, but kl is not" in error_of(folder, reference="llm")
    assert "no setting 'cap2'" in error_of(folder, correction={"cap2": 1}) or "cap2" in error_of(
        folder, correction={"cap2": 1}
    )
    assert not (folder / "bad" / "train_policy" / "checkpoint").exists()
