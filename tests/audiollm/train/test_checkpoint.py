"""Checkpoints: killed at random moments for real, a run ends as if nothing had been; what is torn is never loaded."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from audiollm.errors import StageError
from audiollm.files.atomic import read_json, read_jsonl
from audiollm.recipe.ranks import Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from audiollm.train.loop import checkpoint
from audiollm.train.loop.checkpoint import open_part, read_state, save_checkpoint, trained_weights
from audiollm.train.loop.loop import LoopConfig, Update, train
from tests.forked import forked

STEPS = 70

MOMENTS = ("data", "step", "write", "written", "evaluation")


class Net(nn.Module):
    """Dropout, and a buffer that counts the rows seen: a sample lost or repeated shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.2), nn.Linear(32, 1))
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, rows: Tensor) -> Tensor:
        self.seen += len(rows)
        return self.layers(rows)[:, 0]


class Reporting:
    """A task that tells where it is, so that it can be killed there."""

    def __init__(self, say: Callable[[str], None]) -> None:
        torch.manual_seed(0)
        self.model, self._say = Net(), say

    def modules(self) -> dict[str, nn.Module]:
        return {"model": self.model}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        pass

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["model"]}

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks) -> Sequence[Tensor]:
        self._say("data")
        return torch.randn(16, 6, generator=generator).split(8)

    def updates(self, batch: Sequence[Tensor], step: int, steps: int) -> Iterator[Update]:
        self._say("step")
        losses = ((self.model(part) - part.sum(dim=1)).square().sum() / 16 for part in batch)
        yield Update(losses, {"tokens": 16.0}, losses=2)

    def evaluate(self, step: int) -> Mapping[str, float]:
        self._say("evaluation")
        return {"ones": float(self.model.layers(torch.ones(1, 6)))}

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        return {}


