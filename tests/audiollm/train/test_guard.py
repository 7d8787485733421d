"""The guard: what it calls bad, and a run that goes back and ends as if the bad step had never been tried."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_loop import CPU, Killed, Regression, config, context_of, run
from torch import Tensor, nn

from audiollm.errors import ConfigError, StageError
from audiollm.files.atomic import read_json, read_jsonl
from audiollm.train.loop import monitor
from audiollm.train.loop.boards import open_boards
from audiollm.train.loop.guard import LOSS_EMA_DECAY, SETTLE_STEPS, Guard, LeftOut, RunningLoss
from audiollm.train.loop.loop import Update, step_generator, train
from audiollm.train.loop.monitor import Monitor, Speed
from audiollm.train.settings import ParameterRule

BAD = 23


class Faulty(Regression):
    """The data of some steps spoils the loss; `left_out` shows what is expected: the step without an update."""

    def __init__(self, bad: dict[int, float], kill_at: int = -1) -> None:
        super().__init__(kill_at)
        self.bad, self.tried = bad, 0

    def updates(self, batch: Tensor, step: int, steps: int) -> Iterator[Update]:
        self.tried += 1
        for update in super().updates(batch, step, steps):
            yield update._replace(loss=update.loss * self.bad.get(step, 1.0))


def expected(left_out: set[int]) -> dict[str, Tensor]:
    """The weights without those steps, by a loop in plain torch."""
    task, values = Regression(), config(steps=100)
    adam = torch.optim.AdamW(
        task.model.parameters(), lr=0.01, betas=values.betas, fused=True, weight_decay=0.0
    )
    matrices = [p for p in task.model.parameters() if p.ndim >= 2]
    for step in set(range(100)) - left_out:
        done = min(1.0, max(0.0, (step - 5) / 95))
        rate = (step + 1) / 5 if step < 5 else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))
        adam.param_groups[0]["lr"] = 0.01 * rate
        torch.manual_seed(step_generator(1, step, "dropout").initial_seed())
        batch = task.batch(step, step_generator(1, step, "batch"))
        adam.zero_grad()
        next(task.updates(batch, step, 100)).loss.backward()
        nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        with torch.no_grad():
            for matrix in matrices:
                matrix.mul_(1 - 0.01 * rate * values.weight_decay)
        adam.step()
    return task.model.state_dict()


@pytest.mark.parametrize("saves", [0.0, 1e9])
def test_a_bad_step_is_left_out_wherever_the_checkpoints_are(tmp_path: Path, saves: float) -> None:
    task = Faulty({BAD: float("nan"), 77: 1e6})
    values: dict[str, Any] = {"steps": 100, "checkpoint_seconds": saves, "log_every": 10, "ema_decay": 0.0}
    made = run(tmp_path / "run", task, spike_deviations=30.0, **values)
    for key, value in expected({BAD, 77}).items():
        torch.testing.assert_close(made[key], value, rtol=1e-5, atol=1e-6)
    rows = read_jsonl(tmp_path / "run" / "left_out.jsonl")
    assert [(row["step"], row["kind"]) for row in rows] == [(BAD + 1, "not finite"), (78, "loss spike")]
    assert {row["kind"] for row in read_jsonl(tmp_path / "run" / "alarms.jsonl")} == {
        "not finite",
        "loss spike",
    }
    written = [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert written == list(range(9, 100, 10))
    assert (task.tried > 100) == (saves > 0), "steps are repeated from the last checkpoint on"


def test_a_killed_run_leaves_out_the_same_steps(tmp_path: Path) -> None:
    values: dict[str, Any] = {"steps": 100, "spike_deviations": 30.0}
    bad = {BAD: float("inf"), 77: 1e6}
    whole = run(tmp_path / "whole", Faulty(bad), **values)
    for kill_at in (BAD + 1, 60, 78):
        with pytest.raises(Killed):
            run(tmp_path / "killed", Faulty(bad, kill_at), **values)
    resumed = run(tmp_path / "killed", Faulty(bad), **values)
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    for name in ("metrics", "left_out", "alarms"):
        once, twice = (read_jsonl(tmp_path / f / f"{name}.jsonl") for f in ("whole", "killed"))
        assert once == twice, name


def test_too_many_bad_steps_stop_the_run(tmp_path: Path) -> None:
    bad = dict.fromkeys(range(20, 40), float("nan"))
    with pytest.raises(
        StageError, match=r"loss is nan at step 23 .*2 steps were left out before.*\n.*learning rate"
    ):
        run(tmp_path / "run", Faulty(bad), rollbacks=2)
    state = read_json(tmp_path / "run" / "checkpoint" / "state.json")
    assert state["step"] == 22 and len(read_jsonl(tmp_path / "run" / "left_out.jsonl")) == 2


def test_running_loss_is_an_exponential_mean_and_variance() -> None:
    losses = np.random.default_rng(0).normal(3.0, 0.5, 400)
    running = RunningLoss()
    for loss in losses:
        running.add(float(loss))
    weights = LOSS_EMA_DECAY ** np.arange(400)[::-1]
    mean = (weights * losses).sum() / weights.sum()
    assert running.mean == pytest.approx(mean, rel=1e-2)
    assert math.sqrt(running.variance) == pytest.approx(0.5, rel=0.2)
    assert running.deviations(running.mean + 4 * math.sqrt(running.variance)) == pytest.approx(4.0)


def test_a_spike_is_one_only_after_the_run_has_settled_and_is_not_learned_from() -> None:
    guard = Guard(6.0)
    noise = np.random.default_rng(1).normal(2.0, 0.1, 200)
    guard.add(1, {"loss": 5.0})  # an untrained model's
    for step in range(2, SETTLE_STEPS + 150):
        guard.add(step, {"loss": float(noise[step - 2]), "gradient_norm": torch.tensor(1.0)})
    assert guard.check() is None
    before = guard.state()
    guard.add(300, {"loss": 4.0})
    bad = guard.check()
    assert bad is not None and bad.step == 300 and bad.kind == "loss spike" and guard.state() == before
    other = Guard(6.0)
    other.restore(before)
    other.add(300, {"loss": torch.tensor(4.0)})
    assert other.check() == bad
    calm = Guard(0.0)
    calm.restore(before)
    calm.add(300, {"loss": 4.0})
    assert calm.check() is None


def test_left_out_steps_are_kept_in_a_file(tmp_path: Path) -> None:
    kept = LeftOut(tmp_path / "left_out.jsonl")
    assert kept.steps() == {}
    guard = Guard(0.0)
    guard.add(5, {"loss": 1.0, "gradient_norm/critic": float("inf")})
    bad = guard.check()
    assert bad is not None and bad.text.startswith("the gradient norm of the critic is inf at step 5")
    kept.add(bad)
    assert LeftOut(tmp_path / "left_out.jsonl").steps() == {5: bad}


# -------------------------------------------------------------------------------- other options of the loop


class Parts(Regression):
    """The same loss in one part or in several."""

    def __init__(self, parts: int, told: int | None = None) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        self.parts, self.told = parts, told or parts

    def updates(self, batch: Tensor, step: int, steps: int) -> Iterator[Update]:
        figures: dict[str, float] = {"tokens": 8.0, "flops": 1e6}

        def losses() -> Iterator[Tensor]:
            for part in batch.double().chunk(self.parts):
                figures["seen"] = figures.get("seen", 0.0) + len(part)
                yield (self.model(part)[:, 0] - part.sum(dim=1)).square().sum() / len(batch)

        yield Update(losses(), figures, losses=self.told)

    def evaluate(self, step: int) -> dict[str, float]:
        return {"ones": self.model(torch.ones(1, 4, dtype=torch.float64)).item()}


def test_a_loss_in_parts_is_the_loss(tmp_path: Path) -> None:
    torch.manual_seed(3)
    once, parts = (run_seeded(tmp_path / str(n), Parts(n)) for n in (1, 4))
    for key, value in once.items():
        torch.testing.assert_close(parts[key], value, rtol=0, atol=1e-9)
    rows = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("1", "4")]
    assert [row["loss"] for row in rows[1] if "loss" in row] == pytest.approx(
        [row["loss"] for row in rows[0] if "loss" in row], rel=1e-5
    )
    assert rows[1][0]["seen"] == 8 and "tokens" not in rows[1][0]
    (row, *_) = read_jsonl(tmp_path / "4" / "performance.jsonl")
    assert row["tokens_per_second"] > 0 and row["memory_mb"] > 50 and "mfu" not in row
    assert read_json(tmp_path / "4" / "checkpoint" / "state.json")["tokens"] == 8 * 40
    for told in (3, 5):
        with pytest.raises(ValueError, match=rf"has {told} losses and gives (more|4)"):
            run_seeded(tmp_path / f"told{told}", Parts(4, told))


def begin_seeded(task: Parts) -> None:
    torch.manual_seed(5)
    for parameter in task.model.parameters():
        nn.init.normal_(parameter, std=0.1)


def run_seeded(folder: Path, task: Parts, **changes: object) -> dict[str, Tensor]:
    begin_seeded(task)
    return run(folder, task, **changes)


def test_rules_freeze_and_slow_down_by_name(tmp_path: Path) -> None:
    task = Parts(1)
    torch.manual_seed(5)
    before = {key: value.clone() for key, value in task.model.state_dict().items()}
    rules = (ParameterRule("model.0.*", frozen=True), ParameterRule("model.2.weight", rate_factor=1e-3))
    made = run(tmp_path / "run", task, rules=rules, weight_decay=0.0, ema_decay=0.0)
    assert torch.equal(made["0.weight"], before["0.weight"])
    moved = {key: float((made[key] - before[key]).abs().max()) for key in ("2.weight", "2.bias")}
    assert 0 < moved["2.weight"] < 40 * 0.01 * 1e-3 * 1.1 < moved["2.bias"]  # Adam moves by the rate at most


def test_the_best_weights_end_the_run(tmp_path: Path) -> None:
    for best_is, pick in (("lower", min), ("higher", max)):
        folder = tmp_path / best_is
        task = Parts(1)
        begin_seeded(task)
        start = task.evaluate(0)["ones"]
        run(folder, task, best="ones", best_is=best_is, evaluate_every=5)
        rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "evaluation/ones" in row]
        values = {0: start, **{row["step"] + 1: row["evaluation/ones"] for row in rows}}
        state = read_json(folder / "best" / "state.json")
        assert state["step"] == pick(values, key=lambda step: values[step])
        assert state["figures"] == {"ones": state["value"]}
        assert task.evaluate(0)["ones"] == pytest.approx(state["value"], abs=1e-12)
    unborn = Parts(1)
    unborn.kill_at = 0
    with pytest.raises(StageError, match=r"best is 'accuracy'; an evaluation gives \['ones'\]") as caught:
        run_seeded(tmp_path / "wrong", unborn, best="accuracy")  # before the first step
    assert caught.value.exit_code == 2
    with pytest.raises(ValueError, match="evaluate_every and evaluations are 0"):
        config(best="ones", evaluate_every=0)


class Stops(Parts):
    """Asks for the end at the evaluation of a step."""

    def __init__(self, stop_at: int) -> None:
        super().__init__(1)
        self.stop_at = stop_at

    def stop_reason(self, step: int) -> str | None:
        return "enough" if step >= self.stop_at else None


def test_a_task_can_end_the_run_with_its_best_weights(tmp_path: Path) -> None:
    """The run ends after the evaluation, saves, and says why; run again, it comes to the same end at once."""
    for attempt in range(2):
        task = Stops(10)
        begin_seeded(task)
        settings = config(best="ones", best_is="higher", evaluate_every=5, checkpoint_seconds=1e6)
        figures = train(task, settings, tmp_path / "stops", context_of(tmp_path / "stops"), CPU)
        assert (
            figures["steps"] == 10 and figures["stopped"] == "enough" and figures["best_step"] in (0, 5, 10)
        )
        assert read_json(tmp_path / "stops" / "checkpoint" / "state.json")["step"] == 10, attempt
    (alarm,) = read_jsonl(tmp_path / "stops" / "alarms.jsonl")
    assert alarm["kind"] == "stopped" and alarm["text"] == "enough; stopped at step 10 of 40"
    with pytest.raises(StageError, match=r"enough; stopped at step 10 of 40\n.*keep_best"):
        run(tmp_path / "without", Stops(10), evaluate_every=5)


def test_fp16_scales_its_losses_and_lets_overflows_pass(tmp_path: Path) -> None:
    """The scale begins at 65,536, with which these gradients overflow fp16 at first; the scaler is in checkpoints."""

    class Steep(Regression):
        def updates(self, batch: Tensor, step: int, steps: int) -> Iterator[Update]:
            for update in super().updates(batch, step, steps):
                yield update._replace(loss=update.loss * 30.0)

    whole = run(tmp_path / "whole", Steep(), precision="fp16", log_every=1)
    rows = [row for row in read_jsonl(tmp_path / "whole" / "metrics.jsonl") if "loss" in row]
    overflows = [row for row in rows if "gradient_norm" not in row]
    assert overflows and len(overflows) < 20 and rows[-1]["loss_scale"] < 65_536
    assert rows[-1]["error"] < rows[0]["error"]
    with pytest.raises(Killed):
        run(tmp_path / "killed", Steep(kill_at=3), precision="fp16", log_every=1)
    resumed = run(tmp_path / "killed", Steep(), precision="fp16", log_every=1)
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_a_compiled_run_learns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backend that counts the graphs in place of the C++ compiler, which takes long."""
    graphs: list[object] = []

    def counting(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    compiles = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiles(self, backend=counting))
    plain = run_seeded(tmp_path / "plain", Parts(1))
    compiled = run_seeded(tmp_path / "compiled", Parts(1), compile=True)
    assert graphs
    for key, value in plain.items():
        torch.testing.assert_close(compiled[key], value, rtol=0, atol=1e-9)


