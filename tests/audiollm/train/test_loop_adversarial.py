"""Several optimizers in the loop, against a GAN loop in plain torch; alarms; what a budget in minutes becomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn

from audiollm.errors import StageError
from audiollm.files.atomic import read_json, read_jsonl
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from audiollm.train.loop import budget, loop
from audiollm.train.loop.loop import LoopConfig, Update, step_generator, train
from audiollm.train.settings import TrainingConfig

CPU = torch.device("cpu")
STEPS = 20


class Killed(Exception):
    pass


class Generator(nn.Module):
    """Frozen parameters and both kinds of buffers beside what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, noise: Tensor) -> Tensor:
        return self.layers(self.frozen(noise))


class GAN:
    """A hinge GAN on a Gaussian; the adversary begins at a step of its own. It watches what the loop does."""

    def __init__(self, begin: int = 0, kill_at: int = -1, poison_at: int = -1, steep_at: int = -1) -> None:
        torch.manual_seed(0)
        self.generator = Generator()
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        self.begin, self.kill_at, self.poison_at, self.steep_at = begin, kill_at, poison_at, steep_at
        self.told: Mapping[str, str] = {}
        self.moved: list[tuple[str, bool, bool]] = []
        self.stray_gradients = 0

    def modules(self) -> dict[str, nn.Module]:
        return {"generator": self.generator, "discriminator": self.discriminator}

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["generator"], "discriminator": ["discriminator"]}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        pass

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> Tensor:
        if step == self.kill_at:
            raise Killed
        return torch.randn(16, 5, generator=generator)

    def updates(self, batch: Tensor, step: int, steps: int) -> Iterator[Update]:
        noise, real = batch.split((2, 3), dim=1)
        self.generator.calls += 1
        self.discriminator.zero_grad(set_to_none=True)
        fake = self.generator(noise)
        before = self._weights()
        loss = fake.square().mean()
        yield Update(loss - self.discriminator(fake).mean() if step >= self.begin else loss, {"size": loss})
        self.stray_gradients += sum(p.grad is not None for p in self.discriminator.parameters())
        before = self._watch("main", before)
        if step < self.begin:
            return
        with torch.no_grad():
            fake = self.generator(noise)
        loss = discriminator_loss(self.discriminator, real, fake)
        if step == self.poison_at:
            loss = loss * float("nan")
        if step == self.steep_at:  # the loss stays finite, its gradient does not
            loss = loss + (0 * self.discriminator[0].weight).sum().sqrt()
        yield Update(loss, {"margin": loss.detach()}, "discriminator")
        self._watch("discriminator", before)

    def evaluate(self, step: int) -> Mapping[str, float]:
        return {"ones": float(self.generator(torch.ones(1, 2)).sum())}

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        return self.told if "loss" in figures else {}

    def _weights(self) -> list[Tensor]:
        return [p.detach().clone() for module in self.modules().values() for p in module.parameters()]

    def _watch(self, update: str, before: list[Tensor]) -> list[Tensor]:
        after, own = self._weights(), len(list(self.generator.parameters()))
        differs = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        self.moved.append((update, any(differs[:own]), any(differs[own:])))
        return after


def discriminator_loss(discriminator: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    return (1 - discriminator(real)).relu().mean() + (1 + discriminator(fake)).relu().mean()


def context_of(folder: Path) -> Context:
    recipe = Recipe("test", Path("test.yaml"), "tiny", 0, folder, (), {})
    return Context(folder, recipe, Console(record=True, quiet=False, width=200), {})


def config(**changes: object) -> LoopConfig:
    values: dict[str, object] = {
        "seed": 1, "steps": STEPS, "minutes": None, "learning_rate": 0.01, "warmup_steps": 5, "ema_decay": 0.9,
        "log_every": 5, "evaluate_every": 10, "checkpoint_seconds": 0.0, "precision": "fp32",
        "rate_factors": {"discriminator": 0.5},
    }  # fmt: skip
    return LoopConfig(**{**values, **changes})  # type: ignore[arg-type]


def run(folder: Path, task: GAN, **changes: object) -> Context:
    folder.mkdir(exist_ok=True)
    context = context_of(folder)
    train(task, config(**changes), folder, context, CPU)
    return context


def state_of(task: GAN) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.clone()
        for name, module in task.modules().items()
        for key, value in module.state_dict().items()
    }


