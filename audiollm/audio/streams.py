"""Sound files read and written piece by piece: hours of sound at constant memory.

What `stream_mono` gives, end to end, is what `audio.load(..., sample_rate, mono=True)` gives: the same decoders,
the same mixdown and soxr at the same quality, whose streaming form returns the same numbers. Whether channels cancel
each other is known when all of them were read: several channels are decoded twice.

Shapes: C channels, N samples at the file's rate, M samples at the rate asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import soundfile
import soxr
import torch
from torch import Tensor

from audiollm.audio.decoding import BLOCK_FRAMES, DecodeRequest, decoded_blocks
from audiollm.audio.discovery import check_readable
from audiollm.audio.files import AudioError, load, sound_writer
from audiollm.audio.mixing import Mixdown, mix
from audiollm.files.atomic import atomic_path
from audiollm.files.spelled_paths import as_spelled

WHOLE_SPAN_S = 600.0
"""A span that is known to be no longer is loaded at once: `load` seeks to it."""
_FORMATS = {".flac": "FLAC", ".wav": "WAV"}


def stream_mono(
    path: str | Path,
    sample_rate: int,
    start_s: float = 0.0,
    end_s: float | None = None,
    on_not_finite: Callable[[int], None] | None = None,
) -> Iterator[Tensor]:
    """A file, or a span of it, as mono pieces `[1, M]` of a few seconds at `sample_rate`.

    The pieces are what `load` returns, cut up. A longer span than `WHOLE_SPAN_S` is read from the file's
    beginning, without seeking.

    Args:
        on_not_finite: receives the number of samples of a block that are NaN or infinite, which become silence; a
            file of several channels is read twice, and counted once. None: they are an error.

    Raises:
        AudioError: as `load` does; damage is found where it is reached, after the pieces before it.
    """
    path = as_spelled(Path(path))
    if on_not_finite is None and end_s is not None and end_s - start_s <= WHOLE_SPAN_S:
        yield load(path, start_s, end_s, sample_rate, mono=True).samples_CN
        return
    request = DecodeRequest(str(path), path, start_s, end_s, sample_rate, mono=True)
    request.check()
    check_readable(path)
    full_request = replace(request, start_s=0.0, end_s=None, block_frames=BLOCK_FRAMES)

    def blocks() -> Iterator[tuple[Tensor, int]]:
        nonlocal on_not_finite
        spans = _cut_to_span(decoded_blocks(full_request), request)
        if on_not_finite is None:
            return _check_blocks(spans, path)
        report, on_not_finite = on_not_finite, _ignore
        return _repaired(spans, report)

    yield from _resampled(_mixed(blocks), sample_rate)


def save_stream(path: str | Path, pieces_1N: Iterable[Tensor], sample_rate: int) -> int:
    """Write mono pieces as a 16-bit .flac or .wav: whole or not at all. Values beyond [-1, 1] are clipped.

    Returns:
        The number of samples.

    Raises:
        AudioError: another extension, no samples at all, or a failing disk.
    """
    path = Path(path)
    if path.suffix.lower() not in _FORMATS:
        raise AudioError(path, f"cannot be written piece by piece: use one of {', '.join(_FORMATS)}")
    count = 0
    try:
        with atomic_path(path) as temporary:
            with sound_writer(temporary, sample_rate, 1, "PCM_16", _FORMATS[path.suffix.lower()]) as handle:
                for piece_1N in pieces_1N:
                    # as `audio.save` rounds: libsndfile's own scale of 2**15 - 1 is not that of reading
                    levels_N = (
                        (piece_1N[0].detach().cpu().double() * 2**15).round().clamp(-(2**15), 2**15 - 1)
                    )
                    for block_N in levels_N.to(torch.int16).split(BLOCK_FRAMES):
                        handle.write(block_N.numpy())
                        count += len(block_N)
            if count == 0:
                raise AudioError(path, "not written: no samples")
    except (OSError, soundfile.SoundFileError) as error:
        raise AudioError(path, f"cannot be written ({error}): check the folder and the disk") from error
    return count


# Private


def _cut_to_span(
    blocks: Iterator[tuple[Tensor, int]], request: DecodeRequest
) -> Iterator[tuple[Tensor, int]]:
    """Yield the blocks between the request's start and end."""
    position = start = 0
    rate = 1
    for block_CN, rate in blocks:
        start, stop = request.in_samples(rate)
        inside_CN = block_CN[:, max(0, start - position) : max(0, stop - position)]
        position += block_CN.shape[1]
        if inside_CN.shape[1]:
            yield inside_CN, rate
        if position >= stop:
            return
    if position <= start:
        raise request.starts_beyond(position / rate)


def _check_blocks(blocks: Iterator[tuple[Tensor, int]], path: Path) -> Iterator[tuple[Tensor, int]]:
    """Finite and clipped to [-1, 1], as `audio_decoding.decode` does."""
    for block_CN, rate in blocks:
        if not bool(torch.isfinite(block_CN).all()):
            raise AudioError(path, "holds NaN or infinite samples: write the file anew from its origin")
        yield block_CN.clamp(-1.0, 1.0), rate


def _repaired(
    blocks: Iterator[tuple[Tensor, int]], on_not_finite: Callable[[int], None]
) -> Iterator[tuple[Tensor, int]]:
    """With silence in the place of samples that are not finite, and clipped to [-1, 1]."""
    for block_CN, rate in blocks:
        finite_CN = block_CN.isfinite()
        if count := int((~finite_CN).any(dim=0).sum()):
            on_not_finite(count)
        yield torch.where(finite_CN, block_CN, 0.0).clamp(-1.0, 1.0), rate


def _ignore(count: int) -> None:
    pass


def _mixed(blocks: Callable[[], Iterator[tuple[Tensor, int]]]) -> Iterator[tuple[Tensor, int]]:
    """Mix to mono as `audiollm.audio.to_mono` mixes the whole; `blocks` begins to read each time that it is called."""
    reading = blocks()
    first_CN, rate = next(reading)
    if len(first_CN) == 1:
        yield first_CN, rate
        yield from reading
        return
    mixdown = Mixdown()
    mixdown.push(first_CN)
    for block_CN, _ in reading:
        mixdown.push(block_CN)
    channel = mixdown.channel()
    for block_CN, rate in blocks():
        yield mix(block_CN, channel), rate


def _resampled(blocks: Iterator[tuple[Tensor, int]], sample_rate: int) -> Iterator[Tensor]:
    """Resample blocks to `sample_rate`, ceil(N * sample_rate / rate) samples in all; overshoots are clipped."""
    resampler: soxr.ResampleStream | None = None
    num_input = num_output = 0
    rate = sample_rate
    for block_1N, rate in blocks:
        if rate == sample_rate:
            yield block_1N
            continue
        resampler = resampler or soxr.ResampleStream(rate, sample_rate, 1, dtype="float32", quality="VHQ")
        samples_M = resampler.resample_chunk(block_1N[0].contiguous().numpy())
        num_input, num_output = num_input + block_1N.shape[1], num_output + len(samples_M)
        if len(samples_M):
            yield torch.from_numpy(samples_M)[None].clamp(-1.0, 1.0)
    if resampler is not None:
        # silence to spare, as in `audio.resample`: soxr rounds the length in its own way
        silence_N = np.zeros(64 * rate // sample_rate + 64, dtype=np.float32)
        rest_M = resampler.resample_chunk(silence_N, last=True)[
            : -(-num_input * sample_rate // rate) - num_output
        ]
        if len(rest_M):
            yield torch.from_numpy(rest_M)[None].clamp(-1.0, 1.0)
