"""Two ranks over gloo are one: DDP and FSDP2, game and best weights; a run goes on at another number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from audiollm.errors import StageError
from audiollm.files.atomic import read_json, read_jsonl
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.train.loop.checkpoint import trained_weights
from audiollm.train.loop.loop import Update
from audiollm.train.parallel.strategy import choose_strategy
from tests.audiollm.train.two_ranks import (
    CPU,
    SAMPLES,
    STEPS,
    Mixed,
    TwoBranches,
    all_tensors,
    assert_same,
    evaluations,
    losses,
    on_two_ranks,
    run,
    run_killed,
)


class Game(Mixed):
    """A generator and a discriminator, each with its optimizer; the discriminator is called twice an update."""

    def __init__(self) -> None:
        super().__init__()
        self.critic: nn.Module = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.judge = self.critic

    def modules(self) -> dict[str, nn.Module]:
        return {"model": self.model, "critic": self.critic}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        self.wrapped, self.judge = modules["model"], modules["critic"]

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["model"], "critic": ["critic"]}

    def updates(self, batch: list[Tensor], step: int, steps: int) -> Iterator[Update]:
        rows = torch.cat(batch)
        made = self.wrapped(rows[:, :6], rows[:, 7] > 0)
        self.critic.requires_grad_(False)
        loss = -self.critic(made[:, None]).sum() / SAMPLES
        self.critic.requires_grad_(True)
        yield Update(loss, {})
        real, fake = self.judge(rows[:, 6:7]), self.judge(made.detach()[:, None])
        yield Update(((1 - real).relu().sum() + (1 + fake).relu().sum()) / SAMPLES, {}, "critic")


class Dice(Mixed):
    """Keeps what a model would draw for its dropout at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> list[Tensor]:
        self.drawn.append(torch.rand(()).item())
        return super().batch(step, generator, ranks)


def first_work(folder: Path, ranks: Ranks) -> None:
    with pytest.raises(StageError, match="fsdp2 has one optimizer"):
        run(folder / "refused", Game(), ranks, strategy="fsdp2")
    run(folder / "ddp", Mixed(), ranks, strategy="auto", best="ones")
    run(folder / "game", Game(), ranks, strategy="ddp", ema_decay=0.0)
    run(folder / "fsdp2", Mixed(), ranks, strategy="fsdp2")
    run(folder / "dice", dice := Dice(), ranks, strategy="ddp", steps=3)
    drawn = [number for own in ranks.gather(dice.drawn) for number in own]
    assert len(set(drawn)) == len(drawn) == 6, "ranks and steps have dropout of their own"
    figures = run(folder / "bf16", Mixed(torch.float32), ranks, strategy="fsdp2", precision="bf16")
    assert ranks.gather(figures["ones"]) == [figures["ones"]] * 2
    again = run(folder / "bf16", Mixed(torch.float32, 0), ranks, strategy="fsdp2", precision="bf16")
    assert again["ones"] == figures["ones"]
    run_killed(folder / "moved", Mixed(kill_at=2), ranks, strategy="fsdp2")
    torch.manual_seed(ranks.rank)  # ranks that begin differently: the first one's weights are everyone's
    for name in ("ddp", "fsdp2"):
        model = TwoBranches()
        strategy = choose_strategy(name, ranks, CPU, None, 1.0)  # type: ignore[arg-type]
        strategy.prepare({"model": model}, {"main": ["model"]}, dict)
        weight = model.embed.weight
        whole = weight.full_tensor() if name == "fsdp2" else weight  # type: ignore[operator]
        assert len(set(ranks.gather(whole.sum().item()))) == 1, name
    assert ranks.mean({"both": ranks.rank, f"own/{ranks.rank}": 5.0}) == {
        "both": 0.5,
        "own/0": 5.0,
        "own/1": 5.0,
    }


def second_work(folder: Path, ranks: Ranks) -> None:
    run(folder / "moved", Mixed(), ranks, strategy="ddp")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("ranks")
    run(folder / "one", Mixed(), best="ones")
    run(folder / "one-game", Game(), ema_decay=0.0)
    on_two_ranks(first_work, folder)
    run_killed(folder / "moved", Mixed(kill_at=4))
    assert read_json(folder / "moved" / "checkpoint" / "state.json")["step"] == 4
    on_two_ranks(second_work, folder)
    return folder


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "moved"])
def test_two_ranks_end_with_the_weights_of_one(runs: Path, name: str) -> None:
    """Weights, moments and averages to 1e-9 in float64; `moved` went on from 2 ranks on 1 and on 2 again."""
    for part in ("modules", "optimizers", "ema"):
        assert_same(runs / name, runs / "one", part, 1e-9)
    assert losses(runs / name) == pytest.approx(losses(runs / "one"), abs=1e-5)
    assert len(losses(runs / name)) == STEPS
    rows = [read_jsonl(runs / one / "metrics.jsonl") for one in (name, "one")]
    assert rows[0][2]["gradient_norm"] == pytest.approx(rows[1][2]["gradient_norm"], rel=1e-5)
    assert evaluations(runs / name) == pytest.approx(evaluations(runs / "one"), rel=1e-5)
    assert read_json(runs / name / "checkpoint" / "state.json")["tokens"] == STEPS * SAMPLES


def test_both_optimizers_of_a_game_are_reduced(runs: Path) -> None:
    for part in ("modules", "optimizers"):
        assert_same(runs / "game", runs / "one-game", part, 1e-9)


def test_parts_are_written_by_all_ranks_and_read_as_one_model(runs: Path, tmp_path: Path) -> None:
    files = {path.name for path in (runs / "fsdp2" / "checkpoint").iterdir()}
    assert {f"modules-0000{n}-of-00002.safetensors" for n in (1, 2)} < files
    model = TwoBranches().double()
    model.load_state_dict(trained_weights(runs / "fsdp2", "model"))
    run(tmp_path / "one", task := Mixed())
    rows, kinds = torch.randn(5, 6, dtype=torch.float64), torch.arange(5) % 2 > 0
    torch.testing.assert_close(model(rows, kinds), task.model(rows, kinds), rtol=0, atol=1e-9)


def test_the_best_weights_are_kept_by_all_strategies(runs: Path) -> None:
    best = [read_json(runs / name / "best" / "state.json") for name in ("one", "ddp")]
    assert best[0]["step"] == best[1]["step"] and best[0]["value"] == pytest.approx(
        best[1]["value"], abs=1e-9
    )
    found, expected = (trained_weights(runs / name, "model") for name in ("ddp", "one"))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-9)


def test_bf16_follows_fp32(runs: Path) -> None:
    assert losses(runs / "bf16") == pytest.approx(losses(runs / "one"), rel=0.05)
    assert losses(runs / "bf16") != losses(runs / "one")
    ends = [evaluations(runs / name)[-1] for name in ("bf16", "one")]
    assert ends[0] == pytest.approx(ends[1], rel=0.05) and ends[0] != ends[1]
    assert {v.dtype for v in all_tensors(runs / "bf16" / "checkpoint", "modules").values()} == {torch.float32}
