"""Shards: what goes in comes out, and a writer that was killed goes on with the shard that is missing."""

from __future__ import annotations

import contextlib
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

from audiollm.config import ConfigError
from audiollm.data.sample import AudioPart, Message, Sample, TextPart
from audiollm.data.shards import Encodings, ShardWriter, read_index, read_shards
from audiollm.files import write_json


def sample(index: int) -> Sample:
    messages = [
        Message(role="user", content=[TextPart(text=f"say é {index}")]),
        Message(role="assistant", content=[AudioPart(path=f"{index}.wav", end_s=1.5)]),
    ]
    return Sample(id=f"clip_{index}", messages=messages, task="tts", metadata={"split": "train"})


def encodings(index: int) -> Encodings:
    random = np.random.default_rng(index)
    return [[random.integers(1024, size=(8, 3 + index + v)).astype(np.int16)] for v in range(12)]


def write(folder: Path, start: int, stop: int) -> list[int]:
    """Returns what had to be encoded."""
    writer, worked = ShardWriter(folder, 4), []
    for index in range(start, stop):
        if not writer.has(index):
            worked.append(index)
            writer.write(index, sample(index), encodings(index))
    writer.close({"codec": {"num_codebooks": 8}})
    return worked


def test_round_trip(tmp_path: Path) -> None:
    assert write(tmp_path, 0, 10) == list(range(10))
    assert read_index(tmp_path)["counts"] == {
        "samples": 10,
        "frames": sum(3 + i for i in range(10)),
        "shards": 3,
    }
    for index, coded in enumerate(read_shards(tmp_path)):
        assert coded.sample == sample(index)
        for ours, theirs in zip(coded.encodings, encodings(index), strict=True):
            assert np.array_equal(ours[0].numpy(), theirs[0])


def test_resume_redoes_only_what_is_missing_and_gives_the_same_bytes(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write(whole, 0, 10)
    writer = ShardWriter(cut, 4)
    for index in range(6):  # killed with the second shard half full
        if not writer.has(index):
            writer.write(index, sample(index), encodings(index))
    assert write(cut, 0, 10) == list(range(4, 10))
    for path in whole.iterdir():
        assert path.read_bytes() == (cut / path.name).read_bytes(), path.name


def test_an_unfinished_folder_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="index.json"):
        list(read_shards(tmp_path))


class Planted:
    """What runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (self._path,))


def test_a_foreign_shard_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, proof = tmp_path / "shards", tmp_path / "ran"
    write(folder, 0, 2)
    pickle.loads(pickle.dumps(Planted(proof)))  # noqa: S301 (the negative control)
    assert proof.exists()
    proof.unlink()
    (shard,) = folder.glob("*.tar")
    with tarfile.open(shard, "a") as archive:
        member = pickle.dumps(Planted(proof))
        for key in ("clip_0", "clip_1", "0"):
            info = tarfile.TarInfo(f"{key}.pkl")
            info.size = len(member)
            archive.addfile(info, io.BytesIO(member))
    with contextlib.suppress(Exception):
        list(read_shards(folder))
    monkeypatch.chdir(folder)
    write_json(folder / "index.json", {**read_index(folder), "shards": [f"pipe:touch {proof}"]})
    with pytest.raises(FileNotFoundError):
        list(read_shards(Path()))
    assert not proof.exists()
