"""Samples in webdataset shards: tars of `<key>.json` with codes, sound and arrays beside it.

The members are `<key>.codes.npz`, `<key>.<part>.flac` and `<key>.<array>.safetensors`.

A shard is written under a temporary name and renamed, so one that exists is whole; a run that was cut short
goes on with the first shard that is missing. `index.json` is written last. The index (`shard_index.py`) says where
each sample begins, so that it is read by one seek and one read.

Shapes: K codebooks, T frames, N samples.
"""

from __future__ import annotations

import io
import math
import re
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from torch import Tensor

from audiollm.data.records.arrays import array_member, member_arrays
from audiollm.data.records.sample import Sample, parse_sample
from audiollm.data.records.shard_index import (
    BLOCK,
    CODES,
    JSON,
    SOUND,
    ShardIndex,
    index_shards,
    open_index,
    split_name,
)
from audiollm.data.records.source import AudioClip, LoadedSample
from audiollm.data.records.storage import join_address, read_range
from audiollm.errors import BadSample, ConfigError
from audiollm.files.atomic import atomic_path, read_record

__all__ = ["CodedSample", "Encodings", "ShardWriter", "Shards", "index_shards", "read_index", "read_shards"]

Encodings = list[list[np.ndarray]]
"""Several encodings of a sample, each a list of codes `[K, T]`, one an audio part."""

CodedSample = LoadedSample

_MEMBER = re.compile(rf"[\w-]+\.({'|'.join(sorted(SOUND))})")


class ShardWriter:
    """Writes samples, numbered from 0, into `shard-000000.tar` and so on."""

    def __init__(self, folder: Path, samples_per_shard: int) -> None:
        self._folder, self._per_shard = folder, samples_per_shard
        folder.mkdir(parents=True, exist_ok=True)
        self._pending: list[dict[str, Any]] = []
        self._shard = 0

    def has(self, index: int) -> bool:
        """Return whether sample `index` is in a shard that an earlier attempt finished."""
        shard = index // self._per_shard
        if shard != self._shard:
            self.flush()
            self._shard = shard
        return self._path(shard).exists()

    def write(
        self,
        index: int,
        sample: Sample,
        encodings: Encodings,
        audio: Mapping[str, bytes] | None = None,
        arrays: Mapping[str, bytes] | None = None,
    ) -> None:
        """Add sample `index`; indices must rise.

        Args:
            encodings: none, or each with the codes of every audio part.
            audio: contents of sound files by the `path` of their audio part: "0.flac", "voice.mp3".
            arrays: files of named arrays (`array_bytes`); they replace those that the sample names.

        Raises:
            ValueError: sound of a path that no audio part has, or a name that cannot be a member's.
        """
        files = {array_member(name): content for name, content in (arrays or {}).items()}
        sample = sample.model_copy(update={"arrays": {name: array_member(name) for name in arrays or {}}})
        paths = {audio_part.path for audio_part in sample.audio_parts()}
        for path in audio or {}:
            if path not in paths or not _MEMBER.fullmatch(path):
                raise ValueError(
                    f"sample {sample.id!r}: sound named {path!r}; it must be the path of an audio part, "
                    f"like 0.flac ({', '.join(sorted(SOUND))})"
                )
        if index // self._per_shard != self._shard:
            self.flush()
            self._shard = index // self._per_shard
        members = {CODES: _to_bytes(encodings)} if encodings else {}
        record = {JSON: sample.model_dump(mode="json"), **members, **files, **(audio or {})}
        self._pending.append(record)

    def close(self, facts: dict[str, Any]) -> dict[str, int]:
        """Finish the last shard and write `index.json` with `facts`; returns counts."""
        self.flush()
        return index_shards(self._folder, facts).counts

    def flush(self) -> None:
        """Write the samples that were added since the last shard as a shard of their own; no further one joins it."""
        if not self._pending:
            return
        with (
            atomic_path(self._path(self._shard)) as temporary,
            webdataset.TarWriter(str(temporary), mtime=0) as tar,
        ):
            for number, record in enumerate(self._pending):
                tar.write({"__key__": f"{self._shard:06d}{number:06d}", **record})
        self._pending = []

    def _path(self, shard: int) -> Path:
        return self._folder / f"shard-{shard:06d}.tar"


DEFAULT_MAX_CODES_MB = 64.0
"""Limit of a sample's unpacked codes: about 11 hours of the default codec's codes in int64."""


