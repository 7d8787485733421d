"""Shards of codes to sound files: the work of `audiollm detokenize`.

Shards may come from anywhere: no id in them names a file outside of the folder that is written to.

Shapes: N samples, K codebooks, T frames.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from audiollm.audio import AudioError
from audiollm.audio.streams import save_stream
from audiollm.codec import Codec, codec_digest, load_codec
from audiollm.data.records.shards import DEFAULT_MAX_CODES_MB, CodedSample, Shards, read_index
from audiollm.devices import one_thread
from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.files.atomic import folder_digest
from audiollm.files.set_aside import Row, SetAside
from audiollm.models.pretrained import model_folder
from tokenizer.checks import check_codes
from tokenizer.corpus.encoding import CODED_AUDIO, Advance, CodedAudio, StreamingCodec

_UNSAFE = re.compile(r"[^\w\-+=@,()\[\] .]")
_MAX_NAME_BYTES, _MAX_FOLDERS = 200, 8


def open_shards(shards: Path, codec: Path | None) -> tuple[Codec, Path, dict[str, Any]]:
    """The codec of a folder of shards (by default the one that its index names), its folder, and the index.

    Raises:
        ConfigError: no shards or no codec there, or a codec that these codes are not of.
    """
    index, where, remedy = read_index(shards), str(shards / "index.json"), "give its folder with --codec"
    missing = [name for name in index["shards"] if not (shards / Path(name).name).is_file()]
    if missing:
        raise ConfigError(f"{missing[0]}: the shard is missing", str(shards), "bring it back")
    facts: dict[str, Any] = index.get("codec") or {}
    if codec is None and not facts.get("path"):
        raise ConfigError("the index names no codec", where, remedy)
    codec_folder = codec or Path(facts["path"])
    if not codec_folder.is_dir():
        raise ConfigError(f"no codec at {codec_folder}", where if codec is None else "--codec", remedy)
    folder = model_folder(codec_folder)
    if codec is None and facts.get("fingerprint") not in (None, folder_digest(folder)):
        raise ConfigError(f"the codec at {folder} has changed since", where, "give that of then with --codec")
    loaded = load_codec(folder)
    for key in ("frame_rate", "sample_rate", "codebook_size"):
        if key in facts and facts[key] != getattr(loaded, key):
            raise ConfigError(
                f"{key} of the codes is {facts[key]}, of the codec at {folder} {getattr(loaded, key)}",
                where,
                "give the codec that made them with --codec",
            )
    if facts.get("digest") not in (None, codec_digest(loaded, facts.get("num_codebooks"))):
        raise ConfigError(
            f"the codec at {folder} is another one than these codes are of", where, "give theirs with --codec"
        )
    return loaded, folder, index


def detokenize_shards(
    shards: Path,
    codec: Codec,
    out: Path,
    extension: str,
    num_codebooks: int | None = None,
    advance: Advance = lambda seconds: None,
    max_codes_mb: float = DEFAULT_MAX_CODES_MB,
) -> tuple[dict[str, int], list[Row]]:
    """Decode every audio part to `out/<id>.<extension>`; a file that is there is kept.

    Returns:
        The counts of files written and kept, and the rows of `set_aside.jsonl`.

    Raises:
        StageError: a file cannot be written.
    """
    counts, names = {"written": 0, "kept": 0}, OutputNames(out, extension)
    set_aside = SetAside(out / "set_aside.jsonl", "detokenize")
    with one_thread():
        source = Shards(shards, max_codes_mb)
        set_aside.add(source.bad)
        for index in range(len(source)):
            try:
                coded = source.coded(index)
            except BadSample as bad:
                set_aside.add([bad])
                continue
            try:
                for path, codes_KT, about in _list_coded_parts(coded, names):
                    exists = path.exists()
                    if not exists:
                        pieces = _decode_part(codec, codes_KT[:num_codebooks], about)
                        save_stream(path, pieces, codec.sample_rate)
                    counts["kept" if exists else "written"] += 1
                    advance(codes_KT.shape[1] / codec.frame_rate)
            except AudioError as error:
                raise StageError(str(error), "the same command goes on from here") from error
            except ValueError as error:
                reason = f"cannot be decoded: {error}"
                set_aside.add([BadSample(str(shards), coded.sample.id, reason, "cannot be decoded")])
    return counts, set_aside.rows


class OutputNames:
    """Where each sample's sound goes: inside of `out`, never two to one place, and in each run the same."""

    def __init__(self, out: Path, extension: str) -> None:
        self._out, self._extension = out.resolve(), extension
        self._used_names: set[str] = set()

    def take(self, sample_id: str, parts: int) -> list[Path]:
        """The files of a sample's audio parts: `id`, or `id-1`, `id-2` and so on where there are several.

        Raises:
            ValueError: a link in the folder leads out of it.
        """
        name = path_of_id(sample_id)
        labels = [name] if parts == 1 else [f"{name}-{number}" for number in range(1, parts + 1)]
        return [self._free(label) for label in labels]

    def _free(self, label: str) -> Path:
        free, number = label, 1
        while free.lower() in self._used_names:  # some file systems take `A` and `a` for one
            number += 1
            free = f"{label}-{number}"
        self._used_names.add(free.lower())
        path = self._out / f"{free}.{self._extension}"
        if not path.resolve().is_relative_to(self._out):
            raise ValueError(f"{path} is a link out of the folder, or below one")
        return path


