"""Remote reads that fail in passing are tried again; a source goes to another process as it was opened."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from audiollm.data.records import storage
from audiollm.data.records.manifest import ManifestSource
from audiollm.data.records.sample import Message, Sample, TextPart, write_samples
from audiollm.data.records.shards import Shards, ShardWriter
from audiollm.data.records.source import Source


class Flaky(MemoryFileSystem):
    """fsspec's files in memory, at `flaky://`, that cannot be written and that fail as they are told to."""

    protocol = "flaky"
    failures: ClassVar[list[Exception]] = []
    calls: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.replace("flaky://", "memory://"))
        return stripped

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        self.calls.append("cat_file")
        if self.failures:
            raise self.failures.pop(0)
        content: bytes = super().cat_file(path, start, end, **more)
        return content

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        raise PermissionError(path)

    def open(self, path: str, *arguments: Any, **more: Any) -> Any:
        self.calls.append("open")
        return super().open(path, *arguments, **more)

    def ls(self, path: str, *arguments: Any, **more: Any) -> Any:
        self.calls.append("ls")
        return super().ls(path, *arguments, **more)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a folder of files in memory, that no other test has."""
    monkeypatch.setattr(storage, "WAITS_S", (0.0, 0.0))
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.failures.clear()
    Flaky.calls.clear()
    name = uuid.uuid4().hex
    yield name
    system = fsspec.filesystem("memory")
    if system.exists(f"/{name}"):
        system.rm(f"/{name}", recursive=True)


class Broken(Exception):
    """An error as the packages of object stores raise it: not an OSError."""


@pytest.mark.parametrize("failures", [[], [OSError("busy")], [TimeoutError(), Broken("reset")]])
def test_a_failure_that_passes_loses_nothing(folder: str, failures: list[Exception]) -> None:
    fsspec.filesystem("memory").pipe_file(f"/{folder}/a", b"0123456789")
    for read, expected in (
        (lambda: storage.read_range(f"flaky://{folder}/a", 2, 5), b"23456"),
        (lambda: storage.read_all(f"flaky://{folder}/a"), b"0123456789"),
    ):
        Flaky.failures[:] = failures
        assert read() == expected and not Flaky.failures


def test_a_failure_that_stays_is_raised_and_a_file_that_is_not_there_is_not_waited_for(folder: str) -> None:
    fsspec.filesystem("memory").pipe_file(f"/{folder}/a", b"0123456789")
    Flaky.failures[:] = [Broken("first"), Broken("second"), Broken("third"), Broken("never met")]
    with pytest.raises(OSError, match="third"):
        storage.read_range(f"flaky://{folder}/a", 0, 1)
    assert len(Flaky.failures) == 1
    for final in (FileNotFoundError("gone"), PermissionError("not yours")):
        Flaky.failures[:] = [final, Broken("never met")]
        with pytest.raises(type(final)):
            storage.read_range(f"flaky://{folder}/a", 0, 1)
        assert len(Flaky.failures) == 1


def sample(index: int) -> Sample:
    content = [TextPart(text=f"say {index}")]
    return Sample(id=f"s{index}", messages=[Message(role="user", content=content)], task="text")


def write_both(folder: Path) -> None:
    writer = ShardWriter(folder, 4)
    for index in range(6):
        writer.write(index, sample(index), [])
    writer.close({"codec": {"num_codebooks": 8}})
    write_samples(folder / "samples.jsonl", [sample(index) for index in range(6)])


def opened(folder: str) -> list[Source]:
    return [Shards(folder), ManifestSource(f"{folder}/samples.jsonl"), Shards(f"{folder}/shard-000000.tar")]


def test_an_opened_source_goes_to_another_process_without_being_opened_again(
    tmp_path: Path, folder: str
) -> None:
    """The other process lists and opens nothing, even where no index can be written; each sample is one read."""
    write_both(tmp_path)
    system = fsspec.filesystem("memory")
    for path in tmp_path.iterdir():
        if not path.name.startswith("index."):
            system.pipe_file(f"/{folder}/{path.name}", path.read_bytes())
    there = opened(f"flaky://{folder}")
    sizes = [len(source) for source in there]
    assert sizes == [6, 6, 4] and not system.exists(f"/{folder}/index.json")
    for source in [*opened(str(tmp_path)), *there]:
        content = pickle.dumps(source)
        Flaky.calls.clear()
        back = pickle.loads(content)  # noqa: S301
        assert (back.name, back.digest, len(back)) == (source.name, source.digest, len(source))
        assert [bad.row() for bad in back.bad] == [bad.row() for bad in source.bad]
        assert Flaky.calls == []
        assert [back[n].sample for n in range(len(back))] == [sample(n) for n in range(len(back))]
        opens = (
            2 if source in there else 0
        )  # a range is read through a file of the memory, once for each sample
        assert Flaky.calls.count("ls") == 0 and Flaky.calls.count("open") <= opens * len(back)
    here = opened(str(tmp_path))
    assert [a.digest for a in here] == [b.digest for b in there], "not the place, but what is there"


def test_an_opened_source_is_small(tmp_path: Path) -> None:
    """The size of an opened source grows by 20 bytes per sample of shards, and by 8 per line of a manifest."""
    grown = []
    for count in (100, 1100):
        folder = tmp_path / str(count)
        writer = ShardWriter(folder, 10_000)
        for index in range(count):
            writer.write(index, sample(index), [])
        writer.close({})
        write_samples(folder / "samples.jsonl", [sample(index) for index in range(count)])
        grown.append([len(pickle.dumps(source)) for source in opened(str(folder))])
    for small, large, most in zip(*grown, (20, 8, 20), strict=True):
        assert large - small <= 1000 * most + 200


def test_the_digest_follows_what_the_numbers_stand_for(tmp_path: Path) -> None:
    def written(name: str, order: list[int], per_shard: int = 4) -> tuple[str, str]:
        writer = ShardWriter(tmp_path / name, per_shard)
        for place, index in enumerate(order):
            writer.write(place, sample(index), [])
        writer.close({})
        write_samples(tmp_path / name / "samples.jsonl", [sample(index) for index in order])
        shards, manifest, _ = opened(str(tmp_path / name))
        (tmp_path / name / "index.safetensors").unlink()
        assert Shards(tmp_path / name).digest == shards.digest, "scanned anew or from the index"
        return shards.digest, manifest.digest

    first = written("a", [0, 1, 2, 3, 4, 5])
    assert written("b", [0, 1, 2, 3, 4, 5]) == first
    others = [
        written("swapped", [1, 0, 2, 3, 4, 5]),
        written("fewer", [0, 1, 2, 3, 4]),
        written("others", [0, 1, 2, 3, 4, 6]),
    ]
    assert len({first, *others}) == 4
    assert all(one != first[0] and two != first[1] for one, two in others)
    (tmp_path / "a/shard-000001.tar").unlink()
    assert Shards(tmp_path / "a").digest != first[0], "a shard is gone"