def test_weights_and_biases_gets_what_tensorboard_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb, which is not installed"):
        Monitor(tmp_path, report_to=("wandb",))
    calls: list[tuple[Any, ...]] = []
    fake = SimpleNamespace(
        log=lambda values, step: calls.append((step, values)),
        alert=lambda title, text: calls.append((title, text)),
        finish=lambda: calls.append(("finish",)),
    )
    module = SimpleNamespace(
        init=lambda **named: calls.append(("init", named)) or fake,
        Table=lambda columns, data: (columns, data),
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    written = Monitor(tmp_path, report_to=("wandb",))
    written.write(3, {"loss": 1.5})
    written.performance(3, {"tokens_per_second": 9.0})
    written.alarm(3, "collapse", "few codes")
    for board in written.boards:
        board.table(3, "answers", ("id", "answer"), [("a", "yes")])
    written.close()
    (_, given), *calls = calls
    assert given["name"] == f"{tmp_path.parent.name}-{tmp_path.name}" and given["resume"] == "allow"
    assert calls == [
        (3, {"loss": 1.5}),
        (3, {"performance/tokens_per_second": 9.0}),
        ("alarm/collapse", "few codes"),
        (3, {"answers": (["id", "answer"], [["a", "yes"]])}),
        ("finish",),
    ]
    calls.clear()
    for folder in (
        tmp_path,
        tmp_path / "afresh",
    ):  # a resumed stage goes on with its run, another has its own
        folder.mkdir(exist_ok=True)
        Monitor(folder, report_to=("wandb",)).close()
    resumed, afresh = (row[1]["id"] for row in calls if row[0] == "init")
    assert resumed == given["id"] != afresh and len(afresh) >= 8


def test_a_table_on_tensorboard_is_one_of_markdown(tmp_path: Path) -> None:
    (board,) = open_boards(("tensorboard",), tmp_path)
    board.table(3, "answers", ("id", "answer"), [("a", "one\ntwo | three")])
    board.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("answers/text_summary")
    (text,) = event.tensor_proto.string_val
    assert text.decode() == "| id | answer |\n| --- | --- |\n| a | one two \\| three |"


def test_a_board_without_a_method_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_board.py").write_text("class Figures:\n    scalars = text = audio = close = None\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="has no method table"):
        open_boards(("own_board:Figures",), tmp_path)


