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
from audiollm.files.json_files import config_folder, read_json_file
from audiollm.hub_models.folders import hub_folder
from audiollm.hub_models.needed_files import CODEC_FOLDER
from audiollm.recipe.plug_ins import Catalog, entry_point_catalog

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
        """Latent vector of each code, float32 `[num_codebooks, codebook_size, dim]`."""

    def encode(self, samples_CN: Tensor) -> Tensor:
        """float32 `[1, samples]` at `sample_rate` to codes `[num_codebooks, frames]`, frames rounded up."""

    def decode(self, codes_KT: Tensor) -> Tensor:
        """Codes to float32 `[1, frames * sample_rate / frame_rate]`."""


class CodeStream(Protocol):
    """A decoder from codes to samples, piece by piece."""

    @property
    def latency_s(self) -> float:
        """Longest delay from a frame's codes to the end of its samples, in seconds of audio."""

    def push(self, codes_KT: Tensor) -> Tensor:
        """Take codes `[K, t]`; return the samples `[1, n]` that they complete."""

    def flush(self) -> Tensor:
        """Return the remaining samples and reset the stream."""


@runtime_checkable
class StreamedCodec(Protocol):
    """A codec that can also decode piece by piece; the joined pieces equal the output of `decode`."""

    def code_stream(self) -> CodeStream: ...


@runtime_checkable
class LocalCodec(Protocol):
    """A codec whose decoder looks no further than some frames around each."""

    @property
    def decoder_reach(self) -> int:
        """Frames before and behind a frame that its sound depends on."""


class SampleStream(Protocol):
    """An encoder from samples to codes, piece by piece."""

    def needed_s(self, frames: int) -> float:
        """Return the seconds of audio after which so many frames have their codes: they look ahead."""

    def push(self, samples_CN: Tensor) -> Tensor:
        """Take samples `[1, n]`; return the codes `[K, t]` that they complete."""

    def flush(self) -> Tensor:
        """Return the remaining codes and reset the stream."""


@runtime_checkable
class HearingCodec(Protocol):
    """A codec that can also encode piece by piece; the joined pieces equal the output of `encode`."""

    def sample_stream(self) -> SampleStream: ...


@runtime_checkable
class ProjectedCodec(Protocol):
    """A codec whose code vectors are products of stored tensors.

    The last bits of a product depend on the machine and the number of threads; those of the stored factors do not.
    """

    @property
    def codebook_tensors(self) -> Sequence[Sequence[Tensor]]:
        """Stored tensors from which each codebook of `codebook_vectors_KVD` is computed."""


def codec_digest(codec: Codec, num_codebooks: int | None = None) -> str:
    """Digest that distinguishes codecs of the same shape: 16 hexadecimal digits of SHA-256.

    It covers the shapes and float32 bytes of the code vectors, or of the stored factors of a `ProjectedCodec`.

    Args:
        num_codebooks: number of leading codebooks to include; None: all.
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


def codec_catalog() -> Catalog:
    """Codecs, by `model_type`."""
    own = "Your own: a class with `from_pretrained`, named by an entry point of the group audiollm.codecs."
    return entry_point_catalog("audiollm.codecs", own)


def default_codec_folder(model: Path) -> Path:
    """The folder of a model's codec where none is named: `audio_tokenizer` in the model's own, as published models have
    it, else the `train_tokenizer` of its run; it need not exist.

    Args:
        model: the folder with the model's config.json.
    """
    beside = model / CODEC_FOLDER
    return beside if beside.is_dir() else model.parent.parent / "train_tokenizer"


def load_codec(folder: Path) -> Codec:
    """The codec saved in `folder`, or in the `model` of a stage's folder.

    It is loaded through the entry-point group `audiollm.codecs` and `model_type` in its config.

    Raises:
        ConfigError: no config there or a damaged one, or no installed package knows its `model_type`.
    """
    folder = config_folder(hub_folder(folder), "codec", "give the folder of a saved codec")
    path = folder / "config.json"
    kind = str(read_json_file(path, dict).get("model_type"))
    entries = {entry.name: entry for entry in entry_points(group="audiollm.codecs")}
    if kind not in entries:
        raise ConfigError(f"model_type: no such codec: {kind!r}", str(path), suggestion(kind, entries))
    codec: Codec = entries[kind].load().from_pretrained(folder)
    return codec
