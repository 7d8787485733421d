"""Sound as it comes in to chunks of codes: the rows of a growing recording never change.

A causal codec with carried context is needed: its streamed codes are those of the whole recording, bit for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from audiollm.audio.level import BLOCK_S, RunningLevel
from audiollm.codec import Codec, HearingCodec
from audiollm.errors import ConfigError


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
