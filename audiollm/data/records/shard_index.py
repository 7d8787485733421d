"""The index of a folder of tars: `index.json` (facts and names) and `index.safetensors` (where each sample begins).

An index is trusted for the tars whose size it knows; others, cut, missing or new, are scanned again as it is
opened. A tar that is cut gives the samples before the cut and one `BadSample`.

Shapes: N samples, S tars.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors.numpy

from audiollm.data.records.sample import parse_sample
from audiollm.data.records.storage import (
    file_size,
    is_url,
    join_address,
    list_sizes,
    open_file,
    parent,
    read_all,
    write_bytes,
)
from audiollm.errors import BadSample, ConfigError

JSON, CODES = "json", "codes.npz"
"""Extensions of tar members, after the sample's key."""
SOUND = frozenset({"flac", "wav", "mp3", "ogg", "opus", "m4a"})
"""Last extensions of members that hold sound."""
INDEX, ARRAYS = "index.json", "index.safetensors"
BLOCK = tarfile.BLOCKSIZE

_NAME = re.compile(r"((?:.*/)?[^./][^.]*)\.([^/]+)")
_ROWS = {
    "shard": np.int32,
    "offset": np.int64,
    "size": np.int64,
    "frames": np.int64,
    "id_hash": np.int64,
}


@dataclass(frozen=True)
class Places:
    """Positions of all samples, sufficient to read them: 20 bytes per sample."""

    tars: list[str]
    """Addresses of the tars."""
    shard_N: np.ndarray
    offset_N: np.ndarray
    size_N: np.ndarray

    def __len__(self) -> int:
        return len(self.offset_N)

    def __getitem__(self, index: int) -> tuple[str, int, int]:
        """The address of the tar that sample `index` is in, and the offset and size of its members there."""
        return self.tars[int(self.shard_N[index])], int(self.offset_N[index]), int(self.size_N[index])


@dataclass(frozen=True)
class ShardIndex:
    """The samples of a folder of tars, in the order of the tars."""

    url: str
    facts: dict[str, Any]
    tars: list[str]
    rows: dict[str, np.ndarray]
    bad: tuple[BadSample, ...]

    def __len__(self) -> int:
        return len(self.rows["offset"])

    @property
    def counts(self) -> dict[str, int]:
        return {"samples": len(self), "frames": int(self.rows["frames"].sum()), "shards": len(self.tars)}

    @property
    def places(self) -> Places:
        folder = parent(self.url) if self.url.endswith(".tar") else self.url
        tars = [join_address(folder, tar) for tar in self.tars]
        return Places(tars, self.rows["shard"], self.rows["offset"], self.rows["size"])

    @property
    def digest(self) -> str:
        """Digest of the ids in order and of the position of each sample."""
        digest = hashlib.sha256()
        for key in ("id_hash", "shard", "offset", "size"):
            digest.update(self.rows[key].tobytes())
        return digest.hexdigest()


