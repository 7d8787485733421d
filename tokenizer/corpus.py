"""A corpus to shards of codes and back: the work of `audiollm tokenize` and `audiollm detokenize`.

Both can be killed at any moment and run again, and neither mixes two codecs, settings or inputs in one folder:
what the folder was begun with is written down in it and compared.

Shapes: C channels, N samples, K codebooks, T frames, V codes a codebook, D dimension of a code vector.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from pydantic import BaseModel, Field, TypeAdapter
from safetensors.torch import save_file
from torch import Tensor

from audiollm.audio import AudioError, probe
from audiollm.audio_stream import save_stream, stream_mono
from audiollm.codec import Codec, load_codec
from audiollm.config import ConfigError
from audiollm.data.sample import AudioPart, Sample
from audiollm.data.shards import CodedSample, ShardWriter, read_index, read_shards
from audiollm.files import atomic_path, read_json, write_json, write_jsonl
from audiollm.runner import StageError
from tokenizer.checks import check_codes
from tokenizer.data import audio_parts
from tokenizer.naming import OutputNames

LONG_S = 600.0
"""From here on a codec that takes a clip only as a whole needs a warning."""
PEAK = 0.99
RECORD = "tokenize.json"
CODED_AUDIO = "coded_audio"
"""The key of a sample's metadata that holds a `CodedAudio` for each audio part."""

Advance = Callable[[float], None]
"""Called with seconds of audio that are done."""


@runtime_checkable
class StreamingCodec(Protocol):
    """A codec that takes and gives sound in pieces, at constant memory."""

    def encode_stream(self, pieces_CN: Iterable[Tensor]) -> Iterator[Tensor]: ...

    def decode_stream(self, pieces_KT: Iterable[Tensor]) -> Iterator[Tensor]: ...


class CodedAudio(BaseModel):
    """What is known of an audio part beside its codes."""

    path: str
    num_samples: int = Field(gt=0)
    """At the codec's rate."""
    gain_db: float = Field(0.0, ge=-300, le=300, allow_inf_nan=False)
    """What was done to the level before encoding; decoding undoes it."""


@dataclass(frozen=True)
class Coding:
    """How a corpus is encoded.

    Args:
        codec: the codec's folder.
        num_codebooks: keep the first ones only; None: all.
        level_dbfs: bring each audio part to this RMS level first; None: leave it as it is.
    """

    codec: Path
    num_codebooks: int | None = None
    level_dbfs: float | None = None


@dataclass(frozen=True)
class Coded:
    """The codes `[K, T]` of a sample's audio parts, and the sample that says what they are of."""

    sample: Sample
    codes: list[np.ndarray]


class SetAside:
    """`set_aside.jsonl`: what could not be used and why, written line by line, so that a kill loses none."""

    def __init__(self, path: Path, stage: str, rows: Iterable[dict[str, str]] = ()) -> None:
        self.path, self._stage = path, stage
        self.rows: list[dict[str, str]] = []
        write_jsonl(path, rows := list(rows))
        self.rows += rows

    def add(self, sample_id: str, path: str, reason: str) -> None:
        self.rows.append({"id": sample_id, "path": path, "stage": self._stage, "reason": reason})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.rows[-1], ensure_ascii=False) + "\n")


# Encoding


