"""`placement` of `train_policy`: rollouts, rewards and reference in Ray actors give what the training ranks give."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from audiollm.files.atomic import read_jsonl
from audiollm.recipe.ranks import Ranks
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.online.own_engines import OWN_ENGINES, DiesOnce
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts
from tests.audiollm.rl.online.stage_runs import check_killed_run, error_of, run
from tests.audiollm.rl.online.test_policy_training_ranks import LORA, train_case
from tests.audiollm.train.two_ranks import on_two_ranks

KL = {"controller": {"name": "proportional", "coefficient": 0.1, "target": 0.5}}
SETTINGS: dict[str, Any] = {
    "rewards": {f"{OWN}evenness": 1.0}, "batch_size": 4, "steps": 20, "evaluations": 1, "eval_prompts": 2, "kl": KL,
}  # fmt: skip
SHARE = {"cpus": 0.25}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_model(tmp_path / "llm", "features")
    write_prompts(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_same(one: Path, other: Path) -> None:
    """Check that two runs left the same files, bit for bit."""
    names = {str(path.relative_to(one)) for path in one.rglob("*") if path.is_file()}
    for name in names - {"stage.json", "performance.jsonl", "config.yaml"}:
        if not name.endswith("state.json"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name


def curve(folder: Path) -> list[dict[str, float]]:
    return [row for row in read_jsonl(folder / "metrics.jsonl") if "reward" in row]


def check_curves(one: Path, other: Path, rel: float) -> None:
    """Check that two runs differ by rounding alone: the same answers, and figures that are equal but for it."""
    for first, second in zip(curve(one), curve(other), strict=True):
        # how far the engine is from training is rounding itself
        first, second = ({k: v for k, v in row.items() if "mismatch" not in k} for row in (first, second))
        assert first == pytest.approx(second, rel=rel, abs=1e-5)
    paths = sorted((one / "rollouts").glob("*.jsonl"))
    assert len(paths) == len(curve(one)) > 9
    for path in paths:
        rows = [read_jsonl(path), read_jsonl(other / "rollouts" / path.name)]
        told = [{(row["id"], row["number"]): row["answer"] for row in each} for each in rows]
        assert told[0] == told[1]


@pytest.mark.slow
def test_two_actors_are_one_process_that_samples_in_two_parts(folder: Path) -> None:
    """An actor is killed in the midst of a step; its successor gets the weights and samples the part again."""
    pytest.importorskip("ray")
    parts = run(folder, "parts", **SETTINGS, rollouts=f"{OWN_ENGINES}TwoParts")
    placement = {"rollout": {"actors": 2, "bucket_mb": 0.05, "verify": True, **SHARE}}
    actors = run(folder, "actors", **SETTINGS, rollouts=f"{OWN_ENGINES}DiesOnce", placement=placement)
    assert (folder / "died").exists() and (actors / "rollouts" / f"{DiesOnce.STEP:06d}.jsonl").exists()
    check_same(parts, actors)
    rows = curve(actors)
    assert len(rows) == 20 and len({row["gradient_norm"] for row in rows}) == 20
    assert not any(row["skipped"] for row in rows)
    whole = run(folder, "whole", **SETTINGS)
    check_curves(actors, whole, rel=1e-3)


@pytest.mark.slow
def test_a_kill_of_the_training_changes_nothing(folder: Path) -> None:
    """Its actors end with it, and those of the next start have the weights of the checkpoint."""
    pytest.importorskip("ray")
    placement = {"rollout": {"actors": 2, **SHARE}, "reference": {"actors": 1, **SHARE}}
    check_killed_run(folder, {**SETTINGS, "steps": 12, "placement": placement}, kills=(6,))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llm", "qwen"])
def test_rewards_and_reference_in_actors_change_nothing(folder: Path, model: str) -> None:
    pytest.importorskip("ray")
    save_tiny("qwen2_audio", folder / "qwen")
    settings = {
        **SETTINGS, "start": model, "steps": 10, "max_tokens": 330,
        "rewards": {f"{OWN}evenness": 1.0, f"{OWN}broken_for_one": 0.1},
    }  # fmt: skip
    here = run(folder, f"here-{model}", **settings)
    placement = {"reward": {"actors": 2, **SHARE}, "reference": {"actors": 2, **SHARE}}
    there = run(folder, f"there-{model}", **settings, placement=placement)
    check_same_but_reasons(here, there)
    told = [read_jsonl(out / "set_aside.jsonl") for out in (here, there)]
    assert [row["id"] for row in told[0]] == [row["id"] for row in told[1]] == ["tone1"]
    assert all("cannot judge this" in rows[0]["reason"] for rows in told)


def check_same_but_reasons(one: Path, other: Path) -> None:
    for path in [*sorted((one / "rollouts").glob("*.jsonl")), one / "model" / "model.safetensors"]:
        assert path.read_bytes() == (other / path.relative_to(one)).read_bytes(), path.name
    assert curve(one) == curve(other) and len(curve(one)) == 10


STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")


def with_actors(folder: Path, ranks: Ranks, cases: Mapping[str, Mapping[str, Any]]) -> None:
    for name, settings in cases.items():
        train_case(folder, ranks, name, "llm", **settings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "adapter"])
def test_weights_reach_the_actors_of_both_ranks(folder: Path, kind: str) -> None:
    """Each rank's actor has the policy's weights after every update, by SHA-256 of all tensors: `verify`."""
    pytest.importorskip("ray")
    placement = {"rollout": {"actors": 2, "verify": True, "bucket_mb": 0.05, **SHARE}}
    trained = LORA if kind == "adapter" else {}
    cases = {
        f"{strategy}{place}": {"strategy": strategy, **trained, **settings}
        for strategy in STRATEGIES
        for place, settings in (("", {}), ("-actors", {"placement": placement}))
    }
    on_two_ranks(partial(with_actors, cases=cases), folder)
    for strategy in STRATEGIES:
        check_curves(folder / f"{strategy}-actors", folder / strategy, rel=1e-3)


def test_what_cannot_be_placed_is_refused(folder: Path) -> None:
    def error(placement: Any, **settings: Any) -> str:
        return error_of(folder, **{"kl": KL, **settings}, placement=placement)

    assert "the critic is trained in one root module with the policy" in error({"critic": {"actors": 1}})
    assert "placement.rollout.actors: 4 actors for 3 prompts" in error({"rollout": {"actors": 4}})
    assert "placement.reward.actors: 2 actors for 1 rewards" in error({"reward": {"actors": 2}})
    assert "there is no reference" in error({"reference": {"actors": 1}}, kl=None)
    assert "address is set, but nothing is placed" in error({"address": "auto"})
    assert "must be a whole number" in error({"rollout": {"actors": 1, "gpus": 1.5}})
    assert "bucket_mb" in error({"reward": {"actors": 1, "bucket_mb": 3}})
    objective = {"name": "online_dpo", "loss": "tdpo2"}
    assert "whole distributions" in error({"reference": {"actors": 1}}, kl=None, objective=objective)
    assert "a reference that is refreshed is with the ranks" in error(
        {"reference": {"actors": 1}}, refresh_reference={}
    )
    ahead = {"ahead": 1, "correction": {"level": "token", "mode": "truncate"}}
    assert "ahead: 1 samples in a process of its own" in error({"rollout": {"actors": 1}}, **ahead)
    assert "neither `ranks` nor a share" in error({"rollout": "actors"})
    assert "no Ray cluster at" in error({"rollout": {"actors": 1}, "address": "127.0.0.1:9"})
    assert not (folder / "bad" / "train_policy" / "checkpoint").exists()
