"""`encode_latents` and `train_flow`, killed for real: they end with the bytes of an undisturbed run."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.audio import save
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import AudioPart, Message, write_samples
from audiollm.data.records.shards import ShardWriter
from audiollm.files.atomic import read_jsonl
from audiollm.flow import training
from audiollm.flow.stages import ENCODE_LATENTS, TRAIN_FLOW
from audiollm.flow.task import FlowTask
from tests.audiollm.flow.toy import RATE, context_of, encode_config, train_config, write_scenes

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
    """Run in a process of its own; kill it after so many moments. Returns whether it came to its end by itself."""
    heard, told = FORK.Pipe(duplex=False)
    process = FORK.Process(target=attempt, args=(work, folder, out, told))
    process.start()
    told.close()
    count = 0
    try:
        while heard.recv() != "end":
            count += 1
            if moment is not None and count >= moment:
                process.join(wait_s)
                process.kill()
                break
    except EOFError:  # it failed
        pass
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def kill_often(
    work: Callable[[Path, Path, Connection], None], folder: Path, out: Path, kills: int, seed: int
) -> list[Path]:
    """Kill the work so often, and let it come to its end. Work that is done too early is begun anew elsewhere.

    Returns the folders of the work, each of which is done.
    """
    dice, killed, folders = random.Random(seed), 0, [out / "0"]
    while killed < kills:
        if run_until(work, folder, folders[-1], dice.randint(1, 5), dice.uniform(0, 0.02)):
            folders.append(out / str(len(folders)))
        else:
            killed += 1
    assert run_until(work, folder, folders[-1], None)
    return folders


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder; a kill in the midst of a write leaves a temporary one, whose name begins with a dot."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != "."]
    assert files
    return {path.name: path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes with video, one of which is silent and set aside, encoded and trained without a kill."""
    made = tmp_path_factory.mktemp("kills")
    samples, _ = read_samples(write_scenes(made))
    save(made / "silent.wav", torch.zeros(1, RATE), RATE)
    silent = Message(role="assistant", content=[AudioPart(path="silent.wav")])
    samples[2] = samples[2].model_copy(update={"messages": [samples[2].messages[0], silent]})
    write_samples(made / "scenes.jsonl", samples)
    assert run_until(encode, made, made / "whole", None)
    assert run_until(train, made, made / "trained", None)
    return made


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_while_encoding(folder: Path, tmp_path: Path, kills: int) -> None:
    for out in kill_often(encode, folder, tmp_path, kills, 1):
        assert contents(out / "shards") == contents(folder / "whole" / "shards")
        (row,) = read_jsonl(out / "set_aside.jsonl")
        assert row["kind"] == "silent" and [row] == read_jsonl(folder / "whole" / "set_aside.jsonl")


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_while_training(folder: Path, tmp_path: Path, kills: int) -> None:
    wanted = read_jsonl(folder / "trained" / "metrics.jsonl")
    assert [row["step"] for row in wanted if "loss" in row][-1] == STEPS - 1
    for out in kill_often(train, folder, tmp_path, kills, 2):
        assert contents(out / "model") == contents(folder / "trained" / "model")
        assert read_jsonl(out / "metrics.jsonl") == wanted