def tokenize_samples(
    samples: Sequence[Sample],
    durations_s: Sequence[float],
    bad: Sequence[dict[str, str]],
    folder: Path,
    coding: Coding,
    samples_per_shard: int,
    workers: int = 1,
    strict: bool = False,
    advance: Advance = lambda seconds: None,
) -> tuple[dict[str, int], list[dict[str, str]]]:
    """Encode all samples' audio into shards below `folder`; finished shards are kept.

    Args:
        durations_s: of each sample, as far as is known; only `advance` goes by it.
        bad: rows that are set aside from the start.
        strict: stop at the first sample that cannot be encoded.

    Returns:
        The counts of samples, frames and shards, and the rows of `set_aside.jsonl`.

    Raises:
        StageError: a sample cannot be encoded and `strict` is set, or a worker or the disk fails.
    """
    codec = load_codec(coding.codec)
    if coding.num_codebooks is not None and not 1 <= coding.num_codebooks <= codec.num_codebooks:
        raise ConfigError(
            f"{coding.num_codebooks}: the codec has {codec.num_codebooks}", "--codebooks", "give fewer"
        )
    writer = ShardWriter(folder, samples_per_shard)
    todo = [index for index in range(len(samples)) if not writer.has(index)]
    left = {samples[index].id for index in todo}
    kept = [row for row in _read_rows(folder / "set_aside.jsonl") if row.get("id") not in {None, *left}]
    advance(sum(durations_s) - sum(durations_s[index] for index in todo))
    set_aside = SetAside(folder / "set_aside.jsonl", "tokenize", [*bad, *kept])
    try:
        for index, result in _encode_all(codec, samples, durations_s, todo, coding, workers, advance):
            if isinstance(result, Coded):
                writer.write(index, result.sample, [result.codes])
                continue
            set_aside.add(samples[index].id, _path_of(samples[index]), result)
            if strict:
                remedy = "mend or leave it out, or do without --strict: it is set aside then"
                raise StageError(f"{_path_of(samples[index])}: {result}", remedy, exit_code=2)
        counts = _finish(writer, folder, codec, coding)
    except OSError as error:
        remedy = "make room; the same command goes on from the last whole shard"
        raise StageError(f"{folder}: cannot be written ({error.strerror})", remedy) from error
    return counts, set_aside.rows


def planned_seconds(sample: Sample) -> float:
    """The duration of a sample's audio from the files' headers; 0 for what they do not tell."""
    return sum(_part_seconds(part) for part in audio_parts(sample))


def _part_seconds(part: AudioPart) -> float:
    try:
        known_s = probe(part.path).duration_s
    except AudioError:  # encoding will meet it again, and say so
        return 0.0
    ends = [end_s for end_s in (known_s, part.end_s) if end_s is not None]
    return max(0.0, min(ends, default=0.0) - part.start_s)


def _finish(writer: ShardWriter, folder: Path, codec: Codec, coding: Coding) -> dict[str, int]:
    books = coding.num_codebooks or codec.num_codebooks
    with atomic_path(folder / "codebooks.safetensors") as temporary:
        save_file({"vectors_KVD": codec.codebook_vectors_KVD[:books].contiguous()}, temporary)
    shape = {key: getattr(codec, key) for key in ("frame_rate", "codebook_size", "sample_rate")}
    facts = {**shape, "num_codebooks": books, "path": str(coding.codec.resolve())}
    return writer.close({"codec": {**facts, "fingerprint": folder_fingerprint(coding.codec)}})


def _encode_all(
    codec: Codec,
    samples: Sequence[Sample],
    durations_s: Sequence[float],
    todo: Sequence[int],
    coding: Coding,
    workers: int,
    advance: Advance,
) -> Iterator[tuple[int, Coded | str]]:
    """The samples `todo` in order, each with its codes or with the reason why it has none."""
    with one_thread():
        if workers > 1:
            for index, result in _encode_in_processes(samples, todo, coding, workers):
                advance(durations_s[index])
                yield index, result
            return
        for index in todo:
            done = [0.0]

            def within(seconds: float, done: list[float] = done) -> None:
                done[0] += seconds
                advance(seconds)

            yield index, _attempt(codec, samples[index], coding, within)
            advance(durations_s[index] - done[0])


def _attempt(codec: Codec, sample: Sample, coding: Coding, advance: Advance) -> Coded | str:
    parts = audio_parts(sample)
    if not parts:
        return "holds no audio part"
    try:
        pairs = [_encode_part(codec, part, coding, advance) for part in parts]
    except AudioError as error:
        return error.reason
    except ValueError as error:  # a codec's refusal: too short or too long for it
        return f"cannot be encoded: {error}"
    metadata = {**sample.metadata, CODED_AUDIO: [about.model_dump() for _, about in pairs]}
    return Coded(sample.model_copy(update={"metadata": metadata}), [codes_KT for codes_KT, _ in pairs])


