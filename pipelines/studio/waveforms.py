"""Waveforms to draw and to compare, in blocks: an hour of sound takes as much memory as a minute.

Shapes: C channels, N samples, B buckets of samples, W columns of pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from audiollm.audio import Waveform, integrated_loudness_lufs
from audiollm.audio.files import sound_writer
from audiollm.flow.editing.tracks import Track

BUCKETS_PER_SECOND = 200
_BLOCK = 1 << 18
_LOUDNESS_HZ = 8000
"""Sounds of lower rates are resampled: the filter of loudness turns at 1.7 kHz, and below twice that it overflows."""
_LOUDNESS_S = 300.0
"""Longest sound whose loudness is measured whole; of a longer one the median of its parts of this length is taken."""
_INTEGER_SUBTYPES = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32")


@dataclass(frozen=True)
class TrackComparison:
    """A version against the one that it was made from."""

    changed_s: tuple[tuple[float, float], ...]
    """Spans in which samples differ, in seconds; gaps below 10 ms are joined."""
    samples_outside: int
    """Samples outside of the edited span, of one channel."""
    is_same_outside: bool
    """Whether every one of them is the same number in both."""


def bucket_size(sample_rate: int) -> int:
    """Samples that become one bucket of a drawn waveform."""
    return max(1, sample_rate // BUCKETS_PER_SECOND)


def wav_blocks(path: Path, start: int = 0, end: int | None = None) -> Iterator[NDArray[Any]]:
    """Blocks `[N, C]` of a WAV file: int32 for integer samples, float64 for others, as `Track` holds them."""
    with soundfile.SoundFile(path) as file:
        dtype = "int32" if file.subtype in _INTEGER_SUBTYPES else "float64"
        remaining = (file.frames if end is None else min(end, file.frames)) - start
        file.seek(min(start, file.frames))
        while remaining > 0:
            block_NC = file.read(min(_BLOCK, remaining), dtype=dtype, always_2d=True)
            if not len(block_NC):
                return
            remaining -= len(block_NC)
            yield block_NC


def measure_peaks(path: Path) -> NDArray[np.int16]:
    """Lowest and highest sample of every bucket `[B, 2]`, over all channels, in units of 1 / 32767.

    Raises:
        ValueError: the sound holds NaN or infinite samples.
    """
    rate = soundfile.info(path).samplerate
    size = bucket_size(rate)
    extremes: list[NDArray[np.int16]] = []
    rest_NC: NDArray[Any] | None = None
    for block_NC in wav_blocks(path):
        values_NC = _as_float(block_NC)
        joined_NC = values_NC if rest_NC is None else np.concatenate([rest_NC, values_NC])
        num_whole = len(joined_NC) // size * size
        rest_NC = joined_NC[num_whole:]
        if num_whole:
            extremes.append(_extremes(joined_NC[:num_whole].reshape(num_whole // size, -1)))
    if rest_NC is not None and len(rest_NC):
        extremes.append(_extremes(rest_NC.reshape(1, -1)))
    return np.concatenate(extremes) if extremes else np.zeros((0, 2), np.int16)


def drawn_columns(
    path: Path, peaks_B2: NDArray[np.int16], start_s: float, end_s: float, width: int
) -> NDArray[np.int16]:
    """Lowest and highest sample of each column `[W, 2]` of a drawing of a span.

    Columns narrower than a bucket are read from the file; columns after its end are 0.
    """
    info = soundfile.info(path)
    rate, size = info.samplerate, bucket_size(info.samplerate)
    per_column = (end_s - start_s) * rate / width
    if per_column >= size:
        values_B2, unit = peaks_B2, size
        offset = 0
    else:
        first = max(0, math.floor(start_s * rate))
        last = min(info.frames, math.ceil(end_s * rate) + 1)
        blocks = [_as_float(block_NC) for block_NC in wav_blocks(path, first, last)]
        samples_NC = np.concatenate(blocks) if blocks else np.zeros((0, info.channels))
        values_B2, unit = _extremes(samples_NC), 1
        offset = first
    edges = start_s * rate + per_column * np.arange(width + 1)
    edges_W = np.clip(np.floor(edges / unit - offset), 0, len(values_B2)).astype(np.int64)
    out_W2 = np.zeros((width, 2), np.int16)
    there = edges_W[:-1] < len(values_B2)
    if there.any():
        starts = edges_W[:-1][there]
        lows = np.minimum.reduceat(values_B2[:, 0], starts)
        highs = np.maximum.reduceat(values_B2[:, 1], starts)
        # the last column would go on to the end of the file
        end = max(int(edges_W[-1]), int(starts[-1]) + 1)
        lows[-1], highs[-1] = values_B2[starts[-1] : end, 0].min(), values_B2[starts[-1] : end, 1].max()
        out_W2[there] = np.stack([lows, highs], axis=1)
    return out_W2


def compare_tracks(before: Path, after: Path, span: tuple[int, int]) -> TrackComparison:
    """Compare two versions sample by sample.

    Args:
        span: first sample of the edit, and the sample behind its last.
    """
    rate = soundfile.info(after).samplerate
    before_blocks, position = wav_blocks(before), 0
    rest_NC: NDArray[Any] | None = None
    changes: list[list[int]] = []
    is_same, outside, gap = True, 0, rate // 100
    for block_NC in wav_blocks(after):
        while rest_NC is None or len(rest_NC) < len(block_NC):
            more_NC = next(before_blocks, None)
            if more_NC is None:
                break
            rest_NC = more_NC if rest_NC is None else np.concatenate([rest_NC, more_NC])
        had_NC = (rest_NC if rest_NC is not None else block_NC[:0])[: len(block_NC)]
        rest_NC = rest_NC[len(block_NC) :] if rest_NC is not None else None
        differs_N = np.ones(len(block_NC), bool)
        differs_N[: len(had_NC)] = (block_NC[: len(had_NC)] != had_NC).any(axis=1)
        numbers_N = np.arange(position, position + len(block_NC))
        is_outside_N = (numbers_N < span[0]) | (numbers_N >= span[1])
        outside += int(is_outside_N.sum())
        is_same &= not bool((differs_N & is_outside_N).any())
        places = numbers_N[differs_N]
        if len(places):
            cuts = np.flatnonzero(np.diff(places) > gap)
            for first, last in zip(
                places[np.r_[0, cuts + 1]].tolist(), places[np.r_[cuts, -1]].tolist(), strict=True
            ):
                if changes and first - changes[-1][1] <= gap:
                    changes[-1][1] = last + 1
                else:
                    changes.append([first, last + 1])
        position += len(block_NC)
    if (rest_NC is not None and len(rest_NC)) or next(before_blocks, None) is not None:
        is_same = False  # the track became shorter
    return TrackComparison(tuple((a / rate, b / rate) for a, b in changes), outside, is_same)


def measure_loudness(path: Path) -> float | None:
    """Integrated loudness in LUFS; None: silence. More than five channels are mixed down."""
    info = soundfile.info(path)
    window = round(_LOUDNESS_S * info.samplerate)
    loudness = []
    for start in range(0, info.frames, window):
        blocks = [_as_float(block) for block in wav_blocks(path, start, start + window)]
        samples_CN = torch.from_numpy(np.concatenate(blocks).T.astype(np.float32))
        waveform = Waveform(samples_CN.contiguous(), info.samplerate)
        waveform = waveform.resample(max(info.samplerate, _LOUDNESS_HZ))
        value = integrated_loudness_lufs(waveform.mono() if info.channels > 5 else waveform)
        if math.isfinite(value):
            loudness.append(value)
    return round(float(np.median(loudness)), 2) if loudness else None


def read_part(path: Path, start: int = 0, end: int | None = None) -> Track:
    """A part of a WAV file as a track."""
    info = soundfile.info(path)
    blocks = list(wav_blocks(path, start, end))
    samples_NC = np.concatenate(blocks) if blocks else np.zeros((0, info.channels))
    return Track(samples_NC, info.samplerate, "WAV", info.subtype, str(path))


def splice(before: Path, target: Path, start: int, part_NC: Any, is_silent_elsewhere: bool = False) -> None:
    """Write a version with other samples from `start` on, copying the rest block by block.

    Args:
        part_NC: samples as `Track` holds them; the version becomes longer where they end later.
        is_silent_elsewhere: write zeros in place of the rest.
    """
    info = soundfile.info(before)
    with sound_writer(target, info.samplerate, info.channels, info.subtype, "WAV") as file:
        for block_NC in wav_blocks(before, 0, start):
            file.write(np.zeros_like(block_NC) if is_silent_elsewhere else block_NC)
        file.write(part_NC)
        for block_NC in wav_blocks(before, start + len(part_NC)):
            file.write(np.zeros_like(block_NC) if is_silent_elsewhere else block_NC)


def muted(samples_NC: NDArray[Any], fade: int, fades: tuple[bool, bool]) -> NDArray[Any]:
    """Silence in place of samples.

    Args:
        fade: samples in which the sound fades at an end.
        fades: whether it fades at the beginning, and at the end; it does not at the ends of a recording.
    """
    size = len(samples_NC)
    fade = min(fade, size // 2)
    weights_N1 = np.zeros((size, 1))
    falling_F = (0.5 + 0.5 * np.cos(np.pi * (np.arange(fade) + 1) / (fade + 1)))[:, None]
    if fades[0]:
        weights_N1[:fade] = falling_F
    if fades[1]:
        weights_N1[size - fade :] = falling_F[::-1]
    quiet_NC = samples_NC * weights_N1
    is_integer = np.issubdtype(samples_NC.dtype, np.integer)
    return (np.round(quiet_NC) if is_integer else quiet_NC).astype(samples_NC.dtype)


# Private


def _as_float(block_NC: NDArray[Any]) -> NDArray[np.float64]:
    return block_NC / 2.0**31 if block_NC.dtype == np.int32 else block_NC


def _extremes(values_BN: NDArray[np.float64]) -> NDArray[np.int16]:
    """
    Raises:
        ValueError: NaN or infinite samples, which nothing can play or draw.
    """
    found_B2 = np.stack([values_BN.min(axis=1), values_BN.max(axis=1)], axis=1)
    if not np.isfinite(found_B2).all():
        raise ValueError("the sound holds NaN or infinite samples")
    return np.round(np.clip(found_B2, -1, 1) * 32767).astype(np.int16)