def test_speed_adds_up_ranks_and_knows_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda which: "NVIDIA H100 80GB HBM3")
    speed = Speed(device, devices=2)  # type: ignore[arg-type]
    rows = [
        {"seconds": 2.0, "steps": 4, "tokens": 100.0, "flops": 989e12, "memory_mb": 5.0},
        {"seconds": 1.9, "steps": 4, "tokens": 300.0, "flops": 989e12, "memory_mb": 7.0},
    ]
    assert speed.figures(rows) == {
        "seconds_per_step": 0.5, "tokens_per_second": 200.0, "mfu": 0.5, "memory_mb": 7.0,
    }  # fmt: skip


def test_speed_is_that_of_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: now[0]))
    speed = Speed(CPU, devices=1)
    for _ in range(4):
        now[0] += 0.5
        speed.add(100.0, 0.0, {"seconds/rollout": 0.3, "seconds/update": 0.1})
        with speed.paused():
            now[0] += 60.0
    own = speed.take_rank_figures()
    figures = speed.figures(
        [own, {**own, "seconds/rollout": 1.6}]
    )  # the slower rank is the one that is waited for
    assert figures["tokens_per_second"] == pytest.approx(400.0)
    assert (figures["seconds/rollout"], figures["seconds/update"]) == (pytest.approx(0.4), pytest.approx(0.1))
    assert "seconds/rollout" not in speed.take_rank_figures()
    assert speed.paused_seconds == pytest.approx(240.0)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", Regression())
    with pytest.raises(StageError, match=r"belongs to another model: model\.2\..* is in one of them alone"):
        other = Regression()
        other.model = nn.Sequential(nn.Linear(4, 1))
        train(other, config(), tmp_path / "run", context_of(tmp_path / "run"), CPU)