def _encode_part(
    codec: Codec, part: AudioPart, coding: Coding, advance: Advance
) -> tuple[np.ndarray, CodedAudio]:
    """Codes `[K, T]` of an audio part, at constant memory where the codec can."""

    def pieces() -> Iterator[Tensor]:
        return stream_mono(part.path, codec.sample_rate, part.start_s, part.end_s)

    gain = 1.0 if coding.level_dbfs is None else level_gain(pieces(), coding.level_dbfs)
    num_samples = 0

    def levelled() -> Iterator[Tensor]:
        nonlocal num_samples
        for piece_1N in pieces():
            num_samples += piece_1N.shape[1]
            advance(piece_1N.shape[1] / codec.sample_rate)
            yield piece_1N if gain == 1.0 else (piece_1N.double() * gain).float().clamp(-PEAK, PEAK)

    if isinstance(codec, StreamingCodec):
        codes_KT = torch.cat(list(codec.encode_stream(levelled())), dim=1)
    else:
        codes_KT = codec.encode(torch.cat(list(levelled()), dim=1))
    dtype = np.int16 if codec.codebook_size <= 2**15 else np.int32
    about = CodedAudio(path=part.path, num_samples=num_samples, gain_db=20 * math.log10(gain))
    return codes_KT[: coding.num_codebooks].cpu().numpy().astype(dtype), about


def level_gain(pieces_1N: Iterable[Tensor], level_dbfs: float) -> float:
    """The gain of `audio.normalize_rms` for a waveform in pieces; 1 for silence."""
    energy, peak, count = 0.0, 0.0, 0
    for piece_1N in pieces_1N:
        energy += float(piece_1N.double().square().sum())
        peak = max(peak, float(piece_1N.abs().max()))
        count += piece_1N.shape[1]
    return min(10 ** (level_dbfs / 20) / math.sqrt(energy / count), PEAK / peak) if energy else 1.0