def attempt(folder: Path, told: Connection) -> None:
    """A whole training in a process of its own; it tells of each moment and then goes on for a little while."""
    torch.set_num_threads(1)

    def say(moment: str) -> None:
        told.send(moment)
        time.sleep(0.001)

    def slowly(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None) -> None:
        say("write")
        save_file(tensors, path, metadata)
        say("written")

    checkpoint.save_file = slowly
    recipe = Recipe("test", Path("test.yaml"), "tiny", 0, folder, (), {})
    config = LoopConfig(
        seed=1, steps=STEPS, minutes=None, learning_rate=0.01, warmup_steps=5, ema_decay=0.9, log_every=5,
        evaluate_every=15, best="ones", checkpoint_seconds=0.0, precision="fp32", report_to=(), spike_deviations=50.0,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    train(
        Reporting(say), config, folder, Context(folder, recipe, Console(quiet=True), {}), torch.device("cpu")
    )
    told.send("end")


@pytest.fixture(scope="module")
def start() -> Callable[[Path], tuple[BaseProcess, Connection]]:
    """Starts attempts in new processes, which a server that has torch loaded already forks."""

    def begin(folder: Path) -> tuple[BaseProcess, Connection]:
        with forked() as context:
            reads, writes = context.Pipe(duplex=False)
            process = context.Process(target=attempt, args=(folder, writes))
            process.start()
        writes.close()
        return process, reads

    return begin


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {
        f"{path.relative_to(folder)}/{key}": value
        for path in sorted(folder.glob("**/*.safetensors"))
        for key, value in load_file(path).items()
    }


@pytest.mark.parametrize("kills", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_at_random_moments_change_nothing(
    tmp_path: Path, start: Callable[[Path], tuple[BaseProcess, Connection]], kills: int
) -> None:
    """SIGKILL while data is waited for, within steps, evaluations and checkpoint writes."""
    dice, furthest = random.Random(0), []
    for kill in range(kills):
        process, told = start(tmp_path / "killed")
        moment, times = MOMENTS[kill % len(MOMENTS)], dice.randint(1, 4)
        while times and (place := told.recv()) != "end":
            times -= place == moment or (moment == "evaluation" and place == "step")
        time.sleep(dice.random() * 0.003)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"kill {kill} came too late"
        state = read_state(tmp_path / "killed" / "checkpoint")
        furthest.append(state["step"] if state else 0)
    for name in ("whole", "killed"):
        process, told = start(tmp_path / name)
        while told.recv() != "end":
            pass
        process.join()
        assert process.exitcode == 0
    assert furthest == sorted(furthest) and 0 < furthest[-1] < STEPS
    found, expected = tensors_of(tmp_path / "killed"), tensors_of(tmp_path / "whole")
    assert found.keys() == expected.keys() and len(expected) > 20
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert expected["checkpoint/modules.safetensors/model.seen"] == 16 * STEPS, (
        "a sample was lost or repeated"
    )
    for name in ("checkpoint/state.json", "best/state.json"):
        states = [read_json(tmp_path / one / name) for one in ("killed", "whole")]
        for state in states:
            state.pop("cpu_seconds", None), state.pop("state_sha256")  # the digest is of the seconds, too
        assert states[0] == states[1]
    rows = [read_jsonl(tmp_path / one / "metrics.jsonl") for one in ("killed", "whole")]
    assert rows[0] == rows[1]


def readers_of(tensors: dict[str, Tensor]) -> dict[str, partial[Tensor]]:
    return {name: partial(torch.clone, tensor) for name, tensor in tensors.items()}


WEIGHTS = {"model.a.weight": torch.randn(4, 3), "model.b": torch.arange(5), "other.c": torch.ones(())}


def saved(folder: Path, step: int = 7) -> Path:
    averages = {"model.a.weight": torch.full((4, 3), 2.0)}
    parts = {"modules": readers_of(WEIGHTS), "optimizers": {}, "ema": readers_of(averages)}
    save_checkpoint(folder / "checkpoint", parts, {"step": step})
    return folder / "checkpoint"


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert read_state(folder) == {"step": 7}
    with open_part(folder, "modules") as readers:
        assert readers.keys() == WEIGHTS.keys()
        assert all(torch.equal(readers[name](), tensor) for name, tensor in WEIGHTS.items())
    with open_part(folder, "optimizers") as readers:
        assert readers == {}
    assert sorted(path.name for path in folder.iterdir()) == [
        "ema.safetensors",
        "modules.safetensors",
        "state.json",
    ]


def test_a_write_cut_short_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    folder = saved(tmp_path)

    def torn() -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(folder, {"modules": {"a": torn}}, {"step": 8})
    assert read_state(folder) == {"step": 7}
    os.replace(folder, folder.with_name("checkpoint.old"))  # killed between the two renames
    assert read_state(folder) == {"step": 7}
    assert read_state(tmp_path / "elsewhere") is None


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_checkpoint_is_named_and_not_loaded(tmp_path: Path, damage: str) -> None:
    folder = saved(tmp_path)
    file = folder / "modules.safetensors"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StageError, match=r"modules.safetensors is damaged: .*\n.*remove .*checkpoint"):
        read_state(folder)
    with pytest.raises(StageError, match="damaged"):
        trained_weights(tmp_path, "model")


def test_weights_are_those_the_run_ended_with(tmp_path: Path) -> None:
    saved(tmp_path)
    assert torch.equal(trained_weights(tmp_path, "model")["a.weight"], torch.full((4, 3), 2.0))
    assert trained_weights(tmp_path, "model").keys() == {"a.weight", "b"}
    save_checkpoint(tmp_path / "best", {"modules": readers_of(WEIGHTS)}, {"step": 5})
    assert torch.equal(trained_weights(tmp_path, "model")["a.weight"], WEIGHTS["model.a.weight"])
    for module, message in (("absent", "no module 'absent'"), ("mode", "no module 'mode'")):
        with pytest.raises(StageError, match=message):
            trained_weights(tmp_path, module)
    with pytest.raises(StageError, match="has no checkpoint"):
        trained_weights(tmp_path / "elsewhere", "model")


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    """Only these two kinds of files, and the tensors' files begin as safetensors do: a length and a JSON header."""
    for path in saved(tmp_path).iterdir():
        content = path.read_bytes()
        if path.suffix == ".safetensors":
            assert content[8:9] == b"{" and int.from_bytes(content[:8], "little") < len(content)
        else:
            assert path.name == "state.json" and content[:1] == b"{"
