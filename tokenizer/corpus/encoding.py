"""A corpus to shards of codes: the work of `audiollm tokenize`; `corpus_decoding` is the way back.

Both can be killed at any moment and run again, and neither mixes two codecs, settings or inputs in one folder:
what the folder was begun with is written down in it and compared.

Shapes: C channels, N samples, K codebooks, T frames, V codes a codebook, D dimension of a code vector.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from pydantic import BaseModel, Field
from safetensors.torch import save_file
from torch import Tensor

from audiollm.audio import AudioError, LevelMeter, probe
from audiollm.audio.decoding import length_difference
from audiollm.audio.samples import SILENCE_DBFS
from audiollm.audio.streams import stream_mono
from audiollm.cluster import TeamMember
from audiollm.codec import Codec, codec_digest, load_codec
from audiollm.data.records.sample import AudioPart, Sample
from audiollm.data.records.shards import ShardWriter
from audiollm.data.records.source import silent_part, teaches_words
from audiollm.devices import one_thread
from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.failures import note_failure, note_success, shared_watch
from audiollm.files.atomic import atomic_path, folder_digest, read_record, write_json
from audiollm.files.set_aside import UNREADABLE, Row, SetAside, read_set_aside, row_of
from tokenizer.corpus.cluster_work import ClusterWorkers, work_on_cluster
from tokenizer.corpus.processes import work_in_processes

LONG_S = 600.0
"""Longer audio does not go unnoticed into a codec that takes a clip only as a whole."""
SHARD_S = 3600.0
"""Seconds of audio per shard by default: a kill loses at most this much work."""
PEAK = 0.99
REFUSED = "cannot be encoded"
"""The kind of a sample whose sound the codec does not take."""
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
    """Facts about an audio part that are stored beside its codes."""

    path: str
    num_samples: int = Field(gt=0)
    """At the codec's rate."""
    length: str | None = Field(None, exclude_if=lambda value: value is None)
    """Sentence that names the difference where the file's header promises another duration than was decoded."""
    gain_db: float = Field(0.0, ge=-300, le=300, allow_inf_nan=False)
    """Gain applied before encoding; decoding undoes it."""


@dataclass(frozen=True)
class Coding:
    """Settings of encoding a corpus.

    Args:
        codec: the codec's folder.
        num_codebooks: keep the first ones only; None: all.
        level_dbfs: bring each audio part to this RMS level first; None: leave it as it is.
    """

    codec: Path
    num_codebooks: int | None = None
    level_dbfs: float | None = None


@dataclass(frozen=True)
class Corpus:
    """Samples to encode, their durations as far as headers tell, and inputs that are no samples."""

    samples: Sequence[Sample]
    durations_s: Sequence[float]
    bad: Sequence[BadSample] = ()

    @property
    def digest(self) -> str:
        """Changes with the list of ids, files and spans, not with the working directory."""
        spans = [
            f"{sample.id}\t{Path(audio_part.path).resolve()}\t{audio_part.start_s}\t{audio_part.end_s}"
            for sample in self.samples
            for audio_part in sample.audio_parts()
        ]
        return hashlib.sha256("\n".join(spans).encode()).hexdigest()

    @property
    def samples_per_shard(self) -> int:
        """512, as in the stage `tokenize`, or fewer where they hold more than an hour."""
        mean_s = sum(self.durations_s) / max(1, len(self.durations_s))
        return max(1, min(512, int(SHARD_S / max(mean_s, 1e-3))))


@dataclass(frozen=True)
class Coded:
    """The codes `[K, T]` of a sample's audio parts, and the sample with what is known of them."""

    sample: Sample
    codes: list[np.ndarray]


def begin_set_aside(path: Path, bad: Iterable[BadSample], again: Container[str]) -> SetAside:
    """The list for an attempt of `tokenize`: the lines that are no samples, and what an earlier attempt found.

    Args:
        again: ids of samples that are encoded now; what was said of them holds no more.
    """
    earlier_rows = [row for row in read_set_aside(path) if row["id"] and row["id"] not in again]
    return SetAside(
        path, "tokenize", [*(row_of(bad_sample, "tokenize") for bad_sample in bad), *earlier_rows]
    )


def stored_codes(codes_KT: Tensor, codec: Codec) -> np.ndarray:
    """Codes as shards hold them, in the smallest type that holds all of the codec's."""
    return codes_KT.cpu().numpy().astype(np.int16 if codec.codebook_size <= 2**15 else np.int32)


def refused_by_codec(sample: Sample, error: ValueError) -> BadSample:
    """A sample whose sound the codec does not take: too short, or too long."""
    place = ", ".join(audio_part.path for audio_part in sample.audio_parts())
    return BadSample(place, sample.id, f"{REFUSED}: {error}", REFUSED)


