"""Webdataset shards of segments: `<index>.tar` with `<id>.flac`, the sound in one rate and loudness, and `<id>.json`,
the row of the segment.

A shard follows from its rows and the settings alone, byte for byte (no times, no users, members in the order of the
rows), so shards can be made in any order, by any number of processes, and again. One that is there is whole and is
left alone.

Shapes: N samples.
"""

from __future__ import annotations

import io
import json
import math
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from audiollm.files.atomic import atomic_path, read_json, write_json
from audiollm.files.set_aside import UNREADABLE, set_aside_row

if TYPE_CHECKING:
    from audiollm.audio import Waveform

Row = Mapping[str, Any]
SHARD_NAME = r"%06d.tar"
INDEX_NAME = "index.json"
_MAX_PEAK = 0.99
_BYTES_PER_SAMPLE = 2
"""Uncompressed size, an upper bound of FLAC's: the rows of a shard are chosen before a sample is read."""
_BYTES_PER_ROW = 4096
"""Estimated size of two tar headers and the row's JSON."""


class ShardConfig(BaseModel):
    """Sound format and size of the shards."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sample_rate: int = Field(24_000, ge=8_000)
    """Sample rate in Hz; shards are mono."""
    loudness_lufs: float | None = Field(-23.0, ge=-70, le=0)
    """Loudness of each segment (ITU-R BS.1770-4), or as near as its peak allows; null: as it was recorded."""
    max_gain_db: float = Field(20.0, ge=0)
    """Largest gain: segments that are all but silent stay so."""
    max_bytes: int = Field(500_000_000, ge=1)
    """Largest size of a shard, at 16 bits per sample; a shard of a single segment may exceed it."""


class Shard(NamedTuple):
    """Name and rows of a shard, made or to be made."""

    name: str
    rows: tuple[Row, ...]


class ShardRecord(NamedTuple):
    """A finished shard: its content, and the segments that could not be read (rows of `set_aside.jsonl`)."""

    name: str
    digest: str
    ids: tuple[str, ...]
    seconds: float
    set_aside: tuple[dict[str, Any], ...]


def plan_shards(rows: Iterable[Row], config: ShardConfig) -> list[Shard]:
    """Distribute rows over shards, in their order, by their durations.

    Raises:
        ValueError: an id that is no file's name, or is there twice.
    """
    shards: list[list[Row]] = []
    used = 0.0
    used_ids: set[str] = set()
    for row in rows:
        _check_id(row["id"], used_ids)
        size = _segment_duration(row) * config.sample_rate * _BYTES_PER_SAMPLE + _BYTES_PER_ROW
        if not shards or used + size > config.max_bytes:
            shards.append([])
            used = 0.0
        shards[-1].append(row)
        used += size
    return [Shard(SHARD_NAME % index, tuple(shard_rows)) for index, shard_rows in enumerate(shards)]


def make_shard(shard: Shard, folder: Path, config: ShardConfig) -> ShardRecord:
    """Write one shard, or find that it is there already.

    A segment whose recording cannot be read any more is left out and reported. What was made is written beside the
    shard (`<index>.json`) after it, with a digest of the rows and settings: other rows make another shard.
    """
    from audiollm.audio import AudioError

    note = folder / f"{Path(shard.name).stem}.json"
    digest = _hash_shard(shard, config)
    earlier_record = _read_shard_record(note, folder / shard.name, digest)
    if earlier_record is not None:
        return earlier_record
    note.unlink(missing_ok=True)
    ids, aside, seconds = [], [], 0.0
    with (
        atomic_path(folder / shard.name) as temporary,
        tarfile.open(temporary, "w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for row in shard.rows:
            try:
                sound, duration_s = _encode_segment(row, config)
            except AudioError as error:
                aside.append(set_aside_row("annotate", row["path"], UNREADABLE, str(error), row["id"]))
                continue
            about = {
                **row, "sample_rate": config.sample_rate, "num_channels": 1, "duration_s": round(duration_s, 4),
                "source": {name: row[name] for name in ("sample_rate", "num_channels", "duration_s") if name in row},
            }  # fmt: skip
            _add_member(archive, f"{row['id']}.flac", sound)
            _add_member(
                archive, f"{row['id']}.json", json.dumps(about, ensure_ascii=False, sort_keys=True).encode()
            )
            ids.append(row["id"])
            seconds += duration_s
    record = ShardRecord(shard.name, digest, tuple(ids), round(seconds, 3), tuple(aside))
    write_json(note, record._asdict())
    return record


def parse_shard_record(value: Mapping[str, Any]) -> ShardRecord:
    """Rebuild a `ShardRecord` from the JSON of its `_asdict`."""
    ids, aside = tuple(value["ids"]), tuple(value["set_aside"])
    return ShardRecord(value["name"], value["digest"], ids, float(value["seconds"]), aside)


def finish_shards(folder: Path, config: ShardConfig, records: Sequence[ShardRecord]) -> dict[str, Any]:
    """Write `index.json` over all shards and delete shards of an earlier run that it lacks; returns its content."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {record.name for record in records}
    for old in folder.glob("[0-9]*.tar"):
        if old.name not in names:
            old.unlink()
            old.with_suffix(".json").unlink(missing_ok=True)
    for left_by_a_kill in folder.glob(".[0-9]*.*.tar"):
        left_by_a_kill.unlink(missing_ok=True)
    shards = [
        {"name": record.name, "segments": len(record.ids), "seconds": record.seconds,
         "bytes": (folder / record.name).stat().st_size}
        for record in sorted(records)
    ]  # fmt: skip
    index = {
        "sample_rate": config.sample_rate,
        "loudness_lufs": config.loudness_lufs,
        "segments": sum(len(record.ids) for record in records),
        "seconds": round(sum(record.seconds for record in records), 3),
        "set_aside": [row for record in sorted(records) for row in record.set_aside],
        "shards": shards,
    }
    write_json(folder / INDEX_NAME, index)
    return index


