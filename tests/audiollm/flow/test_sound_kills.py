"""`encode_latents` and `train_flow`, killed for real: they end with the bytes of an undisturbed run."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.data.records.shards import ShardWriter
from audiollm.flow import training
from audiollm.flow.stages import ENCODE_LATENTS, TRAIN_FLOW
from audiollm.flow.task import FlowTask
from tests.audiollm.flow.toy import context_of, encode_config, train_config, write_scenes

FORK = multiprocessing.get_context("fork")
STEPS = 24


pytestmark = pytest.mark.slow  # where the kill falls depends on the machine


def encode(folder: Path, out: Path, told: Connection) -> None:
    class Telling(ShardWriter):
        def write(self, *arguments: Any, **named: Any) -> None:
            told.send("sample")
            super().write(*arguments, **named)

    from audiollm.flow import encoding

    encoding.ShardWriter = Telling  # type: ignore[misc]
    ENCODE_LATENTS.run(encode_config(folder / "scenes.jsonl", edits_per_sample=1), context_of(out))


def train(folder: Path, out: Path, told: Connection) -> None:
    class Telling(FlowTask):
        def batch(self, *arguments: Any, **named: Any) -> Any:
            told.send("step")
            return super().batch(*arguments, **named)

    training.FlowTask = Telling  # type: ignore[misc]
    config = train_config(
        folder / "whole" / "shards", steps=STEPS, checkpoint_seconds=0, ema_decay=0.9, max_eval_samples=2
    )
    TRAIN_FLOW.run(config, context_of(out))


def attempt(
    work: Callable[[Path, Path, Connection], None], folder: Path, out: Path, told: Connection
) -> None:
    torch.set_num_threads(1)
    work(folder, out, told)
    told.send("end")
    told.close()
    os._exit(0)


def run_until(
    work: Callable[[Path, Path, Connection], None],
    folder: Path,
    out: Path,
    moment: int | None,
    wait_s: float = 0.0,
) -> bool:
    """Run in a process of its own; kill it after so many moments. Returns whether it came to its end."""
    heard, told = FORK.Pipe(duplex=False)
    process = FORK.Process(target=attempt, args=(work, folder, out, told))
    process.start()
    told.close()
    count, ended = 0, False
    try:
        while True:
            ended = heard.recv() == "end"
            count += 1
            if ended or (moment is not None and count >= moment):
                break
    except EOFError:
        pass
    if not ended:
        process.join(wait_s)
        process.kill()  # it may have ended by itself
    process.join()
    return ended


def kill_often(
    work: Callable[[Path, Path, Connection], None], folder: Path, out: Path, kills: int, seed: int
) -> None:
    dice, killed = random.Random(seed), 0
    while killed < kills:
        done = run_until(work, folder, out, dice.randint(1, 5), dice.uniform(0, 0.02))
        if done:
            break
        killed += 1
    assert killed  # a fast machine may be done before the last one
    assert run_until(work, folder, out, None)


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder; a kill in the midst of a write leaves a temporary one, whose name begins with a dot."""
    found = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name[0] != "."}
    assert found
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kills")
    write_scenes(made, with_video=False)
    assert run_until(encode, made, made / "whole", None)
    assert run_until(train, made, made / "trained", None)
    return made


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_while_encoding(folder: Path, tmp_path: Path, kills: int) -> None:
    kill_often(encode, folder, tmp_path, kills, 1)
    assert contents(tmp_path / "shards") == contents(folder / "whole" / "shards")


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_while_training(folder: Path, tmp_path: Path, kills: int) -> None:
    kill_often(train, folder, tmp_path, kills, 2)
    assert contents(tmp_path / "model") == contents(folder / "trained" / "model")