@contextmanager
def one_thread() -> Iterator[None]:
    """Clips are encoded singly: on such small work threads wait for one another more than they do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# Processes


def _encode_in_processes(
    samples: Sequence[Sample], todo: Sequence[int], coding: Coding, workers: int
) -> Iterator[tuple[int, Coded | str]]:
    """In order, with a few samples ahead of the one that is waited for."""
    # spawned: a fork of a process with torch's threads can hang
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (coding,))
    ahead: deque[tuple[int, Future[Coded | str]]] = deque()
    try:
        for index in todo:
            ahead.append((index, pool.submit(_work, samples[index])))
            if len(ahead) >= 4 * workers:
                number, future = ahead.popleft()
                yield number, future.result()
        for number, future in ahead:
            yield number, future.result()
    except BrokenProcessPool as error:
        remedy = "out of memory? the same command goes on; give fewer --workers"
        raise StageError("a worker process was killed", remedy) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker: tuple[Codec, Coding]


def _start_worker(coding: Coding) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops the pool
    torch.set_num_threads(1)
    _worker = (load_codec(coding.codec), coding)


def _work(sample: Sample) -> Coded | str:
    codec, coding = _worker
    return _attempt(codec, sample, coding, lambda seconds: None)


# Decoding


def open_shards(folder: Path, codec: Path | None) -> tuple[Codec, Path, dict[str, Any]]:
    """The codec for a folder of shards (the one its index names by default), its folder, and the index.

    Raises:
        ConfigError: no shards or no codec there, or one that these codes are not of.
    """
    index, where = read_index(folder), str(folder / "index.json")
    facts: dict[str, Any] = index.get("codec") or {}
    missing = [name for name in index["shards"] if not (folder / Path(name).name).is_file()]
    if missing:
        raise ConfigError(f"{missing[0]} is missing", str(folder), "bring it back, or tokenize anew")
    place = codec or Path(str(facts.get("path", "")))
    if not facts.get("path") and codec is None:
        raise ConfigError("the index names no codec", where, "give its folder with --codec")
    if not place.is_dir():
        raise ConfigError(f"no codec at {place}", where, "give its folder with --codec")
    if codec is None and facts.get("fingerprint", (now := folder_fingerprint(place))) != now:
        remedy = "give the codec of these codes with --codec, or tokenize anew"
        raise ConfigError(f"the codec at {place} has changed since", where, remedy)
    loaded = load_codec(place)
    for key in ("frame_rate", "sample_rate", "codebook_size"):
        if key in facts and facts[key] != getattr(loaded, key):
            reason = f"{key}: the codes have {facts[key]}, the codec at {place} {getattr(loaded, key)}"
            raise ConfigError(reason, where, "give the codec of these codes with --codec")
    return loaded, place, index


def detokenize_shards(
    folder: Path,
    codec: Codec,
    out: Path,
    num_codebooks: int | None,
    extension: str,
    advance: Advance = lambda seconds: None,
) -> tuple[dict[str, int], list[dict[str, str]]]:
    """Decode every audio part to `out/<id>.<extension>`; a file that is there is kept as it is.

    Returns:
        The counts of files written and of files kept, and the rows of `set_aside.jsonl`.

    Raises:
        StageError: a file cannot be written.
    """
    counts = {"written": 0, "kept": 0}
    names = OutputNames(out, extension)
    set_aside = SetAside(out / "set_aside.jsonl", "detokenize")
    with one_thread():
        # an absolute path: webdataset takes a relative one that begins with `pipe:` for a command
        for coded in read_shards(folder.resolve()):
            paths = names.take(coded.sample.id, len(audio_parts(coded.sample)))
            try:
                for path, codes_KT, about in zip(paths, *_recorded(coded), strict=True):
                    kept = path.exists()
                    if not kept:
                        pieces = _decode_part(codec, codes_KT[:num_codebooks], about)
                        save_stream(path, pieces, codec.sample_rate)
                    counts["kept" if kept else "written"] += 1
                    advance(codes_KT.shape[1] / codec.frame_rate)
            except AudioError as error:
                raise StageError(str(error), "the same command goes on from here") from error
            except ValueError as error:
                set_aside.add(coded.sample.id, str(folder), f"cannot be decoded: {error}")
    return counts, set_aside.rows


def _recorded(coded: CodedSample) -> tuple[list[Tensor], list[CodedAudio | None]]:
    """A sample's first encoding, with what is known of each part (nothing, in the shards of a recipe's stage).

    Raises:
        ValueError: not one entry for each audio part, or not what it should be.
    """
    codes = coded.encodings[0] if coded.encodings else []
    abouts: list[CodedAudio | None] = [None] * len(codes)
    if CODED_AUDIO in coded.sample.metadata:
        abouts = list(TypeAdapter(list[CodedAudio]).validate_python(coded.sample.metadata[CODED_AUDIO]))
    parts = len(audio_parts(coded.sample))
    if not parts == len(codes) == len(abouts):
        raise ValueError(f"{parts} audio parts, {len(codes)} of them with codes, {len(abouts)} described")
    return codes, abouts


def _decode_part(codec: Codec, codes_KT: Tensor, about: CodedAudio | None) -> Iterator[Tensor]:
    """Pieces `[1, n]`, at the level of the original and cut to its length."""
    check_codes(codes_KT, codec.num_codebooks, codec.codebook_size)
    stream = codec.decode_stream([codes_KT]) if isinstance(codec, StreamingCodec) else [codec.decode(codes_KT)]
    left = about.num_samples if about else None
    gain = 10 ** (-about.gain_db / 20) if about else 1.0
    for piece_1N in stream:
        kept_1N = piece_1N[:, :left]
        left = None if left is None else left - kept_1N.shape[1]
        yield kept_1N * gain


# What a folder was begun with


def folder_fingerprint(folder: Path) -> str:
    from audiollm.evaluate.commands import folder_fingerprint as digest
    return digest(folder)