def test_an_update_moves_its_own_modules_alone(tmp_path: Path) -> None:
    task = GAN(begin=4)
    run(tmp_path / "run", task)
    assert task.moved[:4] == [("main", True, False)] * 4
    assert task.moved[4:] == [("main", True, False), ("discriminator", False, True)] * (STEPS - 4)
    assert task.stray_gradients == 0, "the generator's step computes the discriminator's weight gradients"
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    names = {"loss", "size", "gradient_norm", "loss/discriminator", "margin", "gradient_norm/discriminator"}
    assert names <= set(rows[-1])


class TwoUpdates(GAN):
    """Two updates of the same optimizer in each step."""

    def modules(self) -> dict[str, nn.Module]:
        return {"generator": self.generator}

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["generator"]}

    def losses(self, batch: Tensor) -> Iterator[Tensor]:
        for scale in (1.0, -0.5):
            yield scale * self.generator(batch[:, :2]).square().mean()

    def updates(self, batch: Tensor, step: int, steps: int) -> Iterator[Update]:
        for loss in self.losses(batch):
            yield Update(loss, {})


def test_gradients_of_an_update_are_not_added_to_those_of_the_next(tmp_path: Path) -> None:
    task, plain = TwoUpdates(), TwoUpdates()
    changes = {"warmup_steps": STEPS - 1, "rate_factors": {}}
    run(tmp_path / "run", task, ema_decay=0.0, weight_decay=0.0, clip_norm=0.5, **changes)
    trained = list(plain.generator.layers.parameters())
    adam = torch.optim.Adam(trained, betas=(0.9, 0.98))
    for step in range(STEPS):
        adam.param_groups[0]["lr"] = 0.01 * min(1.0, (step + 1) / (STEPS - 1))
        torch.manual_seed(step_generator(1, step, "dropout").initial_seed())
        for loss in plain.losses(plain.batch(step, step_generator(1, step, "batch"))):
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 0.5)
            adam.step()
    for key, value in state_of(plain).items():
        torch.testing.assert_close(state_of(task)[key], value, rtol=1e-5, atol=1e-6)