class Shards:
    """A folder of shards, or one tar, as a `Source`: local or at any fsspec URL, made by us or by others.

    An audio part's sound is the member that its `path` names (`0.flac` is `<key>.0.flac`), or the only one
    there is. No path leads out of the tar.

    Args:
        max_codes_mb: a sample whose codes take more when they are unpacked is bad: 0.5 MB of a zip can hold 512.

    Raises:
        ConfigError: there are no shards, or an index that cannot be read.
    """

    def __init__(self, url: str | Path, max_codes_mb: float = DEFAULT_MAX_CODES_MB) -> None:
        index = open_index(url)
        self._max_codes_mb = max_codes_mb
        self.name: str = index.url
        self.facts: dict[str, Any] = index.facts
        """Entries of `index.json` besides the list of shards, such as the codec."""
        self.bad: tuple[BadSample, ...] = index.bad
        """Cut or missing tars and doubled ids, found when the index was made or opened."""
        self.digest: str = index.digest
        self._places = index.places
        self._codebooks = _codec_fact(index, "num_codebooks")
        self._codebook_size = _codec_fact(index, "codebook_size")

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> LoadedSample:
        place, members = self._members(index)
        loaded = _load_shard_sample(place, members, self._max_codes_mb)
        if not loaded.encodings and self._codebooks is not None and loaded.audio:
            raise BadSample(place, loaded.sample.id, "has audio and no codes (.codes.npz)", "missing codes")
        for clip in loaded.audio:
            if clip.content is None and not loaded.encodings and not loaded.arrays:
                raise BadSample(
                    clip.place, clip.sample_id, "has neither codes, arrays nor sound", "missing audio"
                )
        self._check_codes(place, loaded)
        return loaded

    def coded(self, index: int) -> LoadedSample:
        """Sample `index` as it stands there, its codes compared with nothing.

        Raises:
            BadSample: it cannot be read.
        """
        return _load_shard_sample(*self._members(index), self._max_codes_mb)

    def _members(self, index: int) -> tuple[str, dict[str, bytes]]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: no sample {index} among {len(self)}")
        tar, offset, size = self._places[index]
        try:
            content = read_range(tar, offset, size)
        except OSError as error:
            raise BadSample(
                f"{tar} at byte {offset}", "", f"cannot be read ({error})", "unreadable file"
            ) from error
        if len(content) < size:
            reason = f"has been cut short to {offset + len(content)} bytes since it was opened"
            raise BadSample(f"{tar} at byte {offset}", "", reason, "truncated tar")
        try:
            return _split_members(tar, content)
        except (tarfile.TarError, ValueError) as error:
            reason = f"is no tar there ({error}): remove index.json, it is made anew"
            raise BadSample(f"{tar} at byte {offset}", "", reason, "truncated tar") from error

    def _check_codes(self, place: str, loaded: LoadedSample) -> None:
        for encoding in loaded.encodings:
            if len(encoding) != len(loaded.audio):
                reason = f"codes of {len(encoding)} audio parts, and the sample has {len(loaded.audio)}"
                raise BadSample(place, loaded.sample.id, reason, "missing codes")
            for codes_KT in encoding:
                if reason := self._wrong_codes(codes_KT):
                    raise BadSample(place, loaded.sample.id, reason, "codes out of range")

    def _wrong_codes(self, codes_KT: Tensor) -> str:
        if codes_KT.ndim != 2 or codes_KT.numel() == 0:
            return f"codes are [codebooks, frames], and these {list(codes_KT.shape)}"
        if self._codebooks is not None and codes_KT.shape[0] != self._codebooks:
            return f"codes of {codes_KT.shape[0]} codebooks, and the index says {self._codebooks}"
        low, high = (int(value) for value in torch.aminmax(codes_KT))
        if low < 0 or (self._codebook_size is not None and high >= self._codebook_size):
            return f"codes from {low} to {high}, and the codec's are 0 to {(self._codebook_size or 0) - 1}"
        return ""


def read_index(folder: Path) -> dict[str, Any]:
    """The folder's `index.json`.

    Raises:
        ConfigError: there is none.
    """
    if not (folder / "index.json").exists():
        raise ConfigError(
            "no index.json: not a folder of shards, or unfinished", str(folder), "run `tokenize`"
        )
    return read_record(folder / "index.json", "remove it: it is made anew from the tars")


def read_shards(folder: Path) -> Iterator[CodedSample]:
    """Every sample of a finished folder of shards, in order.

    Raises:
        BadSample: a shard is missing or cut, or a sample cannot be read.
    """
    read_index(folder)
    shards = Shards(folder)
    if shards.bad:
        raise shards.bad[0]
    for index in range(len(shards)):
        yield shards.coded(index)


# Private


def _codec_fact(index: ShardIndex, key: str) -> int | None:
    codec = index.facts.get("codec") or {}
    value = codec.get(key) if isinstance(codec, dict) else codec
    if value is not None and not isinstance(value, int):
        raise ConfigError(
            f"codec.{key} must be a number, not {value!r:.60}", join_address(index.url, "index.json")
        )
    return value


