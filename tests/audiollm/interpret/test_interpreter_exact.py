"""Neither packs nor ranks change a step over streams: rewards are standardised over all of them (float64)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from audiollm.files.atomic import read_json, read_jsonl
from audiollm.interpret.training.run import train_interpreter
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from tests.audiollm.interpret.interpreter_tasks import (
    ALL_REWARDS,
    CASES,
    PPO,
    STAGE_1,
    config_of,
    one_stream_step,
)
from tests.audiollm.interpret.toy_streams import save_toy_model, toy_stream, write_streams
from tests.audiollm.rl.online.fresh_tasks import compare
from tests.audiollm.train.two_ranks import on_two_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("exact")
    save_toy_model(made)
    write_streams(made, 12)
    return made


def by_stream(folder: Path, place: str) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["id"], row["number"]): row for row in read_jsonl(folder / place / "000001.jsonl")}


FAST = ("gated", "hibiki-zero", "speech")


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_packs_change_nothing_of_streams(folder: Path, case: str) -> None:
    one_stream_step(folder, ALONE, case, 100_000, f"whole-{case}")
    one_stream_step(folder, ALONE, case, 250, f"parts-{case}")
    both = compare(folder, f"parts-{case}", f"whole-{case}")
    assert both["one"]["packs"] > both["other"]["packs"]
    whole, parts = by_stream(folder, f"whole-{case}"), by_stream(folder, f"parts-{case}")
    assert whole.keys() == parts.keys()
    for key, row in whole.items():
        assert row["advantages"] == pytest.approx(parts[key]["advantages"], abs=1e-9)
        assert row["old"] == pytest.approx(row["behaviour"], abs=2e-4)


def two_ranks(folder: Path, ranks: Ranks) -> None:
    for case in CASES:
        one_stream_step(folder, ranks, case, 250, f"two-{case}")


@pytest.mark.slow
def test_two_ranks_standardise_as_one(folder: Path) -> None:
    on_two_ranks(two_ranks, folder)
    for case in CASES:
        one_stream_step(folder, ALONE, case, 100_000, f"one-{case}")
        both = compare(folder, f"two-{case}", f"one-{case}")
        assert both["one"]["coefficients"] == pytest.approx(both["other"]["coefficients"], rel=1e-9)


def test_a_process_reward_is_the_advantage_of_its_chunk(folder: Path) -> None:
    """All tokens of an action have one advantage, of mean 0 and deviation 1 among the rollouts of the stream."""
    one_stream_step(folder, ALONE, "hibiki-zero", 100_000, "process")
    rows = by_stream(folder, "process")
    streams = {id for id, _ in rows}
    seen = 0
    for id in streams:
        of_actions = []
        for number in range(3):
            row = rows[id, number]
            steps, first, own = row["steps"], 0, []
            assert len(steps) == len(toy_stream(int(id[1:]))[1])
            for step in steps:
                tokens = row["advantages"][first : step["action"] + 1]
                assert tokens == pytest.approx([step["reward"]] * len(tokens), abs=1e-4)
                own.append(step["reward"])
                first = step["action"] + 1
            of_actions.append(own)
        table_NT = torch.tensor(of_actions, dtype=torch.float64)
        assert table_NT.mean(0).abs().max() < 1e-6
        deviation_T = table_NT.std(0, unbiased=False)
        assert bool(((deviation_T - 1).abs().lt(1e-6) | (deviation_T == 0)).all())
        seen += int((deviation_T > 0).sum())
    assert seen


def test_text_and_speech_have_a_kl_of_their_own(folder: Path) -> None:
    one_stream_step(folder, ALONE, "speech", 100_000, "both-kinds")
    found = read_json(folder / "both-kinds.json")
    figures = found["figures"]
    assert figures["kl_audio"] != 0 != figures["kl_text"]
    assert figures["kl_text"] + figures["kl_audio"] == pytest.approx(figures["kl"], rel=1e-12)
    assert (figures["kl_weight"], figures["kl_weight_audio"]) == (0.02, 0.3)
    assert abs(figures["kl_audio"] / 0.42 - 1) < 0.2  # its error is not cut, that of text is
    # Ziegler's controller, each by its own error: 0.1 of the error, which is cut to 0.2
    for kl, target, before, after in zip(
        (figures["kl_text"], figures["kl_audio"]),
        (0.5, 0.42),
        (0.02, 0.3),
        found["coefficients"],
        strict=True,
    ):
        error = min(0.2, max(-0.2, kl / target - 1))
        assert after == pytest.approx(before * (1 + 0.1 * error), rel=1e-9)


# ------------------------------------------------------------------------------------------ whole trainings


def train_both_stages(folder: Path, ranks: Ranks, name: str, **settings: Any) -> None:
    """Stage 1, then stage 2 from its model."""
    place, model = folder / name, folder
    kl = {**PPO["kl"], "controller": {**PPO["kl"]["controller"], "gain": 1.0}}
    for stage, rewards in (("stage_1", STAGE_1), ("stage_2", ALL_REWARDS)):
        own = place / stage
        own.mkdir(parents=True, exist_ok=True)
        run: dict[str, Any] = {
            **PPO, "kl": kl, "rewards": rewards, "start": model, "precision": "fp32", "report_to": (),
            "evaluations": 1, "learning_rate": 3e-3, **settings,
        }  # fmt: skip
        recipe = Recipe("test", Path("test.yaml"), "tiny", 4, own, (), {})
        context = Context(own, recipe, Console(quiet=True), {}, ranks)
        train_interpreter(config_of(folder, run, 400), context)
        model = own


def curve(folder: Path) -> list[dict[str, float]]:
    keys = ("loss", "reward", "kl", "kl_weight", "gradient_norm", "answer_length", "value_error")
    rows = [{key: row[key] for key in keys if key in row} for row in read_jsonl(folder / "metrics.jsonl")]
    return [row for row in rows if "kl_weight" in row]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_train_both_stages_as_one(tmp_path: Path, strategy: str) -> None:
    save_toy_model(tmp_path)
    write_streams(tmp_path, 12)
    on_two_ranks(partial(train_both_stages, name="two", strategy=strategy), tmp_path)
    train_both_stages(tmp_path, ALONE, "one")
    for stage in ("stage_1", "stage_2"):
        found, expected = curve(tmp_path / "two" / stage), curve(tmp_path / "one" / stage)
        assert len(found) == len(expected) == 10 and expected[-1]["kl"] != 0
        for row, wanted in zip(found, expected, strict=True):
            assert row == pytest.approx(wanted, rel=1e-4, abs=1e-5)
