"""Decoding behind `audiollm.audio.files`: a file, or the bytes of one, to a waveform or to header facts.

libsndfile comes first; whatever it has against a file, FFmpeg decides. Plain WAV and FLAC are decoded here, everything
else in a process that a crash of the decoder may cost. Everything that goes wrong becomes an `AudioError`.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from audiollm.audio.decoders import (
    BLOCK_FRAMES,
    AudioInfo,
    Block,
    DecodeRequest,
    blocks_of_either,
    soundfile_blocks,
)
from audiollm.audio.decoding_process import contained_blocks, read_info
from audiollm.audio.discovery import AudioError, is_plain
from audiollm.audio.samples import Waveform

_SPAN_TOLERANCE_S = 0.02
"""A span that ends earlier by less ends with its file: a list of spans rounds."""

__all__ = [
    "BLOCK_FRAMES",
    "AudioInfo",
    "DecodeRequest",
    "decode",
    "decoded_blocks",
    "length_difference",
    "read_info",
]


def decode(request: DecodeRequest) -> Waveform:
    """Read what was requested: decoded, checked, clipped to [-1, 1], mixed down and resampled."""
    request.check()
    try:
        samples_CN, file_rate = _join_blocks(_soundfile_blocks(request))
    except AudioError:
        raise
    except Exception:  # whatever libsndfile has against the file, FFmpeg decides
        samples_CN, file_rate = _join_blocks(contained_blocks("av", request))
    _say_difference(request, samples_CN.shape[1] / file_rate)
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
    by_av = partial(contained_blocks, "av", request)
    decoded_s = 0.0
    for block_CN, rate in blocks_of_either(_soundfile_blocks(request), by_av):
        decoded_s += block_CN.shape[1] / rate
        yield torch.from_numpy(block_CN), rate
    _say_difference(request, decoded_s)


def length_difference(
    source: str | bytes, name: str | Path, start_s: float, end_s: float | None, decoded_s: float
) -> str | None:
    """Name the difference between the duration that a header promises and that of the sound, once a span was read.

    Args:
        decoded_s: the duration that was read; a span that is whole says nothing of the file's end.
    """
    if end_s is not None and decoded_s > end_s - start_s - _SPAN_TOLERANCE_S:
        return None
    try:
        return read_info(source, name).difference(start_s + decoded_s)
    except AudioError:  # it was decoded, whatever its header holds
        return None


# Private

_log = logging.getLogger("audiollm.audio")
_MAX_NAMED = 20
"""Files whose length differs that a process names; a corpus of such files would fill the screen."""
_compared: set[int] = set()
"""Hashes of the files that were compared with their headers: a training reads each of them many times."""
_named: list[str] = []


def _say_difference(request: DecodeRequest, decoded_s: float) -> None:
    """Log, once, that a file which was read to its end holds less or more sound than its header promises."""
    key = hash(
        (str(request.name), request.source if isinstance(request.source, str) else len(request.source))
    )
    if key in _compared or len(_named) > _MAX_NAMED:
        return
    is_whole = request.start_s == 0.0 and request.end_s is None
    difference = length_difference(request.source, request.name, request.start_s, request.end_s, decoded_s)
    if is_whole or difference is not None:
        _compared.add(key)
    if difference is None:
        return
    _named.append(str(request.name))
    if len(_named) <= _MAX_NAMED:
        _log.warning("%s: %s", request.name, difference)
    else:
        _log.warning("further files whose length differs from their headers are not named here")


def _soundfile_blocks(request: DecodeRequest) -> Iterator[Block]:
    if is_plain(request.source):
        return soundfile_blocks(request)
    return contained_blocks("soundfile", request)


def _join_blocks(blocks: Iterable[Block]) -> tuple[Tensor, int]:
    """Join one or more blocks into one contiguous tensor."""
    blocks_CN, rates = zip(*blocks, strict=True)
    joined_CN = blocks_CN[0] if len(blocks_CN) == 1 else np.concatenate(blocks_CN, axis=1)
    return torch.from_numpy(np.ascontiguousarray(joined_CN)), rates[0]
