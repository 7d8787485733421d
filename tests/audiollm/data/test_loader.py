"""Batches do not depend on the number of workers, nor on where one begins; bad samples are named once."""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from audiollm.audio import encode_bytes
from audiollm.data.records.loader import Loader
from audiollm.data.records.mixture import Mixture
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.data.records.shards import ShardWriter
from audiollm.data.records.source import Source
from audiollm.errors import BadSample
from tests.forked import forked

BATCH = 5


def sample(name: str, audio: bool) -> Sample:
    part = AudioPart(path="0.flac") if audio else TextPart(text=name)
    return Sample(id=name, messages=[Message(role="assistant", content=[part])], task="t")


def write_sources(folder: Path) -> list[str]:
    """A folder of shards with sound, one of them damaged, and a manifest with a broken line."""
    writer = ShardWriter(folder / "shards", 8)
    for index in range(20):
        tone = encode_bytes(torch.full((1, 80), index / 100), 8_000, "flac")
        codes = [[np.full((2, 3), index)]]
        content = tone if index != 7 else b"no sound"
        writer.write(index, sample(f"s{index}", True), codes, {"0.flac": content})
    writer.close({"codec": {"num_codebooks": 2, "codebook_size": 19}})  # the codes of s19 are out of range
    write_samples(folder / "texts.jsonl", [sample(f"t{index}", False) for index in range(11)])
    with (folder / "texts.jsonl").open("a") as file:
        file.write("{broken\n")
    return [str(folder / "shards"), str(folder / "texts.jsonl")]


@dataclass
class Batches:
    """Work of a loader process: read, decode, and make tensors."""

    sources: list[Source]
    mixture: Mixture

    def __call__(self, step: int) -> tuple[torch.Tensor, list[str], list[BadSample]]:
        ids, values, bad = [], [], []
        for item in self.mixture.items(step * BATCH, (step + 1) * BATCH):
            try:
                loaded = self.sources[item.source][item.index]
                peaks = [float(clip.load().samples_CN.max()) for clip in loaded.audio]
            except BadSample as error:
                bad.append(error.with_traceback(None))
                continue
            ids.append(loaded.sample.id)
            values.append(sum(peaks) + sum(int(codes.sum()) for row in loaded.encodings for codes in row))
        return torch.tensor(values), ids, bad


def batches(urls: list[str]) -> Batches:
    sources = [open_source(url) for url in urls]
    return Batches(
        sources, Mixture([len(source) for source in sources], [3, 1], seed=5, run_samples=4, window_runs=2)
    )


def seen(made: tuple[torch.Tensor, list[str], list[BadSample]]) -> tuple[object, ...]:
    values, ids, bad = made
    return values.tolist(), ids, [row.row() for row in bad]


def test_any_number_of_workers_gives_the_same_batches_from_any_step(tmp_path: Path) -> None:
    make = batches(write_sources(tmp_path))
    steps = 30
    expected = [seen(make(step)) for step in range(steps)]
    asked = [*range(12), *range(4, 9), 25, *range(17, steps)]  # a trial rolled back, a jump, a resume
    for workers in (0, 1, 3):
        loader = Loader(make, workers, ahead=4)
        assert [seen(loader[step]) for step in asked] == [expected[step] for step in asked]
        loader.close()
        assert seen(loader[3]) == expected[3], "it starts anew"
        loader.close()
    bad = [row for _, _, rows in expected for row in rows]
    assert {row["kind"] for row in bad} == {"undecodable audio", "codes out of range", "wrong JSON"}


def test_results_are_ahead_of_the_asking(tmp_path: Path) -> None:
    loader = Loader(Marking(tmp_path), workers=2, ahead=4)
    loader[0]
    deadline = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [0, 1, 2, 3, 4]
    loader.close()


@dataclass
class Marking:
    """Leaves a file for every step that it makes."""

    folder: Path

    def __call__(self, step: int) -> int:
        (self.folder / str(step)).touch()
        return step


def broken(step: int) -> int:
    if step == 1:
        raise ValueError("the codec of sample 'x' is another one")
    if step == 3:
        raise BadSample("a.tar", "x", "in two parts", "kind")
    return step


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_worker_reaches_the_caller_with_its_text(workers: int) -> None:
    loader = Loader(broken, workers, ahead=2)
    assert loader[0] == 0
    with pytest.raises(ValueError, match="the codec of sample 'x' is another one"):
        loader[1]
    assert loader[2] == 2
    with pytest.raises(Exception, match="sample 'x': in two parts"):
        loader[3]
    assert loader[4] == 4
    loader.close()
    with pytest.raises(ValueError, match="must be >= 0"):
        Loader(broken, -1)


def test_workers_draw_nothing_from_the_global_generator() -> None:
    """The step with which a killed run goes on would have another dropout than in a run that was not killed."""
    before = torch.get_rng_state()
    loader = Loader(abs, workers=1)
    assert [loader[0], loader[7]] == [0, 7] and torch.equal(torch.get_rng_state(), before)
    loader.close()


@pytest.mark.slow
def test_a_killed_run_that_goes_on_loses_and_repeats_no_sample(tmp_path: Path) -> None:
    """A training run that notes each finished step with its samples is killed at random moments, twice."""
    urls, journal = write_sources(tmp_path / "data"), tmp_path / "journal.jsonl"
    dice = random.Random(3)
    for _ in range(2):
        before = len(_journal(journal))
        with forked() as context:
            process = context.Process(target=_train, args=(urls, journal))
            process.start()
        deadline = time.monotonic() + 60
        while len(_journal(journal)) < before + 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(dice.random() * 0.2)
        process.kill()
        process.join()
    make, rows = batches(urls), _journal(journal)
    assert len(rows) >= 6
    assert [row["step"] for row in rows] == list(range(len(rows)))
    for row in rows:
        assert row["ids"] == make(row["step"])[1]
    one_pass = next(
        n for n in range(100) if (make.mixture.source_counts(n * BATCH) >= make.mixture.sizes).all()
    )
    read = [name for row in rows[:one_pass] for name in row["ids"]]
    read += [name for step in range(len(rows), one_pass) for name in make(step)[1]]
    spoken = [name for name in read if name.startswith("s")]  # more passes of these than one
    assert set(spoken) == {f"s{i}" for i in range(19) if i != 7}
    assert len(set(spoken[:18])) == 18, "none twice in the first pass"
    assert {name for name in read if name.startswith("t")} == {f"t{i}" for i in range(11)}


def _journal(path: Path) -> list[dict[str, Any]]:
    """A step is done when its line is whole, as a checkpoint is when it is renamed."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _train(urls: list[str], journal: Path) -> None:
    loader = Loader(batches(urls), workers=1, ahead=3)
    done = len(_journal(journal))
    for step in range(done, 10_000):
        _, ids, _ = loader[step]
        time.sleep(0.01)
        line = json.dumps({"step": step, "ids": ids}) + "\n"
        with journal.open("ab", buffering=0) as file:
            os.write(file.fileno(), line.encode())
