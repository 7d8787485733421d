"""Verdicts on the start and on the progress of a policy, by hand and in runs that become worse."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.files.atomic import read_json, read_jsonl
from audiollm.models.dual_ffn import DualFFN
from audiollm.rl.online.progress import (
    ENTROPY_STEPS,
    EntropyBounds,
    StartMeasure,
    changes_since_start,
    collapse,
    training_outcome,
)
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts
from tests.audiollm.rl.online.stage_runs import check_killed_run, error_of, run

CALM = EntropyBounds()


def rows(step: int, rewards: list[float | None], format: float = 1.0) -> list[dict[str, Any]]:
    return [
        {"step": step, "id": str(n), "reward": reward, "rewards": {"format": format}}
        for n, reward in enumerate(rewards)
    ]


def test_a_change_is_compared_prompt_by_prompt() -> None:
    """Differences of -1, -1, -2 and 0 have a mean of -1 and a standard error of sqrt(2 / 3) / 2."""
    first = rows(0, [3.0, 2.0, 2.0, 1.0, None])
    (change,) = changes_since_start([*first, *rows(5, [2.0, 1.0, 0.0, 1.0, 9.0])])
    assert change.mean == pytest.approx(-1.0) and change.error == pytest.approx(math.sqrt(2 / 3) / 2)
    assert change.is_below and change.is_clearly_below
    (noise,) = changes_since_start([*first, *rows(5, [0.0, 5.0, 1.0, 1.0, 9.0])])
    assert noise.mean == pytest.approx(-0.25) and not noise.is_below
    assert changes_since_start(rows(5, [1.0])) == []


def test_a_reward_within_two_standard_errors_of_the_start_is_not_clearly_below() -> None:
    """Differences of -1, 0, -1 and 0 have a mean of -0.5 and a standard error of sqrt(1 / 3) / 2 = 0.29."""
    first = rows(0, [3.0, 2.0, 2.0, 1.0])
    (change,) = changes_since_start([*first, *rows(5, [2.0, 2.0, 1.0, 1.0])])
    assert change.is_below and not change.is_clearly_below


@pytest.mark.parametrize(("before", "after", "lost"), [(1.0, 0.4, True), (0.5, 0.2, True), (0.4, 0.0, False)])
def test_a_format_that_the_start_hardly_had_is_not_lost(before: float, after: float, lost: bool) -> None:
    (change,) = changes_since_start([*rows(0, [1.0, 1.0], before), *rows(5, [1.0, 1.0], after)])
    assert change.lost_format is lost


def test_a_policy_has_collapsed_after_so_many_evaluations_in_a_row() -> None:
    low, high = [0.0, 0.0, 0.1, 0.0], [1.0, 1.0, 1.0, 0.9]
    start = rows(0, high)

    def verdict(*rewards: list[float], patience: int = 2) -> str | None:
        later = [row for n, values in enumerate(rewards) for row in rows(10 * (n + 1), values)]
        return collapse(changes_since_start([*start, *later]), patience, CALM)

    assert verdict(low) is None and verdict(low, high, low) is None
    assert verdict(low, high, low, low, patience=0) is None
    reason = verdict(high, low, low)
    assert (
        reason is not None
        and "below the start's at 2 evaluations in a row (0.975 at the start, 0.025 now)" in reason
    )
    lost = [*start, *rows(10, high, 0.4), *rows(20, high, 0.1)]
    reason = collapse(changes_since_start(lost), 2, CALM)
    assert reason is not None and "the format is lost" in reason and "100% at the start, 10% now" in reason


@pytest.mark.parametrize(("entropy", "bound"), [(0.2, None), (0.5, None), (0.9, "ceiling"), (0.004, "floor")])
def test_entropy_has_a_floor_and_a_ceiling(entropy: float, bound: str | None) -> None:
    bounds = EntropyBounds()
    bounds.add(0.25)
    for _ in range(ENTROPY_STEPS):
        bounds.add(entropy)
    bounds.add(math.nan)
    assert bounds.bound == bound and bounds.steps_at_bound == (ENTROPY_STEPS if bound else 0)
    assert (bounds.alarm() is None) == (bound is None) and (bound is None or bound in str(bounds.alarm()))
    same, better = ([*rows(0, [1.0, 1.0]), *rows(9, [value, value])] for value in (1.0, 2.0))
    assert (collapse(changes_since_start(same), 3, bounds) is None) == (bound is None)
    assert collapse(changes_since_start(better), 3, bounds) is None
    again = EntropyBounds()
    again.load_state_dict(bounds.state_dict())
    assert again.steps_at_bound == bounds.steps_at_bound


def test_a_start_that_is_not_fit_is_named() -> None:
    def fault(greedy: dict[str, float], sampled: dict[str, float], flat: float = 0.2) -> str | None:
        return StartMeasure(greedy, sampled, flat, 16, True).fault(learns_from_differences=True)

    fit = {"reward": 1.0, "format": 0.6, "accuracy": 0.3}
    assert fault(fit, fit) is None
    text = fault({"format": 1.0}, {**fit, "format": 0.047})
    expected = "4.7% of its sampled answers to 16 held-out prompts are well formed (greedy: 100%)"
    assert text is not None and expected in text
    assert "are right" in str(fault(fit, {**fit, "accuracy": 0.0}))
    assert "in 95% of the groups" in str(fault(fit, fit, flat=0.95))
    assert StartMeasure(fit, fit, 0.95, 16, True).fault(learns_from_differences=False) is None


def test_the_start_says_how_many_prompts_were_answered_in_either_way() -> None:
    shares = {"reward": 1.0}
    figures = ": reward 1.000 greedy / 1.000 sampled"
    assert StartMeasure(shares, shares, 0.2, 16, True).text() == f"the start on 16 held-out prompts{figures}"
    more = StartMeasure(shares, shares, 0.2, 16, True, greedy_prompts=70).text()
    assert more == f"the start on 70 held-out prompts, 16 of them sampled{figures}"


def test_the_outcome_says_first_that_a_model_is_worse() -> None:
    changes = changes_since_start([*rows(0, [1.0, 1.0]), *rows(5, [2.0, 1.5]), *rows(10, [0.0, 0.5])])
    (warning,) = training_outcome(changes, None, None)["warnings"]
    assert "worse than its start: held-out reward 0.250, 1.000 at the start" in warning
    assert training_outcome(changes, 5, None) == {
        "start_reward": 1.0,
        "reward_change": 0.75,
        "reward_change_error": 0.25,
    }
    figures = training_outcome(changes, 0, "it collapsed")
    assert (
        figures["warnings"][0].endswith("it collapsed")
        and "the training began from" in figures["warnings"][1]
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_model(tmp_path / "llm", "features")
    write_prompts(tmp_path, 14, held_out=6)
    monkeypatch.chdir(tmp_path)
    return tmp_path


WORSE: dict[str, Any] = {
    "rewards": {f"{OWN}brevity_where_trained": 1.0}, "steps": 30, "evaluations": 15, "patience": 2, "keep_best": True,
    "learning_rate": 2e-2,
}  # fmt: skip


def test_a_training_that_makes_the_model_worse_hands_over_the_start(folder: Path) -> None:
    """Held-out answers are paid for length, training answers for brevity: the more it learns, the worse it is."""
    out = check_killed_run(folder, WORSE, kills=(5,))
    figures = read_json(out / "stage.json")["figures"]
    assert figures["steps"] < 30 and figures["best_step"] == 0
    assert figures["reward"] == pytest.approx(figures["start_reward"]) and figures["reward_change"] == 0
    assert figures["stopped"].startswith("the held-out reward is below the start's at 2 evaluations in a row")
    assert {row["kind"] for row in read_jsonl(out / "alarms.jsonl")} >= {"worse than the start", "stopped"}
    start, end = (DualFFN.from_pretrained(path).state_dict() for path in (folder / "llm", out / "model"))
    assert all(torch.equal(end[name], value) for name, value in start.items())
    measure = StartMeasure.read(out)
    assert measure is not None and measure.is_held_out and measure.prompts == 6
    assert measure.greedy["reward"] == pytest.approx(figures["start_reward"])


def test_without_keep_best_a_collapse_is_an_error_or_is_said(folder: Path) -> None:
    assert "below the start's" in error_of(folder, **{**WORSE, "keep_best": False})
    out = run(folder, "patient", **{**WORSE, "keep_best": False, "patience": 0})
    (warning,) = read_json(out / "stage.json")["figures"]["warnings"]
    assert "worse than its start" in warning


def test_keep_best_needs_held_out_prompts(folder: Path) -> None:
    write_prompts(folder, 14, held_out=0)
    assert "no prompt is held out" in error_of(folder, keep_best=True)
    out = run(folder, "measured", steps=10, evaluations=1)
    measure = StartMeasure.read(out)
    assert measure is not None and not measure.is_held_out and measure.prompts == 3
