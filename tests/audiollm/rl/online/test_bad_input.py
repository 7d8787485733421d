"""Bad rewards, answers, prompts and recordings in `train_policy`: what is named, what is left out, what goes on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import TextPart, write_samples
from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.errors import ConfigError
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.files.atomic import read_jsonl
from audiollm.models.dual_ffn import DualFFN
from audiollm.recipe.stages import load_recipe
from audiollm.rl.reward_models.model import RewardModel
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.online.bad_rewards import PLACE, REASONS
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts
from tests.audiollm.rl.online.stage_runs import error_of, run, write_recipe
from tests.audiollm.rl.preference.records import tone

SHORT: dict[str, Any] = {
    "steps": 10,
    "group_size": 3,
    "max_answer_tokens": 6,
    "evaluations": 1,
    "eval_prompts": 1,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_model(tmp_path / "llm", "features")
    write_prompts(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [row for path in sorted((out / "rollouts").glob("*.jsonl")) for row in read_jsonl(path)]


def figures_of(out: Path) -> list[dict[str, float]]:
    return [row for row in read_jsonl(out / "metrics.jsonl") if "skipped" in row]


def test_every_failure_of_a_reward_is_named_and_left_out(folder: Path) -> None:
    rewards = {f"{PLACE}{name}": 1.0 for name in REASONS}
    out = run(folder, rewards=rewards, **SHORT)
    told = {(row["id"], row["place"]): row["reason"] for row in read_jsonl(out / "set_aside.jsonl")}
    assert told == {
        (sample, f"reward {PLACE}{name}"): f"answer 0: {reason}" for name, (sample, reason) in REASONS.items()
    }
    rows = rows_of(out)
    failing = {sample for sample, _ in REASONS.values()}
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        assert (row["reward"] is None) == (row["id"] in failing and row["number"] == 0)
        groups.setdefault((row["step"], row["id"]), []).append(row)
    left_out = 0
    for group in groups.values():
        kept = [row for row in group if row["reward"] is not None]
        mean = sum(row["reward"] for row in kept) / len(kept)
        for row in group:
            if row["reward"] is None:
                left_out += 1
                assert not any(row["advantages"])
            else:  # the baseline is that of the others
                assert all(value * (row["reward"] - mean) >= 0 for value in row["advantages"])
                assert any(row["advantages"]) == (abs(row["reward"] - mean) > 1e-9)
    assert left_out > 5 and len(figures_of(out)) == 10


def test_a_reward_that_fails_is_an_alarm_with_its_line(folder: Path) -> None:
    """It is named on the console and in the report; that all its rewards are missing is not equality."""
    (folder / "my_failing.py").write_text(
        "from statistics import fmean\n\n\ndef empty(batch):\n    return [fmean([]) for _ in batch]\n\n\n"
        "async def later(batch):\n    return [fmean([]) for _ in batch]\n"
    )
    for name, line in (("empty", 5), ("later", 9)):
        out = run(folder, name, rewards={f"my_failing:{name}": 1.0}, max_skipped_steps=11, **SHORT)
        told = {row["kind"]: row["text"] for row in read_jsonl(out / "alarms.jsonl")}
        assert (
            f"raised StatisticsError: fmean requires at least one data point (my_failing.py, line {line})"
            in (told["failed reward"])
        )
        assert "skipped" in told and "no variance" not in told
    out = run(folder, "none", rewards={f"{PLACE}none": 1.0}, **SHORT)
    alarms = read_jsonl(out / "alarms.jsonl") if (out / "alarms.jsonl").exists() else []
    assert "failed reward" not in {row["kind"] for row in alarms}, "None leaves an answer out"


def test_an_answer_that_lacks_one_of_several_rewards_is_left_out_of_each(folder: Path) -> None:
    """GDPO, which has a baseline for each reward."""
    rewards = {f"{PLACE}none": 1.0, f"{OWN}evenness": 1.0}
    rows = rows_of(run(folder, rewards=rewards, advantage="gdpo", **SHORT))
    lacking = [row for row in rows if row["reward"] is None]
    assert lacking and all(row["rewards"][f"{OWN}evenness"] is not None for row in lacking)
    assert not any(any(row["advantages"]) for row in lacking)


@pytest.mark.parametrize("name", REASONS)
def test_a_failure_stops_the_run_where_that_is_asked_for(folder: Path, name: str) -> None:
    sample, reason = REASONS[name]
    told = error_of(folder, rewards={f"{PLACE}{name}": 1.0}, on_error="stop", **SHORT)
    assert f"reward {PLACE}{name}, sample {sample!r}, answer 0: {reason}" in told
    assert "on_error: skip" in told


def test_a_reward_that_hangs_is_named(folder: Path) -> None:
    out = run(folder, rewards={f"{PLACE}hangs": 1.0}, reward_timeout_s=0.2, **SHORT)
    told = [row for row in read_jsonl(out / "set_aside.jsonl") if row["id"] == "tone0"]
    assert "answer 0: hangs: no value after 0.2 s" in {row["reason"] for row in told}
    rows = rows_of(out)
    assert all(row["reward"] is None for row in rows if row["id"] == "tone0" and row["number"] == 0)
    assert any(row["reward"] is not None for row in rows if row["step"] == 9 or row["id"] != "tone0")
    assert len(figures_of(out)) == 10


def test_truncated_answers_are_told_of(folder: Path) -> None:
    settings = {**SHORT, "max_answer_tokens": 1, "rewards": {f"{OWN}evenness": 1.0}}
    kept = run(folder, "kept", **settings)
    assert "truncated" in {row["kind"] for row in read_jsonl(kept / "alarms.jsonl")}
    assert any(any(row["advantages"]) for row in rows_of(kept) if row["truncated"])
    left_out = run(folder, "left_out", truncated="leave_out", max_skipped_steps=11, **settings)
    assert not any(any(row["advantages"]) for row in rows_of(left_out) if row["truncated"])


def test_an_empty_answer_has_no_words_to_judge(folder: Path) -> None:
    torch.manual_seed(0)
    with torch.no_grad():  # some answers end before they begin
        model = DualFFN.from_pretrained(folder / "llm" / "model")
        tokenizer = DualFFNPolicy.load(folder / "llm").template.tokenizer
        model.text_lm_head.weight[tokenizer.token_to_id("<|eot_id|>")] *= -12
    save_file(model.state_dict(), folder / "llm" / "model" / "model.safetensors", {"format": "pt"})
    RewardModel.begin(folder / "llm").save(folder / "judge")
    rewards = {"format": 0.5, "reward_model": {"folder": str(folder / "judge"), "weight": 1.0}}
    settings = {**SHORT, "max_answer_tokens": 4, "group_size": 8, "learning_rate": 1e-9}
    out = run(folder, rewards=rewards, **settings)
    rows = rows_of(out)
    empty = [row for row in rows if not row["answer"].strip()]
    assert empty and len(empty) < len(rows)
    assert all(row["rewards"]["reward_model"] is None and row["reward"] is None for row in empty)
    assert all(row["rewards"]["format"] == 0.0 and row["tokens"] > 0 for row in empty)
    assert all(row["reward"] is not None for row in rows if row["answer"].strip())
    assert {row["reason"].partition(": ")[2] for row in read_jsonl(out / "set_aside.jsonl")} == {"gave None"}


def test_a_prompt_that_no_pack_holds_is_set_aside(folder: Path) -> None:
    samples = read_samples(folder / "prompts.jsonl")[0]
    part = samples[2].messages[0].content[0]
    long = part.model_copy(update={"text": "low " * 300})
    asked = samples[2].messages[0].model_copy(update={"content": [long, *samples[2].messages[0].content[1:]]})
    samples[2] = samples[2].model_copy(update={"messages": [asked, samples[2].messages[1]]})
    write_samples(folder / "prompts.jsonl", samples)
    out = run(folder, max_tokens=1200, rewards={f"{OWN}evenness": 1.0}, **SHORT)
    (told,) = read_jsonl(out / "set_aside.jsonl")
    assert told["id"] == "0/tone2" and "positions together, a pack holds 1200" in told["reason"]
    rows = rows_of(out)
    assert all(bool(row["old"]) == (row["id"] != "tone2") for row in rows)
    assert "a pack holds 1200" in error_of(folder, max_tokens=1200, strict=True, **SHORT)


def test_a_recording_beyond_the_window_is_set_aside(folder: Path) -> None:
    save_tiny("qwen2_audio", folder / "qwen")
    tone(folder / "2-0.wav", 200.0, 45.0)
    out = run(folder, start="qwen", rewards={f"{OWN}evenness": 1.0}, **SHORT)
    (told,) = read_jsonl(out / "set_aside.jsonl")
    assert "tone2" in told["id"] and "2-0.wav" in str(told)
    assert "tone2" not in {row["id"] for row in rows_of(out)}


def test_a_recording_that_has_vanished_is_named(folder: Path) -> None:
    (folder / "3-1.wav").unlink()
    out = run(folder, rewards={f"{OWN}evenness": 1.0}, **SHORT)
    (told,) = read_jsonl(out / "set_aside.jsonl")
    assert told["id"] == "tone3" and "3-1.wav" in str(told)
    assert "tone3" not in {row["id"] for row in rows_of(out)} and len(figures_of(out)) == 10
    assert "3-1.wav" in error_of(folder, strict=True, rewards={f"{OWN}evenness": 1.0}, **SHORT)


def test_steps_whose_recordings_have_all_vanished_are_skipped(folder: Path) -> None:
    for path in folder.glob("*.wav"):
        path.unlink()
    out = run(folder, max_skipped_steps=11, **SHORT)
    assert [row["skipped"] for row in figures_of(out)] == [1.0] * 10 and rows_of(out) == []
    told = error_of(folder, max_skipped_steps=2, **SHORT)
    assert "in 2 steps in a row no prompt of this process was answered" in told and "set_aside.jsonl" in told


def test_a_model_that_hears_nothing_is_not_asked_about_recordings(folder: Path) -> None:
    words = train_text_tokenizer(["seven zebras sang to the moon"] * 3, 320)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=words.get_vocab_size(), **sizes)).save_pretrained(folder / "text")
    words.save(str(folder / "text" / "tokenizer.json"))
    told = error_of(folder, start="text", **SHORT)
    assert "is a language model that hears nothing" in told and "recipes/understanding/full.yaml" in told
    save_model(folder / "coded", "codes")
    told = error_of(folder, start="coded", **SHORT)
    assert "the model reads codes" in told and "`tokenize` it first" in told


@pytest.mark.parametrize("arguments", ["completions, **kwargs", "prompts, completions, answer", ""])
def test_a_reward_with_the_arguments_of_trl_is_refused_with_what_is_in_their_place(
    folder: Path, arguments: str
) -> None:
    (folder / "of_trl.py").write_text(f"def one({arguments}):\n    return [1.0]\n")
    told = error_of(folder, rewards={"of_trl:one": 1.0}, **SHORT)
    assert "a reward is called with one batch" in told and "answer.text (completion)" in told
    sys.modules.pop("of_trl")


def test_a_reward_that_fails_on_all_held_out_answers_is_named(folder: Path) -> None:
    (folder / "all_fail.py").write_text("def one(batch):\n    raise RuntimeError('no luck')\n")
    told = error_of(folder, rewards={"all_fail:one": 1.0}, keep_best=True, **SHORT)
    assert "no answer to a held-out prompt has a reward" in told and "no luck" in told


def test_rows_of_trl_are_named_with_the_command_that_converts_them(folder: Path) -> None:
    (folder / "prompts.jsonl").write_text('{"prompt": "Which?", "solution": "low"}\n')
    told = error_of(folder, **SHORT)
    assert "prompts.jsonl:1: no sample: id" in told and "audiollm convert grpo FILE" in told


@pytest.mark.parametrize(
    ("reward", "reason", "remedy"),
    [
        ("my_rewrds:brevity", "no module 'my_rewrds'", "my_rewards.py"),
        ("my_own:brevty", "has no 'brevty'", "did you mean 'brevity'?"),
        ("my_own.py:brevity", "cannot be imported", "name my_rewards.py in the folder where you start as"),
        ("./my_own.py:brevity", "no such reward", "my_rewards:brevity of my_rewards.py"),
    ],
)
def test_a_function_that_is_not_there_is_told_before_the_first_stage(
    folder: Path, reward: str, reason: str, remedy: str
) -> None:
    """By `run` and by `plan`: the stages before `train_policy` may take days."""
    (folder / "my_own.py").write_text("def brevity(batch):\n    return [1.0 for _ in batch]\n")
    recipe = write_recipe(folder, rewards={reward: 1.0})
    for absent in (None, []):  # a run; a plan
        with pytest.raises(ConfigError) as caught:
            load_recipe(recipe, runs=folder, absent=absent)
        assert reason in str(caught.value) and remedy in str(caught.value)
    load_recipe(write_recipe(folder, rewards={"my_own:brevity": 1.0}), runs=folder)
    (folder / "my_own.py").write_text("from tests.audiollm.rl.online.bad_rewards import *\n")
    load_recipe(write_recipe(folder, rewards={"my_own:nan": 1.0}), runs=folder)


def test_answers_that_differ_in_spelling_alone_are_no_options(folder: Path) -> None:
    """Nobody gave options; the right answers of one question are `low` and `Low.`"""
    samples = read_samples(folder / "prompts.jsonl")[0]
    spelt = samples[4].messages[1].model_copy(update={"content": [TextPart(text="Low.")]})
    samples[4] = samples[4].model_copy(update={"messages": [samples[4].messages[0], spelt]})
    write_samples(folder / "prompts.jsonl", samples)
    out = run(folder, rewards={"accuracy": 1.0, f"{OWN}evenness": 1.0}, **SHORT)
    assert "tone4" in {row["id"] for row in rows_of(out) if row["reward"] is not None}


def test_what_can_be_known_is_told_before_any_work(folder: Path) -> None:
    save_tiny("qwen2_audio", folder / "qwen")
    spoken = {"answer": "audio", "rewards": {"length": 1.0}}
    assert "answer: audio, and this model answers in text" in error_of(folder, start="qwen", **spoken)
    assert "scores speech, and answer is text" in error_of(folder, rewards={"ends": 1.0})
    samples = read_samples(folder / "prompts.jsonl")[0]
    choices = {"choices": ["low", "high", "Low"]}
    samples[4] = samples[4].model_copy(update={"metadata": {**samples[4].metadata, **choices}})
    write_samples(folder / "prompts.jsonl", samples)
    told = error_of(folder, rewards={"accuracy": 1.0})
    assert "sample 'tone4'" in told and "is there twice" in told
    samples[4] = samples[4].model_copy(update={"messages": samples[4].messages[:-1], "metadata": {}})
    write_samples(folder / "prompts.jsonl", samples)
    assert "1 prompts have no answer key, the first is 'tone4'" in error_of(folder, rewards={"accuracy": 1.0})
    assert not (folder / "bad" / "train_policy" / "checkpoint").exists()
    assert not (folder / "bad" / "train_policy" / "rollouts").exists()
