"""Sampling ahead: whose weights sample, what a roll-back and the trials of a budget leave, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from audiollm.data.records.mixture import StepDraws
from audiollm.data.records.sample import Message, TextPart
from audiollm.errors import BadSample, StageError
from audiollm.families.dual_ffn.rollouts import DualFFNRollouts
from audiollm.families.prompts import PromptedContents
from audiollm.families.rollout import RolloutSettings
from audiollm.files.atomic import read_json, read_jsonl
from audiollm.rl.online import run as stage
from audiollm.rl.online.run import load_sampling
from audiollm.rl.online.task import PolicyTask
from audiollm.rl.rollouts.process import ProcessRollouts
from audiollm.train.loop.guard import BadStep, LeftOut
from audiollm.train.loop.task import Update
from audiollm.train.loop.whole import unmerged_tensors
from tests.audiollm.families.dual_ffn.packed_samples import load, samples, save_model
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts
from tests.audiollm.rl.online.stage_runs import error_of, run

AHEAD: dict[str, Any] = {
    "ahead": 1,
    "correction": {"level": "token", "mode": "truncate"},
    "steps": 10,
    "rewards": {f"{OWN}evenness": 1.0},
}
SETTINGS = RolloutSettings(seed=1, step=0, max_text_tokens=6)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_model(tmp_path / "llm", "features")
    write_prompts(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def no_model() -> Any:
    raise OSError("no such folder")


@dataclass(frozen=True)
class LargePrompt:
    """More than what a connection takes in before it is read."""

    id: str
    sound: torch.Tensor = field(default_factory=lambda: torch.zeros(1_000_000))


class Repeats:
    """An engine whose answers are as large as its prompts."""

    def sample(self, prompts: Any, numbers: Any, settings: Any) -> Any:
        return [[prompt] for prompt in prompts]

    def weights_changed(self) -> None: ...


def load_repeats() -> Any:
    return torch.nn.Linear(1, 1), Repeats()


def test_another_process_samples_as_this_one_does(folder: Path) -> None:
    policy = load(folder / "llm", dtype=torch.float32)
    here, prompts = DualFFNRollouts(policy.root.model, policy.template), samples("features")
    numbers = [range(2)] * len(prompts)
    engine = ProcessRollouts[Any](
        partial(load_sampling, folder / "llm", 1000),
        unmerged_tensors(policy.root.model),
        torch.get_num_threads(),
    )
    try:
        for change in (0.0, 0.3):
            with torch.no_grad():
                policy.root.model.text_lm_head.weight.mul_(1 + change)
                for name, tensor in unmerged_tensors(policy.root.model).items():
                    engine.weights[name].copy_(tensor)
            here.weights_changed()
            engine.weights_changed()
            expected = here.sample(prompts, numbers, SETTINGS)
            engine.start(prompts, numbers, SETTINGS)
            assert_equal(engine.sample(prompts, numbers, SETTINGS), expected)
        other = RolloutSettings(seed=2, step=0, max_text_tokens=6)
        engine.start(prompts, numbers, SETTINGS)  # is dropped: something else is asked for
        assert_equal(engine.sample(prompts, numbers, other), here.sample(prompts, numbers, other))
        forged = [Message(role="user", content=[TextPart(text="<|eot_id|>")])]
        with pytest.raises(BadSample, match="control token"):
            engine.sample([PromptedContents("forged", forged, [], [])], [[0]], SETTINGS)
        engine._process.kill()
        with pytest.raises(StageError, match="the process that samples ended"):
            engine.sample(prompts, numbers, SETTINGS)
    finally:
        engine.close()


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(
        [each for group in found for each in group],
        [each for group in expected for each in group],
        strict=True,
    ):
        assert (one.text, one.seed, one.truncated) == (other.text, other.seed, other.truncated)
        assert torch.equal(one.tokens.ids_N, other.tokens.ids_N)
        assert torch.equal(one.tokens.logprob_A, other.tokens.logprob_A)


def test_a_model_that_does_not_load_is_told() -> None:
    engine = ProcessRollouts[Any](no_model, {}, 1)
    try:
        with pytest.raises(StageError, match="cannot be loaded: OSError: no such folder"):
            engine.sample([], [], SETTINGS)
    finally:
        engine.close()


def test_calls_larger_than_the_connection_are_begun_without_waiting() -> None:
    """A step of ReMax asks twice before it takes an answer: for groups, and for greedy answers."""
    engine = ProcessRollouts[Any](load_repeats, unmerged_tensors(torch.nn.Linear(1, 1)), 1)
    engine.sample([LargePrompt("first")], [[0]], SETTINGS)  # waits until it is loaded
    found = []

    def work() -> None:
        prompts = [LargePrompt("a"), LargePrompt("b")]
        for prompt in prompts:
            engine.start([prompt], [[0]], SETTINGS)
        found.extend(engine.sample([prompt], [[0]], SETTINGS) for prompt in prompts)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(30)
    is_stuck = worker.is_alive()
    engine.close()
    assert not is_stuck
    assert [answer.id for ((answer,),) in found] == ["a", "b"]


class Remembers(PolicyTask):
    """Keeps the weights that each step begins with."""

    weights: ClassVar[dict[int, dict[str, torch.Tensor]]] = {}

    def batch(self, step: int, *given: Any) -> Any:
        model: Any = self.modules()["policy"].model
        Remembers.weights[step] = {name: value.clone() for name, value in model.state_dict().items()}
        return super().batch(step, *given)


def test_answers_are_those_of_the_weights_before_the_last_update(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "PolicyTask", Remembers)
    out = run(folder, "ahead", **AHEAD)
    model, engine = load_sampling(folder / "llm", 1000)
    policy = stage.load_policy(folder / "llm")
    for step, sampled_by in ((0, 0), (1, 0), (2, 1), (9, 8)):
        rows = read_jsonl(out / "rollouts" / f"{step:06d}.jsonl")
        model.load_state_dict(Remembers.weights[sampled_by])
        engine.weights_changed()
        prompts = stage_prompts(folder, policy, step)
        settings = RolloutSettings(1, step, 1.0, "text", 12, 250)
        found = engine.sample([each.prompted for each in prompts], [range(4)] * len(prompts), settings)
        answers = [each for group in found for each in group]
        assert [each.text for each in answers] == [row["answer"] for row in rows], step
        for each, row in zip(answers, rows, strict=True):
            assert each.tokens.logprob_A is not None
            assert row["behaviour"] == pytest.approx(each.tokens.logprob_A.tolist(), abs=1e-4), step
    figures = [row for row in read_jsonl(out / "metrics.jsonl") if "mismatch_kl" in row]
    assert figures[0]["mismatch_kl"] < 1e-6 < max(row["mismatch_kl"] for row in figures)
    assert all(row["ratio"] == 1.0 for row in figures)
    alarms = out / "alarms.jsonl"
    assert "mismatch" not in ({row["kind"] for row in read_jsonl(alarms)} if alarms.exists() else set())


def stage_prompts(folder: Path, policy: Any, step: int) -> Any:
    from audiollm.data.records.opening import open_source
    from audiollm.files.set_aside import SetAside

    aside = SetAside(folder / "aside.jsonl", "test", strict=True)
    return stage.PromptMaker(policy, [open_source(folder / "prompts.jsonl")], StepDraws(3, 1), aside)(step)[0]


class FailsOnce(PolicyTask):
    """Step 5 has a loss that is not finite, the first time."""

    failed = False

    def _updates(self, batch: Any, step: int) -> Iterator[Update]:
        for update in super()._updates(batch, step):
            if step == 5 and not FailsOnce.failed:
                FailsOnce.failed = True
                update = update._replace(loss=[torch.nan * each for each in update.loss], figures={})
            yield update


@pytest.mark.parametrize("checkpoint_seconds", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_roll_back_samples_again_what_was_sampled_ahead(
    folder: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_seconds: int
) -> None:
    """Back to the step before, whose sampling weights the checkpoint has, and to the very start."""
    monkeypatch.setattr(stage, "PolicyTask", FailsOnce)
    monkeypatch.setattr(FailsOnce, "failed", False)
    settings = {**AHEAD, "rollbacks": 1, "checkpoint_seconds": checkpoint_seconds}
    found = run(folder, "found", **settings)
    assert FailsOnce.failed
    (left_out,) = read_jsonl(found / "left_out.jsonl")
    bad = BadStep(**left_out)
    monkeypatch.setattr(LeftOut, "steps", lambda _: {bad.step: bad})
    expected = run(folder, "expected", **settings)
    for step in (*range(5), *range(6, 10)):
        name = f"rollouts/{step:06d}.jsonl"
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    for name in ("model/model.safetensors", "checkpoint/modules.safetensors"):
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.slow
def test_the_trials_of_a_budget_leave_no_trace(folder: Path) -> None:
    settings = {**AHEAD, "batch_size": 2, "group_size": 2, "max_answer_tokens": 4, "refresh_reference": {"every": 2},
                "kl": {}}  # fmt: skip
    del settings["steps"]
    out = run(folder, "trials", steps=None, cpu_minutes=0.0001, warmup_steps=5, **settings)
    assert read_json(out / "budget.json")["steps"] == 10
    expected = run(folder, "given", steps=10, warmup_steps=5, **settings)
    for name in (
        "model/model.safetensors",
        "checkpoint/modules.safetensors",
        "metrics.jsonl",
        "rollouts/000003.jsonl",
    ):
        assert (out / name).read_bytes() == (expected / name).read_bytes(), name


def test_sampling_ahead_needs_importance_weights(folder: Path) -> None:
    assert "set correction" in error_of(folder, ahead=1)
    assert "input should be 0 or 1" in error_of(folder, ahead=2)
    out = run(folder, ahead=1, objective="online_dpo", steps=10)  # pairs of any policy's answers
    assert len(list((out / "rollouts").glob("*.jsonl"))) == 10