def index_shards(url: str | Path, facts: Mapping[str, Any] | None = None) -> ShardIndex:
    """Scan all tars of a folder (headers, the json and the shape of the codes) and write the index beside them.

    Args:
        facts: what `index.json` is to say beside; None: what it says now.

    Raises:
        ConfigError: there is no such folder.
        OSError: the index cannot be written.
    """
    url = str(url)
    files = _list_shard_files(url)
    names = sorted(name for name in files if name.endswith(".tar") and not name.startswith("."))
    saved_facts = _read_index_record(url)[0] if facts is None and INDEX in files else {}
    index = _assemble_index(url, dict(saved_facts if facts is None else facts), names, files, None, ())
    _write_arrays(index, [files[name] for name in names])
    record = {**index.facts, "shards": names, "counts": index.counts}
    if index.bad:
        record["set_aside"] = [bad.row() for bad in index.bad]
    write_bytes(join_address(url, INDEX), (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())
    return index


def open_index(url: str | Path) -> ShardIndex:
    """The index of a folder of tars, or of one tar; what it does not know of is scanned now.

    A folder that has none gets one where it can be written.

    Raises:
        ConfigError: no such folder or tar, no tars in it, or an `index.json` that cannot be read.
    """
    url = str(url)
    if url.endswith(".tar"):
        return _one_tar(url)
    files = _list_shard_files(url)
    if INDEX not in files:
        if not any(name.endswith(".tar") for name in files):
            raise ConfigError("a folder without shards", url, "give a folder of .tar")
        try:
            return index_shards(url)
        except OSError:  # a folder that is not ours to write to: it is scanned each time
            names = sorted(name for name in files if name.endswith(".tar") and not name.startswith("."))
            return _assemble_index(url, {}, names, files, None, ())
    facts, names, bad = _read_index_record(url)
    saved = _read_arrays(url, len(names)) if ARRAYS in files else None
    index = _assemble_index(url, facts, names, files, saved, bad)
    if saved is None and all(name in files for name in names):
        with contextlib.suppress(OSError):  # as above
            _write_arrays(index, [files[name] for name in names])
    return index


def split_name(name: str) -> tuple[str, str] | None:
    """The key of a member and what follows it, as webdataset splits them: at the first dot of the file's name."""
    match = _NAME.fullmatch(name)
    return (match[1], match[2].lower()) if match else None


# Private: the index as a whole


def _list_shard_files(url: str) -> dict[str, int]:
    try:
        files = list_sizes(url)
    except OSError as error:
        raise ConfigError(f"cannot be listed ({error})", url, "check the address") from error
    if files is None:
        raise ConfigError("no such folder of shards", url, "check the address")
    return files


def _one_tar(url: str) -> ShardIndex:
    try:
        size = file_size(url)
    except OSError as error:
        raise ConfigError(f"cannot be read ({error})", url, "check the address") from error
    name = url.rpartition("/")[2] if is_url(url) else Path(url).name
    return _assemble_index(url, {}, [name], {name: size}, None, ())


def _assemble_index(
    url: str,
    facts: dict[str, Any],
    names: Sequence[str],
    sizes: Mapping[str, int],
    saved: dict[str, np.ndarray] | None,
    bad: Sequence[BadSample],
) -> ShardIndex:
    """The saved rows of the tars that are as they were, and new ones of the others."""
    tar_bytes_S = saved["tar_bytes"] if saved is not None else np.full(len(names), -1)
    stale = [s for s, name in enumerate(names) if sizes.get(name, -2) != tar_bytes_S[s]]
    folder = parent(url) if url.endswith(".tar") else url
    scanned = _Scanned()
    for shard in stale:
        address = join_address(folder, names[shard])
        if names[shard] in sizes:
            scanned.scan(address, shard)
        else:
            scanned.bad.append(BadSample(address, "", "the shard is missing: bring it back", "missing shard"))
    for name in sorted(set(sizes) - set(names)):
        if name.endswith(".tar") and not name.startswith(".") and not url.endswith(".tar"):
            reason = f"is not in {INDEX}: remove that file, and it is made anew with this shard"
            scanned.bad.append(BadSample(join_address(folder, name), "", reason, "unlisted shard"))
    rows = scanned.arrays()
    if saved is not None:
        fresh_N = ~np.isin(saved["shard"], stale)
        rows = {key: np.concatenate([saved[key][fresh_N], rows[key]]) for key in _ROWS}
    if stale:
        order_N = np.lexsort((rows["offset"], rows["shard"]))
        rows = {key: values[order_N] for key, values in rows.items()}
        rows = _drop_doubled(rows, scanned, [join_address(folder, name) for name in names])
    return ShardIndex(url, facts, list(names), rows, (*bad, *scanned.bad))


def _drop_doubled(rows: dict[str, np.ndarray], scanned: _Scanned, tars: list[str]) -> dict[str, np.ndarray]:
    """The first sample of each id."""
    _, first_N = np.unique(rows["id_hash"], return_index=True)
    doubled_N = np.ones(len(rows["id_hash"]), bool)
    doubled_N[first_N] = False
    for n in np.flatnonzero(doubled_N):
        place = f"{tars[rows['shard'][n]]} at byte {rows['offset'][n]}"
        sample_id = scanned.ids.get(int(rows["id_hash"][n]), "")
        scanned.bad.append(BadSample(place, sample_id, "its id was used before", "doubled id"))
    return {key: values[~doubled_N] for key, values in rows.items()}


def _read_index_record(url: str) -> tuple[dict[str, Any], list[str], list[BadSample]]:
    """Facts, names of tars and bad samples of `index.json`; a name is one in the folder, whatever it says."""
    remedy = "remove it: it is made anew from the tars"
    try:
        record = json.loads(read_all(join_address(url, INDEX)).decode("utf-8"))
        names = [Path(name).name for name in record.pop("shards")]
        bad = [BadSample(**row) for row in record.pop("set_aside", ())]
        record.pop("counts", None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot be read ({error})", join_address(url, INDEX), remedy) from error
    return record, names, bad


def _read_arrays(url: str, num_tars: int) -> dict[str, np.ndarray] | None:
    """None where they are damaged or of another list of tars."""
    try:
        arrays: dict[str, np.ndarray] = safetensors.numpy.load(read_all(join_address(url, ARRAYS)))
    except (OSError, ValueError, safetensors.SafetensorError):
        return None
    lengths = {len(arrays.get(key, ())) for key in _ROWS}
    is_whole = set(arrays) == {*_ROWS, "tar_bytes"} and len(lengths) == 1
    return arrays if is_whole and len(arrays["tar_bytes"]) == num_tars else None


def _write_arrays(index: ShardIndex, tar_bytes: Sequence[int]) -> None:
    arrays = {**index.rows, "tar_bytes": np.array(tar_bytes, np.int64)}
    write_bytes(join_address(index.url, ARRAYS), safetensors.numpy.save(arrays))


# Private: one tar


@dataclass
class _Group:
    """The members of one key: what follows the key, and where the content is."""

    key: str
    offset: int
    end: int = 0
    members: dict[str, tuple[int, int]] = field(default_factory=dict)

    def read(self, file: IO[bytes], member: str) -> bytes:
        """The content of a member; nothing where there is none."""
        offset, size = self.members.get(member, (0, 0))
        file.seek(offset)
        return file.read(size)

    def looks_whole(self, file: IO[bytes]) -> bool:
        """Return whether every member that the sample's JSON names is present."""
        try:
            sample = parse_sample(self.read(file, JSON), self.key)
        except BadSample:
            return False
        return len(self.members) > 1 or not sample.audio_parts()


@dataclass
class _Scanned:
    """Rows of the index, gathered."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    bad: list[BadSample] = field(default_factory=list)
    ids: dict[int, str] = field(default_factory=dict)

    def arrays(self) -> dict[str, np.ndarray]:
        columns = list(zip(*self.rows, strict=True)) or [()] * len(_ROWS)
        return {
            key: np.array(column, dtype) for (key, dtype), column in zip(_ROWS.items(), columns, strict=True)
        }

    def scan(self, address: str, shard: int) -> None:
        """Add the samples of a tar, as far as it goes."""
        before = len(self.rows)
        try:
            with open_file(address) as file:
                groups, cut = _scan_groups(file)
                for group in groups:
                    self._add(group, file, address, shard)
        except (OSError, tarfile.TarError) as error:
            self.bad.append(BadSample(address, "", f"cannot be read ({error})", "unreadable file"))
            return
        if cut is not None:
            reason = f"the tar is cut or damaged here; {len(self.rows) - before} samples are before it"
            self.bad.append(BadSample(f"{address} at byte {cut}", "", reason, "truncated tar"))

    def _add(self, group: _Group, file: IO[bytes], address: str, shard: int) -> None:
        place = f"{address}/{group.key}"
        sample, frames = None, 0
        try:
            sample = parse_sample(group.read(file, JSON), place)
            frames = _num_frames(group.read(file, CODES)) if CODES in group.members else 0
        except (BadSample, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile):
            pass  # reading the sample meets it again, and names it
        number = _hash_id(sample.id if sample else place)
        self.ids[number] = sample.id if sample else ""
        self.rows.append((shard, group.offset, group.end - group.offset, frames, number))


def _scan_groups(file: IO[bytes]) -> tuple[list[_Group], int | None]:
    """The whole samples of a tar, and where it is cut (None: it is whole).

    Python's tarfile ends without a word at a header that is cut or damaged, so the end mark is looked for.
    """
    size, end = file.seek(0, io.SEEK_END), 0
    file.seek(0)
    groups: list[_Group] = []
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                named = split_name(member.name) if member.isfile() else None
                member_end = -(-(member.offset_data + member.size * member.isreg()) // BLOCK) * BLOCK
                if member_end > size:
                    is_first = named is None or not groups or groups[-1].key != named[0]
                    return (groups, member.offset) if is_first else (groups[:-1], groups[-1].offset)
                end = member_end
                if named is None:
                    continue
                if not groups or groups[-1].key != named[0]:
                    groups.append(_Group(named[0], member.offset))
                groups[-1].members[named[1]] = (member.offset_data, member.size)
                groups[-1].end = end
    except tarfile.TarError:
        pass
    file.seek(end)
    if file.read(BLOCK) == bytes(BLOCK):
        return groups, None
    if groups and not groups[-1].looks_whole(file):
        return groups[:-1], groups[-1].offset
    return groups, end


def _num_frames(content: bytes) -> int:
    """Frames of the first encoding by the headers of its arrays."""
    frames = 0
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in archive.namelist():
            if name.startswith("0-"):
                with archive.open(name) as member:
                    is_first_version = np.lib.format.read_magic(member) == (1, 0)
                    form = np.lib.format
                    read = form.read_array_header_1_0 if is_first_version else form.read_array_header_2_0
                    frames += int(read(member)[0][-1])
    return frames


def _hash_id(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