def test_the_same_as_a_gan_loop_in_plain_torch(tmp_path: Path) -> None:
    """Losses in turn, frozen discriminator, clipping, rates and moments, written out by hand."""
    task, plain = GAN(), GAN()
    run(tmp_path / "run", task, ema_decay=0.0, weight_decay=0.0, clip_norm=0.5, warmup_steps=STEPS - 1)
    trained = list(plain.generator.layers.parameters())
    critics = list(plain.discriminator.parameters())
    adams = [torch.optim.Adam(group, betas=(0.9, 0.98)) for group in (trained, critics)]
    for step in range(STEPS):
        torch.manual_seed(step_generator(1, step, "dropout").initial_seed())
        noise, real = plain.batch(step, step_generator(1, step, "batch")).split((2, 3), dim=1)
        for parameters, adam, rate in zip((trained, critics), adams, (0.01, 0.005), strict=True):
            adam.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / (STEPS - 1))
            plain.discriminator.requires_grad_(parameters is critics)
            fake = plain.generator(noise)
            if parameters is critics:
                loss = discriminator_loss(plain.discriminator, real, fake.detach())
            else:
                loss = fake.square().mean() - plain.discriminator(fake).mean()
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            adam.step()
    expected = state_of(plain)
    del expected["generator.calls"]
    for key, value in expected.items():
        torch.testing.assert_close(state_of(task)[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kill_at", [3, 8, 10, 19])
def test_killed_at_any_step_both_optimizers_resume_bit_for_bit(tmp_path: Path, kill_at: int) -> None:
    """Killed before the adversary begins (its optimizer has no state then), as it begins, and after."""
    run(tmp_path / "whole", whole := GAN(begin=8))
    with pytest.raises(Killed):
        run(tmp_path / "killed", GAN(begin=8, kill_at=kill_at))
    run(tmp_path / "killed", resumed := GAN(begin=8))
    assert state_of(whole)["generator.calls"] == STEPS
    for key, value in state_of(whole).items():
        assert torch.equal(value, state_of(resumed)[key]), key
    for name in ("optimizers.safetensors", "ema.safetensors"):
        once, twice = (load_file(tmp_path / folder / "checkpoint" / name) for folder in ("whole", "killed"))
        assert set(once) == set(twice) and all(torch.equal(once[key], twice[key]) for key in once)
    assert any(key.startswith("discriminator/") for key in load_file(
        tmp_path / "whole" / "checkpoint" / "optimizers.safetensors"
    ))  # fmt: skip
    rows = [read_jsonl(tmp_path / folder / "metrics.jsonl") for folder in ("whole", "killed")]
    assert rows[0] == rows[1]


def test_only_what_main_trains_is_averaged_and_frozen_parameters_stay(tmp_path: Path) -> None:
    task, fresh = GAN(), GAN()
    run(tmp_path / "run", task)
    averaged = load_file(tmp_path / "run" / "checkpoint" / "ema.safetensors")
    assert set(averaged) == {f"generator.layers.{layer}.{p}" for layer in (0, 2) for p in ("weight", "bias")}
    assert torch.equal(task.generator.frozen.weight, fresh.generator.frozen.weight)
    raw = load_file(tmp_path / "run" / "checkpoint" / "modules.safetensors")
    assert torch.equal(raw["discriminator.0.weight"], task.discriminator[0].weight)
    assert not torch.equal(raw["generator.layers.0.weight"], task.generator.layers[0].weight)


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_what_is_not_finite_stops_the_run_by_name_and_spoils_no_checkpoint(tmp_path: Path, what: str) -> None:
    task = GAN(poison_at=7) if what == "loss" else GAN(steep_at=7)
    with pytest.raises(StageError, match=rf"{what} of the discriminator is (nan|inf) at step 8 .*margin"):
        run(tmp_path / "run", task, log_every=1000, rollbacks=0)
    folder = tmp_path / "run" / "checkpoint"
    assert read_json(folder / "state.json")["step"] == 7
    for name in ("modules", "optimizers", "ema"):
        assert all(tensor.isfinite().all() for tensor in load_file(folder / f"{name}.safetensors").values())
    run(tmp_path / "run", resumed := GAN())
    run(tmp_path / "whole", whole := GAN())
    assert all(torch.equal(value, state_of(resumed)[key]) for key, value in state_of(whole).items())


def test_an_alarm_is_told_once_and_kept_over_a_resume(tmp_path: Path) -> None:
    first = GAN(kill_at=12)
    first.told = {"collapse": "3 of 1024 codes"}
    with pytest.raises(Killed):
        run(tmp_path / "run", first)
    kept = [{"step": 4, "kind": "collapse", "text": "3 of 1024 codes"}]
    assert read_jsonl(tmp_path / "run" / "alarms.jsonl") == kept
    second = GAN()
    second.told = {"collapse": "2 of 1024 codes", "dead discriminator": "it gives 0"}
    said = run(tmp_path / "run", second).console.export_text()
    assert "codes" not in said and said.count("dead discriminator: it gives 0") == 1
    kept.append({"step": 14, "kind": "dead discriminator", "text": "it gives 0"})
    assert read_jsonl(tmp_path / "run" / "alarms.jsonl") == kept


def test_optimizers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    wrong = {
        "discriminator": {"main": ["generator"]},
        "elsewhere": {"main": ["generator", "discriminator", "elsewhere"]},
        "generator": {"main": ["generator", "discriminator"], "second": ["generator"]},
        "see main": {"first": ["generator", "discriminator"]},
    }
    for message, groups in wrong.items():
        task = GAN()
        task.optimizers = lambda groups=groups: groups  # type: ignore[method-assign]
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "run", task, rate_factors={})
    with pytest.raises(ValueError, match="critic"):
        run(tmp_path / "run", GAN(), rate_factors={"critic": 2.0})
    task = GAN()
    task.optimizers = lambda: {"main": ["generator", "discriminator"]}  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="'discriminator'; the task has"):
        run(tmp_path / "run", task, rate_factors={})