def remove_shards(folder: Path) -> None:
    """Delete the shards of an earlier run, and the folder where it holds nothing else."""
    shard_paths = list(folder.glob("[0-9]*.tar"))
    for old in shard_paths:
        old.unlink()
        old.with_suffix(".json").unlink(missing_ok=True)
    if shard_paths:
        (folder / INDEX_NAME).unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def standardize(sound: Waveform, config: ShardConfig) -> Waveform:
    """Convert to mono at the rate and loudness of the shards, with one gain for all samples and without clipping."""
    from audiollm.audio import Waveform, integrated_loudness_lufs

    sound = sound.mono().resample(config.sample_rate)
    if config.loudness_lufs is None:
        return sound
    loudness = integrated_loudness_lufs(sound)
    peak = float(sound.samples_CN.abs().max())
    if loudness == -math.inf or peak == 0:
        return sound
    gain = 10 ** (min(config.loudness_lufs - loudness, config.max_gain_db) / 20)
    return Waveform(sound.samples_CN * min(gain, _MAX_PEAK / peak), config.sample_rate)


# ---------------------------------------------------------------------------------------------- private


def _encode_segment(row: Row, config: ShardConfig) -> tuple[bytes, float]:
    from audiollm.audio import encode_bytes, load

    sound = standardize(load(row["path"], row["start_s"], row["end_s"]), config)
    return encode_bytes(sound.samples_CN, sound.sample_rate, "flac"), sound.duration_s


def _add_member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o644
    archive.addfile(member, io.BytesIO(content))


def _check_id(id: str, used_ids: set[str]) -> None:
    if not id or id in used_ids:
        raise ValueError(f"the id {id!r} occurs twice" if id else "a segment has no id")
    # webdataset takes what follows the first dot for the kind of a member
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,200}", id):
        raise ValueError(f"{id!r:.120} is not a valid file name: use letters, digits, - and _, at most 200")
    used_ids.add(id)


def _segment_duration(row: Row) -> float:
    return float(row["end_s"]) - float(row["start_s"])


def _hash_shard(shard: Shard, config: ShardConfig) -> str:
    made_of = [config.model_dump(), [dict(row) for row in shard.rows]]
    return sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def _read_shard_record(note: Path, tar: Path, digest: str) -> ShardRecord | None:
    """Return the shard that was made earlier from the same rows; None where it is absent or of other rows."""
    try:
        record = read_json(note)
    except (OSError, ValueError):
        return None
    if not tar.is_file() or not isinstance(record, dict) or record.get("digest") != digest:
        return None
    return parse_shard_record(record)
