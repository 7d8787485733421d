"""Sound as it comes in to chunks of codes or of features: the rows of a growing recording never change.

Codes need a causal codec with carried context: its streamed codes are those of the whole recording, bit for bit. An
audio encoder, which sees its whole window, hears each chunk anew from all that came before its end, as
`encode_features` makes the rows of training.

Shapes: K codebooks, N samples, R rows of a window, C values of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from audiollm.audio.level import BLOCK_S, RunningLevel
from audiollm.codec import Codec, HearingCodec
from audiollm.data.hearing.features import SAMPLE_RATE, PartAudio, chunk_window, encoded_features
from audiollm.errors import ConfigError
from audiollm.families.interpreting import InterpretingModel


class Hearing(Protocol):
    """Cuts a stream of samples into chunks that a model is fed."""

    @property
    def sample_rate(self) -> int:
        """Samples per second."""

    @property
    def frame_rate(self) -> float:
        """Code frames, or rows of features, per second."""

    def needed_s(self, frames: int) -> float:
        """Return the seconds of sound that were heard when so many frames were there."""

    def push(self, samples_1N: Tensor) -> Sequence[PartAudio]:
        """Take samples; return the chunks that they complete. Samples that are not finite are heard as silence."""

    def flush(self) -> Sequence[PartAudio]:
        """Return the last chunks; the last one may be shorter."""


def open_hearing(model: InterpretingModel, chunk_frames: int) -> Hearing:
    """Begin to hear a stream as a model does.

    Raises:
        ConfigError: it hears codes, and has no codec or one that cannot encode piece by piece.
    """
    if model.encoder is not None:
        return FeatureHearing(model, chunk_frames)
    return ChunkHearing(model.codec, chunk_frames)


class FeatureHearing:
    """Chunks of rows of a model's audio encoder; it computes a window of up to 30 s for each."""

    sample_rate = SAMPLE_RATE

    def __init__(self, model: InterpretingModel, chunk_rows: int) -> None:
        shape = model.encoder
        assert shape is not None  # `open_hearing` chooses
        self._model, self._shape, self._chunk_rows = model, shape, chunk_rows
        self._heard_1N = torch.zeros(1, 0)
        self._rows = 0
        """Rows of the buffer that have been given out."""

    @property
    def frame_rate(self) -> float:
        return self._shape.rows_per_second

    def needed_s(self, frames: int) -> float:
        """Return the seconds of so many rows: a chunk is encoded when its sound is over."""
        return frames / self.frame_rate

    def push(self, samples_1N: Tensor) -> list[PartAudio]:
        """See `Hearing.push`."""
        finite_1N = torch.where(samples_1N.isfinite(), samples_1N, 0.0)
        self._heard_1N = torch.cat([self._heard_1N, finite_1N], dim=1)
        chunks: list[PartAudio] = []
        per_row = self._shape.samples_per_row
        while self._heard_1N.shape[1] >= (self._rows + self._chunk_rows) * per_row:
            chunks.append(self._encode(self._chunk_rows))
        return chunks

    def flush(self) -> list[PartAudio]:
        """See `Hearing.flush`."""
        per_row = self._shape.samples_per_row
        remaining = -(-self._heard_1N.shape[1] // per_row) - self._rows
        return [self._encode(remaining)] if remaining > 0 else []

    def _encode(self, rows: int) -> PartAudio:
        """Encode the next rows, and forget the sound that no later window sees, a multiple of rows."""
        per_row = self._shape.samples_per_row
        self._rows += rows
        window = chunk_window(self._heard_1N[:, : self._rows * per_row], self._shape)
        chunk = encoded_features(self._model.encode_window(window)[-rows:])
        forgotten = max(0, self._rows - self._shape.window_rows)
        self._heard_1N = self._heard_1N[:, forgotten * per_row :]
        self._rows -= forgotten
        return chunk


class ChunkHearing:
    """Cuts a stream of samples, at their running level, into chunks of code frames.

    Raises:
        ConfigError: the codec cannot encode piece by piece.
    """

    def __init__(self, codec: Codec, chunk_frames: int) -> None:
        if not isinstance(codec, HearingCodec):
            raise ConfigError(
                f"{type(codec).__name__} cannot encode piece by piece",
                "codec",
                "take a model whose codec is the native tokenizer, which is causal",
            )
        self.sample_rate, self.frame_rate = int(codec.sample_rate), float(codec.frame_rate)
        self._level = RunningLevel(codec.sample_rate)
        self._encoder, self._chunk_frames = codec.sample_stream(), chunk_frames
        self._codes_KT = torch.zeros(codec.num_codebooks, 0, dtype=torch.long)

    def needed_s(self, frames: int) -> float:
        """Return the seconds of sound that were heard when so many frames had their codes."""
        return BLOCK_S * math.ceil(self._encoder.needed_s(frames) / BLOCK_S - 1e-6)

    def push(self, samples_1N: Tensor) -> list[Tensor]:
        """Take samples; return the chunks `[K, chunk_frames]` that they complete.

        Samples that are not finite are heard as silence.
        """
        finite_1N = torch.where(samples_1N.isfinite(), samples_1N, 0.0)
        return self._whole_chunks(self._encoder.push(self._level.push(finite_1N)))

    def flush(self) -> list[Tensor]:
        """Return the last chunks; the last one may be shorter."""
        chunks = self._whole_chunks(self._encoder.push(self._level.flush()))
        chunks += self._whole_chunks(self._encoder.flush())
        if self._codes_KT.shape[1]:
            chunks.append(self._codes_KT)
            self._codes_KT = self._codes_KT[:, :0]
        return chunks

    def _whole_chunks(self, codes_KT: Tensor) -> list[Tensor]:
        self._codes_KT = torch.cat([self._codes_KT, codes_KT.cpu()], dim=1)
        num_frames = self._codes_KT.shape[1] // self._chunk_frames * self._chunk_frames
        chunks = self._codes_KT[:, :num_frames].split(self._chunk_frames, dim=1) if num_frames else ()
        self._codes_KT = self._codes_KT[:, num_frames:]
        return list(chunks)