class FakeTime:
    """A clock that a task sets forward; CPU time runs at twice the wall's speed."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return 2 * self.now


class Costly(GAN):
    """A GAN whose steps take a known time."""

    def __init__(self, clock: FakeTime, cost: Callable[[float, int], float]) -> None:
        super().__init__()
        self._clock, self._cost = clock, cost

    def updates(self, batch: Tensor, step: int, steps: int) -> Iterator[Update]:
        self._clock.now += self._cost(step / steps, step)
        yield from super().updates(batch, step, steps)


def once_dear() -> Callable[[float, int], float]:
    """1 s in the first half, 5 s in the second, 100 s once as the second begins."""
    begun: list[int] = []

    def cost(done: float, step: int) -> float:
        if done < 0.5 or step == 999:  # 999: the call before the trials
            return 5.0 if step == 999 else 1.0
        begun.append(step)
        return 100.0 if len(begun) == 1 else 5.0

    return cost


COSTS: dict[str, tuple[Callable[[float, int], float], float]] = {
    "second half five times dearer, and a k-means between": (once_dear(), 3.0),
    "every other step three times dearer": (lambda done, step: 1.0 + 2.0 * (step % 2), 2.0),
    "an adversary from 30 % on": (lambda done, step: 1.0 if done < 0.3 else 4.0, 0.3 * 1 + 0.7 * 4),
    "a short plain phase": (lambda done, step: 1.0 if done < 0.08 else 3.0, 0.08 * 1 + 0.92 * 3),
    "one cost": (lambda done, step: 0.5, 0.5),
}


@pytest.mark.parametrize("case", list(COSTS))
def test_phases_count_by_their_shares_and_what_happens_once_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    cost, average_s = COSTS[case]
    clock = FakeTime()
    monkeypatch.setattr(budget, "time", clock)
    task = Costly(clock, cost)
    measured = budget.step_cost(
        lambda step, steps: list(task.updates(torch.zeros(2, 5), step, steps)), task.modules(), CPU
    )
    assert measured.seconds == pytest.approx(average_s, rel=0.15)
    assert measured.cpu_seconds == pytest.approx(2 * measured.seconds)


def budget_of(task: GAN, folder: Path, **values: object) -> int:
    """Return the number of steps that `train` makes of the budget; no step of the run itself is taken."""
    attempt = loop._Run(task, config(**values), folder, context_of(folder), CPU)
    attempt.restore()
    return attempt.steps


@pytest.mark.parametrize(("given", "expected"), [({"minutes": 1.0}, 30), ({"cpu_minutes": 1.0}, 15)])
def test_minutes_of_either_clock_become_steps_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, float], expected: int
) -> None:
    clock = FakeTime()
    monkeypatch.setattr(budget, "time", clock)
    task = Costly(clock, lambda done, step: 1.0 if done < 0.5 else 3.0)
    task.generator.scratch += 7
    clean, random = state_of(task), torch.get_rng_state()
    values: dict[str, object] = {"minutes": None, **given, "steps": None, "warmup_steps": 2}
    folder = tmp_path / "run"
    folder.mkdir()
    steps = budget_of(task, folder, **values)
    assert steps == pytest.approx(expected, rel=0.25)
    written = read_json(folder / "budget.json")
    assert given.items() <= written.items() and written["steps"] == steps
    assert written["cpu_seconds_per_step"] == pytest.approx(2 * written["seconds_per_step"])
    assert all(torch.equal(value, state_of(task)[key]) for key, value in clean.items())
    assert torch.equal(task.generator.scratch, torch.full((3,), 7.0))
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for module in task.modules().values() for p in module.parameters())
    assert budget_of(task, folder, **values) == steps


def test_cpu_seconds_are_those_of_all_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**6))
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), process_time=lambda: float(next(ticks)))
    monkeypatch.setattr(loop, "time", clock)
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        run(folder, GAN(kill_at=7))
    figures = train(GAN(), config(), folder, context_of(folder), CPU)
    assert figures["cpu_seconds"] == STEPS  # one tick a step, 7 of them in the first attempt
    assert math.isclose(read_json(folder / "checkpoint" / "state.json")["cpu_seconds"], STEPS)


def test_one_budget_is_given() -> None:
    for wrong in ({"steps": None}, {"minutes": 1.0}, {"cpu_minutes": 1.0}):
        with pytest.raises(ValueError, match="one of steps, minutes and cpu_minutes"):
            config(**wrong)
    settings = TrainingConfig(cpu_minutes=3)
    settings.follow_size(100, None, 4, 1e-3)
    assert settings.steps_for(10.0) is None and settings.budget_text() == "3 CPU minutes"
    with pytest.raises(ValueError, match="minutes and cpu_minutes"):
        TrainingConfig(cpu_minutes=3, minutes=3).follow_size(100, None, 4, 1e-3)
