"""Coded samples in webdataset shards: `<key>.json` (the sample) beside `<key>.codes.npz` (its codes).

A shard is written under a temporary name and renamed, so one that exists is whole; a run that was cut short
goes on with the first shard that is missing. `index.json` is written last.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from torch import Tensor

from audiollm.config import ConfigError
from audiollm.data.sample import Sample
from audiollm.files import atomic_path, read_json, write_json

Encodings = list[list[np.ndarray]]
"""Several encodings of a sample, each a list of codes `[K, T]`, one an audio part."""


@dataclass(frozen=True)
class CodedSample:
    """A sample with the codes of its audio parts, in one or more encodings."""

    sample: Sample
    encodings: list[list[Tensor]]
    """int64 `[K, T]` each."""

    @property
    def frames(self) -> int:
        return sum(codes.shape[1] for codes in self.encodings[0])


class ShardWriter:
    """Writes samples, numbered from 0, into `shard-000000.tar` and so on."""

    def __init__(self, folder: Path, samples_per_shard: int) -> None:
        self._folder, self._per_shard = folder, samples_per_shard
        folder.mkdir(parents=True, exist_ok=True)
        self._pending: list[tuple[Sample, Encodings]] = []
        self._shard = 0

    def has(self, index: int) -> bool:
        """Whether sample `index` is in a shard that an earlier attempt finished."""
        shard = index // self._per_shard
        if shard != self._shard:
            self._flush()
            self._shard = shard
        return self._path(shard).exists()

    def write(self, index: int, sample: Sample, encodings: Encodings) -> None:
        """Add sample `index`; indices must rise."""
        if index // self._per_shard != self._shard:
            self._flush()
            self._shard = index // self._per_shard
        self._pending.append((sample, encodings))

    def close(self, facts: dict[str, Any]) -> dict[str, int]:
        """Finish the last shard and write `index.json` with `facts`; returns counts."""
        self._flush()
        names = sorted(path.name for path in self._folder.glob("shard-*.tar"))
        counts = {"samples": 0, "frames": 0, "shards": len(names)}
        for coded in _read_all(self._folder, names):
            counts["samples"] += 1
            counts["frames"] += coded.frames
        write_json(self._folder / "index.json", {**facts, "shards": names, "counts": counts})
        return counts

    def _path(self, shard: int) -> Path:
        return self._folder / f"shard-{shard:06d}.tar"

    def _flush(self) -> None:
        if not self._pending:
            return
        with (
            atomic_path(self._path(self._shard)) as temporary,
            webdataset.TarWriter(str(temporary), mtime=0) as tar,
        ):
            for number, (sample, encodings) in enumerate(self._pending):
                tar.write(
                    {
                        "__key__": f"{self._shard:06d}{number:06d}",
                        "json": sample.model_dump(mode="json"),
                        "codes.npz": _to_bytes(encodings),
                    }
                )
        self._pending = []


def read_index(folder: Path) -> dict[str, Any]:
    """The folder's `index.json`.

    Raises:
        ConfigError: there is none.
    """
    if not (folder / "index.json").exists():
        raise ConfigError(
            "no index.json: not a folder of shards, or unfinished", str(folder), "run `tokenize`"
        )
    index: dict[str, Any] = read_json(folder / "index.json")
    return index


def read_shards(folder: Path) -> Iterator[CodedSample]:
    """Every sample of a finished folder of shards, in order."""
    yield from _read_all(folder, read_index(folder)["shards"])


def _read_all(folder: Path, names: list[str]) -> Iterator[CodedSample]:
    if not names:
        return
    # an absolute path: webdataset runs names that begin with "pipe:"; and no `.decode()`: it unpickles members
    urls = [str(folder.resolve() / Path(name).name) for name in names]
    dataset = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
    for row in dataset:
        yield CodedSample(Sample.model_validate_json(row["json"]), _from_bytes(row["codes.npz"]))


def _to_bytes(encodings: Encodings) -> bytes:
    arrays = {
        f"{variant}-{part}": codes for variant, row in enumerate(encodings) for part, codes in enumerate(row)
    }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _from_bytes(data: bytes) -> list[list[Tensor]]:
    arrays = np.load(io.BytesIO(data), allow_pickle=False)
    encodings: list[list[Tensor]] = []
    for name in sorted(arrays, key=lambda n: tuple(int(x) for x in n.split("-"))):
        variant = int(name.split("-")[0])
        while len(encodings) <= variant:
            encodings.append([])
        encodings[variant].append(torch.from_numpy(arrays[name].astype(np.int64)))
    return encodings
