"""The training loop: a killed run ends with the weights of an uninterrupted one; budgets; gradients of the schedule."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn

from audiollm.errors import StageError
from audiollm.files.atomic import read_json, read_jsonl
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from audiollm.train.loop import loop as loop_module
from audiollm.train.loop.budget import StepCost, steps_of_budget
from audiollm.train.loop.loop import LoopConfig, Update, train
from audiollm.train.settings import ParameterRule

CPU = torch.device("cpu")


class Killed(Exception):
    pass


class Regression:
    """A small network with dropout and random batches: everything that a resume must get right."""

    def __init__(self, kill_at: int = -1, poison_at: int = -1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 1))
        self.kill_at, self.poison_at = kill_at, poison_at

    def modules(self) -> dict[str, nn.Module]:
        return {"model": self.model}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        pass

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> Tensor:
        if step == self.kill_at:
            raise Killed
        return torch.randn(8, 4, generator=generator)

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["model"]}

    def updates(self, batch: Tensor, step: int, steps: int) -> Iterator[Update]:
        error = (self.model(batch)[:, 0] - batch.sum(dim=1)).square().mean()
        yield Update(error * float("nan") if step == self.poison_at else error, {"error": error.detach()})

    def evaluate(self, step: int) -> Mapping[str, float]:
        return {"ones": self.model(torch.ones(1, 4)).item()}

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        return {}


def context_of(folder: Path) -> Context:
    recipe = Recipe("test", Path("test.yaml"), "tiny", 0, folder, (), {})
    return Context(folder, recipe, Console(quiet=True), {})


def config(**changes: object) -> LoopConfig:
    values: dict[str, object] = {
        "seed": 1, "steps": 40, "minutes": None, "learning_rate": 0.01, "warmup_steps": 5, "ema_decay": 0.9,
        "log_every": 5, "evaluate_every": 10, "checkpoint_seconds": 0.0, "precision": "fp32", "report_to": (),
    }  # fmt: skip
    return LoopConfig(**{**values, **changes})  # type: ignore[arg-type]


def run(folder: Path, task: Regression, **changes: object) -> dict[str, Tensor]:
    folder.mkdir(exist_ok=True)
    train(task, config(**changes), folder, context_of(folder), CPU)
    return {key: value.clone() for key, value in task.model.state_dict().items()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_killed_at_any_step_it_ends_with_the_same_weights_and_log(
    tmp_path: Path, optimizer: Literal["adamw", "muon"]
) -> None:
    rules = (ParameterRule("model.*.weight", optimizer=optimizer),)
    whole = run(tmp_path / "whole", Regression(), rules=rules)
    for kill_at in (0, 1, 17, 39):
        folder = tmp_path / f"killed{kill_at}"
        with pytest.raises(Killed):
            run(folder, Regression(kill_at), rules=rules)
        resumed = run(folder, Regression(), rules=rules)
        for key, value in whole.items():
            assert torch.equal(value, resumed[key]), (kill_at, key)
        assert read_jsonl(folder / "metrics.jsonl") == read_jsonl(tmp_path / "whole" / "metrics.jsonl")


def test_it_learns(tmp_path: Path) -> None:
    run(tmp_path / "run", Regression(), steps=300, checkpoint_seconds=60.0)
    errors = [row["error"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "error" in row]
    assert errors[-1] < 0.3 * errors[0]


def test_a_log_says_how_a_training_goes_even_where_a_step_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Regression):
        def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> Tensor:
            time.sleep(0.3)
            return super().batch(step, generator, ranks)

    monkeypatch.setattr("audiollm.progress.LINE_SECONDS", 0.2)
    log = io.StringIO()
    context = replace(context_of(tmp_path), console=Console(file=log, width=80))
    settings = config(steps=4, warmup_steps=1, log_every=100, evaluate_every=100)
    train(Slow(), settings, tmp_path, context, CPU)
    lines = [line for line in log.getvalue().splitlines() if "of 4 steps" in line]
    assert len(lines) > 3 and lines[0].startswith("  training: 0 of 4 steps, 0 s so far")
    assert re.fullmatch(
        r"  training: [1-4] of 4 steps, loss [\d.e+-]+, [\d.]+ .*per s.*, \d+ s left", lines[-1]
    )


def test_a_checkpoint_cut_short_is_not_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        run(folder, Regression(kill_at=20))
    (folder / "checkpoint.new").mkdir()
    (folder / "checkpoint.new" / "modules.safetensors").write_bytes(b"torn")
    whole, resumed = run(tmp_path / "whole", Regression()), run(folder, Regression())
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_killed_between_the_two_renames(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        run(folder, Regression(kill_at=20))
    (folder / "checkpoint").rename(folder / "checkpoint.old")
    resumed = run(folder, task := Regression())
    whole = run(tmp_path / "whole", Regression())
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert task.model.training is False


def test_minutes_become_steps_once_and_leave_no_trace(tmp_path: Path) -> None:
    task = Regression()
    run(tmp_path / "run", task, steps=None, minutes=0.002, warmup_steps=2)
    budget = read_json(tmp_path / "run" / "budget.json")
    fixed = run(tmp_path / "fixed", Regression(), steps=budget["steps"], warmup_steps=2)
    assert all(torch.equal(value, fixed[key]) for key, value in task.model.state_dict().items())


def test_a_budget_is_divided_by_what_a_step_costs_and_measured_once(tmp_path: Path) -> None:
    for budget, wanted in (({"minutes": 3.0}, 360), ({"cpu_minutes": 3.0, "minutes": None}, 90)):
        folder = tmp_path / next(iter(budget))
        folder.mkdir()
        costs = iter([StepCost(seconds=0.5, cpu_seconds=2.0)])
        of_budget = config(steps=None, **budget)
        for _ in range(2):
            steps = steps_of_budget(of_budget, folder, context_of(folder), lambda costs=costs: next(costs))
            assert steps == wanted == read_json(folder / "budget.json")["steps"]


@pytest.mark.parametrize("changes", [{}, {"best": "ones"}, {"evaluate_every": 0}, {"ema_decay": 0.0}])
def test_it_tells_how_good_the_weights_are_that_it_ends_with(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    """A run that was killed after its last step is resumed, too."""
    task, folder = Regression(), tmp_path / "run"
    folder.mkdir()
    task.model.eval()
    start = task.evaluate(0)["ones"]
    figures = train(task, config(**changes), folder, context_of(folder), CPU)
    assert figures["ones"] == task.evaluate(0)["ones"] and figures["steps"] == 40
    rows = [
        row["evaluation/ones"] for row in read_jsonl(folder / "metrics.jsonl") if "evaluation/ones" in row
    ]
    candidates = [*rows, start] if "best" in changes else rows  # the best may be those that it began from
    assert any(figures["ones"] == pytest.approx(value, rel=1e-5) for value in candidates)
    assert len(rows) == (4 if changes.get("evaluate_every", 10) else 1)
    again = train(Regression(kill_at=0), config(**changes), folder, context_of(folder), CPU)
    assert again == figures


def test_an_evaluation_without_figures_is_no_row(tmp_path: Path) -> None:
    task = Regression()
    task.evaluate = lambda step: {}  # type: ignore[method-assign]
    run(tmp_path / "run", task)
    assert all("loss" in row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl"))


@given(steps=st.integers(1, 300), evaluations=st.integers(1, 40))
def test_evaluations_are_even_and_the_last_step_has_one(steps: int, evaluations: int) -> None:
    loop = config(steps=steps, evaluate_every=0, evaluations=evaluations)
    at = [step for step in range(1, steps + 1) if loop.is_evaluated(step, steps)]
    gaps = {after - before for before, after in pairwise([0, *at])}
    assert len(at) == min(evaluations, steps) and at[-1] == steps
    assert max(gaps) - min(gaps) <= 1
    with pytest.raises(ValueError, match="one of evaluate_every and evaluations"):
        config(evaluate_every=3, evaluations=3)


def test_a_default_warm_up_is_a_tenth_at_most_and_one_that_was_set_must_fit(tmp_path: Path) -> None:
    default = config(warmup_steps=None, default_warmup_steps=50)
    assert [default.warmup(steps) for steps in (5, 40, 400, 4000)] == [1, 4, 40, 50]
    run(tmp_path / "default", Regression(), warmup_steps=None, log_every=1, report_to=())
    rates = [
        row["learning_rate"] for row in read_jsonl(tmp_path / "default" / "metrics.jsonl") if "loss" in row
    ]
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01]) and max(rates) == 0.01
    with pytest.raises(StageError, match="warmup_steps is 40, and the run has 40 steps") as caught:
        run(tmp_path / "long", Regression(), warmup_steps=40)
    assert caught.value.exit_code == 2


def test_what_the_settings_ask_for_in_vain_is_told_without_a_traceback(tmp_path: Path) -> None:
    for changes, message in (
        ({"rules": (ParameterRule("adio.*"),)}, "no parameter is named like"),
        ({"activation_checkpointing": True}, "no module of this task offers"),
    ):
        with pytest.raises(StageError, match=message) as caught:
            run(tmp_path / "run", Regression(kill_at=0), **changes)
        assert caught.value.exit_code == 2


def test_checkpoints_wait_twenty_times_as_long_as_one_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes a second on this clock and a checkpoint 4: one in 80 steps, and the first, and the last."""
    now, saved = [0.0], list[float]()

    def slow(*given: object) -> None:
        now[0] += 4.0
        saved.append(now[0])

    class Ticking(Regression):
        def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> Tensor:
            now[0] += 1.0
            return super().batch(step, generator, ranks)

    clock = SimpleNamespace(monotonic=lambda: now[0], process_time=lambda: now[0])
    monkeypatch.setattr(loop_module, "time", clock)
    monkeypatch.setattr(loop_module, "save_checkpoint", slow)
    run(tmp_path / "run", Ticking(), steps=200, checkpoint_seconds=10.0, report_to=())
    assert [after - before - 4.0 for before, after in pairwise(saved)] == [81.0, 81.0, 38.0]


def test_a_loss_that_is_not_finite_stops_the_stage(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="loss is nan at step 20"):
        run(tmp_path / "run", Regression(poison_at=19), rollbacks=0)


def test_a_task_that_meets_a_gradient_that_is_not_finite_ends_with_an_alarm(tmp_path: Path) -> None:
    task, folder = Regression(), tmp_path / "run"
    folder.mkdir()
    updates = task.updates

    def failing(batch: Tensor, step: int, steps: int) -> Iterator[Update]:
        if step == 3:
            raise FloatingPointError("the gradient of 'mel' is not finite")
        yield from updates(batch, step, steps)

    task.updates = failing  # type: ignore[method-assign]
    loop = LoopConfig(seed=1, steps=10, minutes=None, learning_rate=0.01, checkpoint_seconds=0.0, rollbacks=0)
    with pytest.raises(StageError, match="'mel' is not finite"):
        train(task, loop, folder, context_of(folder), CPU)
    (row,) = read_jsonl(folder / "alarms.jsonl")
    assert row["kind"] == "not finite" and row["step"] == 3