def _split_members(tar: str, content: bytes) -> tuple[str, dict[str, bytes]]:
    """The place of a sample, and its members by what follows the key."""
    members: dict[str, bytes] = {}
    key = ""
    for name, start, size in _plain_members(content) or _all_members(content):
        named = split_name(name)
        if named is not None:
            key = named[0]
            members[named[1]] = content[start : start + size]
    return f"{tar}/{key}", members


def _plain_members(content: bytes) -> list[tuple[str, int, int]] | None:
    """Names, offsets and sizes; None where a header is not that of a file with a short name, which tarfile reads.

    Nearly all are, and tarfile takes a good part of the time that decoding a short clip takes. The fields are those
    of POSIX.1-1988 (ustar): name 0:100, size 124:136 in octal, type 156, magic 257:262, prefix of the name 345:500.
    """
    members, offset = [], 0
    while offset + BLOCK <= len(content):
        header = content[offset : offset + BLOCK]
        is_plain = header[156] in b"0\0" and header[257:262] == b"ustar" and header[345] == 0
        if not (is_plain and header[124:135].isdigit() and header[:100].isascii()):
            return None
        size = int(header[124:135], 8)
        members.append((header[:100].partition(b"\0")[0].decode("ascii"), offset + BLOCK, size))
        offset += BLOCK - (-size // BLOCK) * BLOCK
    return members


def _all_members(content: bytes) -> list[tuple[str, int, int]]:
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        return [(member.name, member.offset_data, member.size) for member in archive if member.isfile()]


def _load_shard_sample(place: str, members: Mapping[str, bytes], max_codes_mb: float) -> LoadedSample:
    if JSON not in members:
        raise BadSample(place, "", "has no .json", "missing json")
    sample = parse_sample(members[JSON], f"{place}.{JSON}")
    try:
        encodings = _from_bytes(members[CODES], max_codes_mb) if CODES in members else []
    except (ValueError, OSError, KeyError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise BadSample(
            f"{place}.{CODES}", sample.id, f"no codes in it ({error})", "undecodable codes"
        ) from None
    return LoadedSample(
        sample, encodings, _clips(place, sample, members), member_arrays(sample, place, members)
    )


def _clips(place: str, sample: Sample, members: Mapping[str, bytes]) -> tuple[AudioClip, ...]:
    parts = sample.audio_parts()
    sounds = [name for name in members if name.rpartition(".")[2].lower() in SOUND]
    only = sounds[0] if len(sounds) == 1 and len({audio_part.path for audio_part in parts}) == 1 else None
    clips = []
    for audio_part in parts:
        named = audio_part.path.removeprefix(f"{place.rpartition('/')[2]}.")
        member = named if named in sounds else only
        content = None if member is None else members[member]
        clips.append(
            AudioClip(
                f"{place}.{member or audio_part.path}",
                sample.id,
                content,
                audio_part.start_s,
                audio_part.end_s,
            )
        )
    return tuple(clips)


def _check_unpacked_size(data: bytes, max_mb: float) -> None:
    """Before anything is unpacked; the zip's own reader gives no more bytes than its list of files says."""
    form = np.lib.format
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        total_mb = sum(info.file_size for info in archive.infolist()) / 2**20
        if total_mb > max_mb:
            raise ValueError(
                f"{total_mb:.0f} MB unpacked, the limit is {max_mb:g} MB; max_codes_mb raises it where that is right"
            )
        for info in archive.infolist():
            with archive.open(info) as member:
                first = form.read_magic(member) == (1, 0)
                shape, _, dtype = (form.read_array_header_1_0 if first else form.read_array_header_2_0)(
                    member
                )
                if member.tell() + math.prod(shape) * dtype.itemsize != info.file_size:
                    raise ValueError(f"{info.filename}: its header says {shape} and its size is another")


def _to_bytes(encodings: Encodings) -> bytes:
    arrays = {
        f"{variant}-{part_number}": codes
        for variant, row in enumerate(encodings)
        for part_number, codes in enumerate(row)
    }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _from_bytes(data: bytes, max_mb: float) -> list[list[Tensor]]:
    """
    Raises:
        ValueError, ...: no codes, more of them than `max_mb`, or headers that promise more than there is.
    """
    encodings: list[list[Tensor]] = []
    _check_unpacked_size(data, max_mb)
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        for name in sorted(arrays, key=lambda n: tuple(int(x) for x in n.split("-"))):
            codes = arrays[name]
            if codes.dtype.kind not in "iu":
                raise ValueError(f"{name} holds {codes.dtype}, not integers")
            variant = int(name.split("-")[0])
            if variant > len(encodings):
                raise ValueError(f"{name}: an encoding before it is missing")
            if variant == len(encodings):
                encodings.append([])
            encodings[variant].append(torch.from_numpy(codes.astype(np.int64)))
    return encodings