def path_of_id(sample_id: str) -> str:
    """An id as a relative path for any file system; one that had to be changed ends in a hash of the id."""
    names = [_UNSAFE.sub("_", name).strip(" .") for name in sample_id.split("/")]
    name = "/".join(names)
    if name == sample_id and all(names) and len(names) <= _MAX_FOLDERS and _fit_in_names(names):
        return name
    short = "_".join(filter(None, names)).encode(errors="replace")[: _MAX_NAME_BYTES // 2]
    digest = hashlib.sha256(sample_id.encode(errors="replace")).hexdigest()
    return f"{short.decode(errors='ignore') or 'sample'}-{digest[:8]}"


def _fit_in_names(names: list[str]) -> bool:
    return all(len(name.encode(errors="replace")) <= _MAX_NAME_BYTES for name in names)


def _list_coded_parts(
    coded: CodedSample, names: OutputNames
) -> Iterator[tuple[Path, Tensor, CodedAudio | None]]:
    """File, codes and record (none, in the shards of a recipe's stage) of each part, in the first encoding.

    Raises:
        ValueError: not one entry for each audio part, or not what it should be.
    """
    parts = len(coded.sample.audio_parts())
    paths = names.take(coded.sample.id, parts)
    codes = coded.encodings[0] if coded.encodings else []
    abouts: list[CodedAudio | None] = [None] * len(codes)
    if CODED_AUDIO in coded.sample.metadata:
        abouts = list(TypeAdapter(list[CodedAudio]).validate_python(coded.sample.metadata[CODED_AUDIO]))
    if not parts == len(codes) == len(abouts):
        raise ValueError(f"{parts} audio parts, but {len(codes)} with codes and {len(abouts)} described")
    yield from zip(paths, codes, abouts, strict=True)


def _decode_part(codec: Codec, codes_KT: Tensor, about: CodedAudio | None) -> Iterator[Tensor]:
    """Pieces `[1, n]`, cut to the original's length and at its level."""
    check_codes(codes_KT, codec.num_codebooks, codec.codebook_size)
    stream = (
        codec.decode_stream([codes_KT]) if isinstance(codec, StreamingCodec) else [codec.decode(codes_KT)]
    )
    num_remaining = about.num_samples if about else codes_KT.shape[1] * codec.sample_rate
    gain = 10 ** (-about.gain_db / 20) if about else 1.0
    for piece_1N in stream:
        kept_1N = piece_1N[:, :num_remaining]
        num_remaining -= kept_1N.shape[1]
        yield kept_1N * gain