def note_coding(bad: BadSample | None) -> None:
    """Record in the watch of the run that a sample was encoded (None), or why it was not.

    Raises:
        FailedOnEveryItem: the codec has refused a few dozen samples for one reason, and encoded none.
    """
    if bad is None:
        note_success("the codec")
    else:
        note_failure("the codec", bad.reason, bad.kind != REFUSED)


def check_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write down what a folder is begun with, or compare it with what it was begun with.

    Raises:
        ConfigError: something differs: what is made now would not go with what is there.
    """
    if not path.exists():
        write_json(path, dict(record))
        return
    begun = read_record(path)
    for what, value in record.items():
        if begun.get(what) != value:
            hint = f": {begun.get(what)}, not {value}" if len(str(value)) < 20 else ""
            raise ConfigError(
                f"was begun with another {what}{hint}",
                str(path.parent),
                "choose another folder with -o, or give the same as then",
            )


@shared_watch()
def tokenize_corpus(
    codec: Codec,
    corpus: Corpus,
    folder: Path,
    coding: Coding,
    samples_per_shard: int,
    workers: int | ClusterWorkers = 1,
    strict: bool = False,
    advance: Advance = lambda seconds: None,
) -> tuple[dict[str, int], list[Row]]:
    """Encode all samples' audio into shards in `folder`; the finished ones that are there are kept.

    Args:
        codec: the one in `coding.codec`.
        workers: processes of this machine, or actors of a cluster.
        strict: stop at the first sample that cannot be encoded.

    Returns:
        The counts of samples, frames and shards, and the rows of `set_aside.jsonl`.

    Raises:
        StageError: a sample cannot be encoded and `strict` is set, none of a few dozen can be encoded for one reason,
            or a worker or the disk fails.
    """
    samples, durations_s = corpus.samples, corpus.durations_s
    writer = ShardWriter(folder, samples_per_shard)
    todo = [index for index in range(len(samples)) if not writer.has(index)]
    if len(todo) < len(samples):
        note_coding(None)
    again = {samples[index].id for index in todo}
    set_aside = begin_set_aside(folder / "set_aside.jsonl", corpus.bad, again)
    advance(sum(durations_s) - sum(durations_s[index] for index in todo))
    if strict and corpus.bad:
        raise _stop(corpus.bad[0])
    try:
        for index, result in _encode_all(codec, corpus, todo, coding, workers, advance):
            if isinstance(result, Coded):
                writer.write(index, result.sample, [result.codes])
                note_coding(None)
            else:
                set_aside.add([result])
                note_coding(result)
                if strict:
                    raise _stop(result)
            writer.has(index + 1)  # a shard that is full is written now, not with the next sample
        _write_vectors(folder / "codebooks.safetensors", codec, coding)
        counts = writer.close({"codec": _collect_codec_facts(codec, coding), "inputs": corpus.digest})
    except OSError as error:
        remedy = "make room; the same command goes on from the last whole shard"
        raise StageError(f"{folder}: cannot be written ({error.strerror})", remedy) from error
    return counts, set_aside.rows


def planned_seconds(sample: Sample) -> float:
    """The duration of a sample's audio by the files' headers; 0 for what they do not tell."""
    return sum(_part_seconds(audio_part) for audio_part in sample.audio_parts())


# Private: one after the other


def _part_seconds(audio_part: AudioPart) -> float:
    try:
        known_s = probe(audio_part.path).duration_s
    except AudioError:  # encoding will meet it again, and say so
        return 0.0
    ends_s = [end_s for end_s in (known_s, audio_part.end_s) if end_s is not None]
    return max(0.0, min(ends_s, default=0.0) - audio_part.start_s)


def _stop(bad: BadSample) -> StageError:
    remedy = "mend it or leave it out; without --strict it is set aside and the rest goes on"
    return StageError(f"{bad.place}: {bad.reason}", remedy, exit_code=2)


def _write_vectors(path: Path, codec: Codec, coding: Coding) -> None:
    vectors_KVD = codec.codebook_vectors_KVD[: coding.num_codebooks].contiguous()
    with atomic_path(path) as temporary:
        save_file({"vectors_KVD": vectors_KVD}, temporary)


def _collect_codec_facts(codec: Codec, coding: Coding) -> dict[str, Any]:
    """The codec's facts as the index records them."""
    return {
        "frame_rate": codec.frame_rate,
        "num_codebooks": coding.num_codebooks or codec.num_codebooks,
        "codebook_size": codec.codebook_size,
        "sample_rate": codec.sample_rate,
        "path": str(coding.codec.resolve()),
        "digest": codec_digest(codec, coding.num_codebooks),
        "fingerprint": folder_digest(coding.codec),
    }


