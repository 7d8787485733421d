"""What the proofs of preferences and of reinforcement learning print, from figures that are written here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from audiollm.files.atomic import write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import compare_preference
import compare_rl
import learn_grpo
import learn_preference
import learn_tts
import learn_tts_preference
from proof import Proof

Lines = Callable[[], dict[str, dict[str, Any]]]


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    """The printed lines by their case."""

    def read() -> dict[str, dict[str, Any]]:
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return {row["case"]: row for row in rows}

    return read


def run_of(folder: Path, stages: Sequence[str], figures: dict[str, Any]) -> Proof:
    """A run of two seeds whose stages have these figures."""
    for stage in stages:
        (folder / stage).mkdir(parents=True, exist_ok=True)
        write_json(folder / stage / "stage.json", {"figures": {"cpu_seconds": 60.0, **figures}})
    return Proof(folder, (1, 2))


def test_preferences_gain_over_the_first_model_of_the_same_seed(tmp_path: Path, lines: Lines) -> None:
    run = Proof(tmp_path, (1, 2))
    trained = run.arm_stages("learn_preference")
    stages = [*run.stages("first", "further"), *trained]
    run = run_of(tmp_path, stages, {"accuracy": 0.9, "calibration_error": 0.1})
    right = {
        "first_1": 0.4,
        "first_2": 0.6,
        "aligned_dpo_1": 0.8,
        "aligned_dpo_2": 0.8,
        "aligned_exchanged_1": 0.5,
    }
    task = {source[-1]: {"accuracy": 0.5} for source in learn_preference.SOURCES.values()}
    scores = {
        stage: {"accuracy": right.get(stage, 0.5), "by_task": task}
        for stage in stages
        if "reward" not in stage
    }
    learn_preference.report(run, scores)
    printed = lines()
    assert printed["dpo: answers gained"]["seeds"] == [0.4, 0.2]
    assert printed["dpo: answers gained"]["peer"] == 0.2
    assert printed["exchanged recordings: answers gained"]["seeds"] == [0.1]
    assert printed["shuffled: answers gained"]["seeds"] == [0.1, -0.1]
    assert printed["dpo: held-out pairs ordered right"]["ratio"] == 1.0
    assert printed["reward_shuffled: calibration error"]["ours"] == 0.1
    assert len(printed) == 11


def test_methods_of_preferences_are_compared_over_seeds(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Proof(tmp_path, (1, 2))
    stages = [
        *run.stages("first"),
        *run.arm_stages("compare_preference"),
        *run.arm_stages("compare_preference_length"),
    ]
    run = run_of(tmp_path, stages, {"accuracy": 0.75})
    monkeypatch.setattr(Proof, "score", lambda *_: {"accuracy": 0.5})
    monkeypatch.setattr(
        compare_preference, "mean_words", lambda model, *_: 4.0 if "long_dpo" in str(model) else 3.0
    )
    compare_preference.report_methods(run, [])
    printed = lines()
    assert printed["simpo: held-out pairs ordered right"]["ours"] == 0.75
    compare_preference.report_lengths(run, [])
    printed = lines()
    assert printed["length, dpo: words more than before"]["ours"] == 1.0
    assert printed["length, simpo: words fewer than DPO"]["seeds"] == [1.0, 1.0]


def test_grpo_gains_over_the_first_model(tmp_path: Path, lines: Lines) -> None:
    run = Proof(tmp_path, (1, 2))
    stages = ["first", *run.arm_stages("learn_grpo"), "further"]
    run = run_of(tmp_path, stages, {})
    shares = {key: {"accuracy": 0.99} for key in ("well_formed", "short_thoughts")}
    scores = {
        stage: {"accuracy": 0.5 + 0.2 * ("grpo" in stage), "by_task": {"a": {"accuracy": 0.5}}, **shares}
        for stage in stages
    }
    learn_grpo.report(run, scores)
    printed = lines()
    assert (
        printed["grpo: answers gained"]["seeds"] == [0.2, 0.2]
        and printed["grpo: answers gained"]["ratio"] == 1.0
    )
    assert printed["exchanged recordings: answers gained"]["seeds"] == [0.0]
    assert printed["grpo: answers in form"]["peer"] == 0.98 and len(printed) == 7


def test_parts_of_compare_rl_are_reported(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Proof(tmp_path, (1, 2))
    stages = ["first", *run.arm_stages("compare_rl")]
    run = run_of(tmp_path, stages, {})
    for stage in stages:
        rows = [
            {"step": 0, "reward": 1.0, "kl": 1.1, "kl_weight": 0.1},
            {"step": 4, "evaluation/reward/accuracy": 0.8},
        ]
        (tmp_path / stage / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(Proof, "score", lambda *_: {"accuracy": 0.5, "well_formed": {"accuracy": 0.9}})
    for _, report in compare_rl.PARTS.values():
        report(run, [], 5)
    printed = lines()
    assert printed["rft: answers in form"]["seeds"] == [0.9, 0.9]
    assert printed["process rewards: answers until 0.7 are right"]["seeds"] == [320, 320]
    assert printed["adaptive KL: relative distance from its target"]["ours"] == 0.1
    assert (tmp_path / "methods.png").is_file()


def test_speech_is_compared_with_the_first_model(tmp_path: Path, lines: Lines) -> None:
    run = Proof(tmp_path, (1, 2))
    run = run_of(tmp_path, [*run.stages("first", "by_dpo", "by_shuffled")], {"accuracy": 0.6})
    first = [{"wrong": 0.2, "voice": 0.9}, {"wrong": 0.4, "voice": 0.9}]
    scores = {"first": first, "dpo": [{"wrong": 0.1, "voice": 0.9}] * 2, "shuffled": first}
    learn_tts_preference.print_scores(run, scores, "title")
    learn_tts_preference.report("x", scores, held="dpo")
    printed = lines()
    assert printed["dpo: fewer wrong digits, of those before"]["seeds"] == [0.5, 0.75]
    assert printed["dpo: right voices"]["peer"] == 0.88
    assert "peer" not in printed["shuffled: fewer wrong digits, of those before"]


def test_speech_of_three_seeds_has_a_line_each_and_their_mean(tmp_path: Path, lines: Lines) -> None:
    run = Proof(tmp_path, (1, 2))
    for stage, share in zip(run.stages("evaluate"), (0.9, 1.0), strict=True):
        (tmp_path / stage).mkdir()
        generated = {"speaker": {"accuracy": share}}
        scores = {"relative": {"classifier": share}, "sets": {"generated": generated}}
        write_json(tmp_path / stage / "scores.json", scores)
    learn_tts.report(run)
    printed = lines()
    assert len(printed) == 6
    assert printed[f"mean of 2 seeds: {learn_tts.TEXT}"]["ours"] == 0.95
    assert printed[f"seed 2: {learn_tts.VOICE}"]["peer"] == 0.92
