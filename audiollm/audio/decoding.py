"""Decoding behind `audiollm.audio.files`: a file, or the bytes of one, to a waveform or to header facts.

libsndfile comes first; whatever it has against a file, FFmpeg decides. Plain WAV and FLAC are decoded here, everything
else in a process that a crash of the decoder may cost. Everything that goes wrong becomes an `AudioError`.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from audiollm.audio.decoders import (
    BLOCK_FRAMES,
    AudioInfo,
    Block,
    DecodeRequest,
    soundfile_blocks,
    soundfile_info,
)
from audiollm.audio.decoding_process import contained_blocks, contained_info
from audiollm.audio.discovery import AudioError, is_plain
from audiollm.audio.samples import Waveform

__all__ = ["BLOCK_FRAMES", "AudioInfo", "DecodeRequest", "decode", "decoded_blocks", "read_info"]


def decode(request: DecodeRequest) -> Waveform:
    """Read what was requested: decoded, checked, clipped to [-1, 1], mixed down and resampled."""
    request.check()
    try:
        samples_CN, file_rate = _joined(_soundfile_blocks(request))
    except AudioError:
        raise
    except Exception:  # whatever libsndfile has against the file, FFmpeg decides
        samples_CN, file_rate = _joined(contained_blocks("av", request))
    low, high = (float(value) for value in torch.aminmax(samples_CN))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise AudioError(request.name, "holds NaN or infinite samples: write the file anew from its origin")
    if low < -1.0 or high > 1.0:
        samples_CN.clamp_(-1.0, 1.0)
    waveform = Waveform(samples_CN, file_rate)
    waveform = waveform.mono() if request.mono else waveform
    return waveform if request.sample_rate is None else waveform.resample(request.sample_rate)


def decoded_blocks(request: DecodeRequest) -> Iterator[tuple[Tensor, int]]:
    """Blocks `[C, N]` of what was requested, as they are decoded, with their rate.

    Raises:
        AudioError: it cannot be read, or not on from here.
    """
    done = 0
    try:
        for block_CN, rate in _soundfile_blocks(request):
            done += block_CN.shape[1]
            yield torch.from_numpy(block_CN), rate
        return
    except AudioError:
        raise
    except Exception:  # whatever libsndfile has against the file, FFmpeg decides
        pass
    for block_CN, rate in contained_blocks("av", request):
        fresh_CN = block_CN[:, done:]
        done = max(0, done - block_CN.shape[1])
        if fresh_CN.shape[1]:
            yield torch.from_numpy(fresh_CN), rate


def read_info(source: str | bytes, name: str | Path) -> AudioInfo:
    """Read the header of a file, or of its content, without decoding samples.

    Raises:
        AudioError: it is not audio.
    """
    try:
        if is_plain(source):
            return soundfile_info(source)
    except Exception:  # whatever libsndfile has against the file, FFmpeg decides
        pass
    return contained_info(DecodeRequest(source, name, 0.0, None, None, False))


# Private


def _soundfile_blocks(request: DecodeRequest) -> Iterator[Block]:
    if is_plain(request.source):
        return soundfile_blocks(request)
    return contained_blocks("soundfile", request)


def _joined(blocks: Iterable[Block]) -> tuple[Tensor, int]:
    """Join one or more blocks into one contiguous tensor."""
    blocks_CN, rates = zip(*blocks, strict=True)
    joined_CN = blocks_CN[0] if len(blocks_CN) == 1 else np.concatenate(blocks_CN, axis=1)
    return torch.from_numpy(np.ascontiguousarray(joined_CN)), rates[0]
