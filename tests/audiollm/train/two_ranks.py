"""A task whose ranks see different kinds of samples, and what runs it on two ranks over gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, multiprocessing, nn

from audiollm.files.atomic import read_jsonl, write_json
from audiollm.recipe.ranks import ALONE, Ranks, join_ranks, leave
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from audiollm.train.loop.checkpoint import open_part
from audiollm.train.loop.loop import LoopConfig, Update, step_generator, train
from tests.forked import begin, forked

CPU = torch.device("cpu")
STEPS, SAMPLES, MICRO = 6, 8, 2
ENDED = "ended.json"


class Killed(Exception):
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.layer(self.norm(hidden)))


class TwoBranches(nn.Module):
    """Rows are of one of two kinds and go through the branch of theirs, as text and audio do."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.text, self.audio = nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, rows: Tensor, is_audio: Tensor) -> Tensor:
        hidden = self.embed(rows)
        for block in self.blocks:
            hidden = block(hidden)
        out = torch.zeros_like(rows[:, 0])
        out[is_audio] = self.audio(hidden[is_audio])[:, 0].to(out.dtype)
        out[~is_audio] = self.text(hidden[~is_audio])[:, 0].to(out.dtype)
        return out


class Mixed:
    """Even samples are text and odd ones audio: of two ranks, one has text alone and the other audio alone."""

    def __init__(self, dtype: torch.dtype = torch.float64, kill_at: int = -1) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = TwoBranches().to(dtype)
        self.wrapped, self.dtype, self.kill_at, self.ranks = self.model, dtype, kill_at, ALONE

    def modules(self) -> dict[str, nn.Module]:
        return {"model": self.model}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        self.wrapped = modules["model"]

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["model"]}

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> list[Tensor]:
        if step == self.kill_at:
            raise Killed
        self.ranks = ranks
        rows = torch.randn(SAMPLES, 7, generator=step_generator(0, step, "rows"), dtype=torch.float64)
        is_audio = torch.arange(SAMPLES)[:, None] % 2
        table = torch.cat([rows.to(self.dtype), is_audio], dim=1)[ranks.rank :: ranks.world]
        return list(table.split(MICRO))

    def updates(self, batch: list[Tensor], step: int, steps: int) -> Iterator[Update]:
        total = int(self.ranks.sum(torch.tensor(sum(len(part) for part in batch))))
        assert total == SAMPLES
        figures: dict[str, float] = {"tokens": float(MICRO * len(batch))}
        yield Update(self._losses(batch, total), figures, losses=len(batch))

    def _losses(self, batch: list[Tensor], total: int) -> Iterable[Tensor]:
        for part in batch:
            made = self.wrapped(part[:, :6], part[:, 7] > 0)
            yield (made - part[:, 6]).square().sum() / total

    def evaluate(self, step: int) -> Mapping[str, float]:
        rows = torch.ones(2, 6, dtype=self.dtype)
        return {"ones": float(self.wrapped(rows, torch.tensor([True, False])).sum())}

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        return {}


def loop(**changes: object) -> LoopConfig:
    values: dict[str, object] = {
        "seed": 1, "steps": STEPS, "minutes": None, "learning_rate": 0.01, "warmup_steps": 2, "ema_decay": 0.9,
        "log_every": 1, "evaluate_every": 3, "checkpoint_seconds": 0.0, "precision": "fp32", "report_to": (),
        "clip_norm": 0.5,
    }  # fmt: skip
    return LoopConfig(**{**values, **changes})  # type: ignore[arg-type]


def run(folder: Path, task: Mixed, ranks: Ranks = ALONE, **changes: object) -> dict[str, Any]:
    folder.mkdir(exist_ok=True, parents=True)
    recipe = Recipe("test", Path("test.yaml"), "tiny", 0, folder, (), {})
    return train(task, loop(**changes), folder, Context(folder, recipe, Console(quiet=True), {}, ranks), CPU)


def run_killed(folder: Path, task: Mixed, ranks: Ranks = ALONE, **changes: object) -> None:
    with pytest.raises(Killed):
        run(folder, task, ranks, **changes)


def on_two_ranks(work: Callable[[Path, Ranks], None], folder: Path) -> None:
    """Run `work` in two processes. One that aborts at its end, as FSDP2 now and then does, has done its work."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    try:
        arguments = (work, str(folder), port, dict(os.environ))
        with forked():
            multiprocessing.start_processes(_rank, arguments, nprocs=2, start_method="forkserver")
    except multiprocessing.ProcessExitedException:
        if not all((folder / f"{rank}-{ENDED}").exists() for rank in (0, 1)):
            raise
    for rank in (0, 1):
        (folder / f"{rank}-{ENDED}").unlink()


def _rank(
    rank: int, work: Callable[[Path, Ranks], None], folder: str, port: int, environment: dict[str, str]
) -> None:
    begin(environment)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    ranks = join_ranks()
    work(Path(folder), ranks)
    write_json(Path(folder) / f"{rank}-{ENDED}", True)
    leave(ranks)


def assert_same(folder: Path, other: Path, part: str, atol: float) -> None:
    found, expected = (all_tensors(one / "checkpoint", part) for one in (folder, other))
    assert found.keys() == expected.keys() and found
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=atol, msg=f"{folder.name} {part} {key}")


def all_tensors(folder: Path, part: str) -> dict[str, Tensor]:
    with open_part(folder, part) as readers:
        return {name: read() for name, read in readers.items()}


def evaluations(folder: Path) -> list[float]:
    return [r["evaluation/ones"] for r in read_jsonl(folder / "metrics.jsonl") if "evaluation/ones" in r]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(folder / "metrics.jsonl") if "loss" in row]


def let_zero3_take_float64() -> None:
    """Make DeepSpeed treat this process as one on a CPU without float16 instructions.

    Where a CPU has them, ZeRO 3 asserts that parameters are float16, bfloat16 or float32; elsewhere it does not look.
    """
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: False
