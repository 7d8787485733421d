"""The codec interface: protocols, the shape of the default codec, and loading by entry point."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from audiollm.errors import ConfigError, suggestion
from audiollm.files.json_files import read_json_file

SAMPLE_RATE = 24_000
"""Samples per second of the default codec, as of Higgs Audio V2's."""
FRAME_RATE = 25
"""Code frames per second of the default codec."""
FRAME_SAMPLES = SAMPLE_RATE // FRAME_RATE
"""Samples per code frame of the default codec: 960."""
NUM_CODEBOOKS, CODEBOOK_SIZE = 8, 1024
"""Codebooks of the default codec, and codes per codebook. Assumed only where no codec is known yet."""


@runtime_checkable
class Codec(Protocol):
    """Waveform to codes and back. Codes are int64 `[num_codebooks, frames]`."""

    @property
    def frame_rate(self) -> float: ...
    @property
    def num_codebooks(self) -> int: ...
    @property
    def codebook_size(self) -> int: ...
    @property
    def sample_rate(self) -> int: ...
    @property
    def codebook_vectors_KVD(self) -> Tensor:
        """What each code stands for in the latent space, float32 `[num_codebooks, codebook_size, dim]`."""

    def encode(self, samples_CN: Tensor) -> Tensor:
        """float32 `[1, samples]` at `sample_rate` to codes `[num_codebooks, frames]`, frames rounded up."""

    def decode(self, codes_KT: Tensor) -> Tensor:
        """Codes to float32 `[1, frames * sample_rate / frame_rate]`."""


class CodeStream(Protocol):
    """Codes to sound, piece by piece."""

    @property
    def latency_s(self) -> float:
        """The longest time from a frame's codes to the end of its sound, in the time of the sound."""

    def push(self, codes_KT: Tensor) -> Tensor:
        """Codes `[K, t]` to the samples `[1, n]` that they complete."""

    def flush(self) -> Tensor:
        """The rest of the sound; then begin anew."""


@runtime_checkable
class StreamedCodec(Protocol):
    """What a codec has besides, where it can decode piece by piece; the pieces are together what `decode` gives."""

    def code_stream(self) -> CodeStream: ...


@runtime_checkable
class ProjectedCodec(Protocol):
    """What a codec has besides, where its code vectors are products: the last bits of one differ with the machine and
    the number of threads, those of what it is made of do not."""

    @property
    def codebook_tensors(self) -> Sequence[Sequence[Tensor]]:
        """What makes up each codebook of `codebook_vectors_KVD`, as it is stored."""


def codec_digest(codec: Codec, num_codebooks: int | None = None) -> str:
    """What tells the codes of one codec from those of another of the same shape: 16 hexadecimal digits of SHA-256.

    Of the shapes and float32 bytes of the code vectors, or of what they are made of (`ProjectedCodec`).

    Args:
        num_codebooks: the first ones only; None: all.
    """
    vectors: Sequence[Sequence[Tensor]] = (
        codec.codebook_tensors
        if isinstance(codec, ProjectedCodec)
        else [[vectors_VD] for vectors_VD in codec.codebook_vectors_KVD]
    )
    digest = hashlib.sha256()
    for codebook in vectors[:num_codebooks]:
        for tensor in codebook:
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(
                tensor.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4").tobytes()
            )
    return digest.hexdigest()[:16]


def load_codec(folder: Path) -> Codec:
    """The codec saved in `folder`, through the entry-point group `audiollm.codecs` and `model_type` in its config.

    Raises:
        ConfigError: no config there or a damaged one, or no installed package knows its `model_type`.
    """
    path = folder / "config.json"
    if not path.exists():
        raise ConfigError(
            f"no codec in {folder}: config.json is missing", str(folder), "give a codec's folder"
        )
    kind = str(read_json_file(path, dict).get("model_type"))
    known = {entry.name: entry for entry in entry_points(group="audiollm.codecs")}
    if kind not in known:
        raise ConfigError(f"model_type: no such codec: {kind!r}", str(path), suggestion(kind, known))
    codec: Codec = known[kind].load().from_pretrained(folder)
    return codec