def _encode_all(
    codec: Codec,
    corpus: Corpus,
    todo: Sequence[int],
    coding: Coding,
    workers: int | ClusterWorkers,
    advance: Advance,
) -> Iterator[tuple[int, Coded | BadSample]]:
    """The samples `todo` in order, each with its codes or with the reason why it has none."""
    if not todo:
        return
    if workers != 1:
        tasks = ((index, corpus.samples[index]) for index in todo)
        results = (
            work_on_cluster(tasks, _EncodingActor, (coding, Path.cwd()), workers)
            if isinstance(workers, ClusterWorkers)
            else work_in_processes(tasks, _work_on_corpus, workers, partial(_start_corpus_worker, coding))
        )
        for index, result in results:
            advance(corpus.durations_s[index])
            yield index, result
        return
    done_s = 0.0

    def within(seconds: float) -> None:
        nonlocal done_s
        done_s += seconds
        advance(seconds)

    with one_thread():
        for index in todo:
            done_s = 0.0
            result = _attempt(codec, corpus.samples[index], coding, within)
            advance(corpus.durations_s[index] - done_s)  # a header may be wrong, or the file broken
            yield index, result


def _attempt(codec: Codec, sample: Sample, coding: Coding, advance: Advance) -> Coded | BadSample:
    parts = sample.audio_parts()
    place = ", ".join(audio_part.path for audio_part in parts) or sample.id
    if not parts:
        return BadSample(place, sample.id, "holds no audio part", "no audio")
    has_words = teaches_words(sample)
    pairs = []
    try:
        for audio_part in parts:
            codes_KT, about, meter = _encode_part(codec, audio_part, coding, advance)
            if has_words and meter.peak_dbfs < SILENCE_DBFS:
                return silent_part(sample, audio_part.path, meter.peak_dbfs)
            pairs.append((codes_KT, about))
    except AudioError as error:
        return BadSample(place, sample.id, error.reason, UNREADABLE)
    except ValueError as error:  # the codec refuses it: too short, or too long
        return refused_by_codec(sample, error)
    metadata = {**sample.metadata, CODED_AUDIO: [about.model_dump() for _, about in pairs]}
    return Coded(sample.model_copy(update={"metadata": metadata}), [codes_KT for codes_KT, _ in pairs])


def _encode_part(
    codec: Codec, audio_part: AudioPart, coding: Coding, advance: Advance
) -> tuple[np.ndarray, CodedAudio, LevelMeter]:
    """Codes `[K, T]` of an audio part, at constant memory where the codec can, and the level of its sound."""

    def pieces() -> Iterator[Tensor]:
        return stream_mono(audio_part.path, codec.sample_rate, audio_part.start_s, audio_part.end_s)

    gain = 1.0 if coding.level_dbfs is None else _meter_pieces(pieces()).gain_to(coding.level_dbfs, PEAK)
    meter = LevelMeter()

    def levelled() -> Iterator[Tensor]:
        for piece_1N in pieces():
            meter.push(piece_1N)
            yield piece_1N if gain == 1.0 else (piece_1N.double() * gain).float().clamp(-PEAK, PEAK)
            advance(piece_1N.shape[1] / codec.sample_rate)

    if isinstance(codec, StreamingCodec):
        codes_KT = torch.cat(list(codec.encode_stream(levelled())), dim=1)
    else:
        codes_KT = codec.encode(torch.cat(list(levelled()), dim=1))
    seconds = meter.num_samples / codec.sample_rate
    about = CodedAudio(
        path=audio_part.path,
        num_samples=meter.num_samples,
        length=length_difference(
            audio_part.path, audio_part.path, audio_part.start_s, audio_part.end_s, seconds
        ),
        gain_db=20 * math.log10(gain),
    )
    return stored_codes(codes_KT[: coding.num_codebooks], codec), about, meter


def _meter_pieces(pieces_1N: Iterable[Tensor]) -> LevelMeter:
    meter = LevelMeter()
    for piece_1N in pieces_1N:
        meter.push(piece_1N)
    return meter


# Private: in processes


_worker: tuple[Codec, Coding]
"""State of a worker process, set once at its start."""


def _start_corpus_worker(coding: Coding) -> None:
    global _worker
    _worker = (load_codec(coding.codec), coding)


def _work_on_corpus(sample: Sample) -> Coded | BadSample:
    codec, coding = _worker
    return _attempt(codec, sample, coding, lambda seconds: None)


class _EncodingActor(TeamMember):
    """A codec in an actor of a cluster, in the working directory of the run, which relative paths begin at."""

    def __init__(self, coding_and_folder: tuple[Coding, Path]) -> None:
        coding, folder = coding_and_folder
        os.chdir(folder)
        torch.set_num_threads(1)
        self._codec, self._coding = load_codec(coding.codec), coding

    def process(self, sample: Sample) -> Coded | BadSample:
        return _attempt(self._codec, sample, self._coding, lambda seconds: None)
