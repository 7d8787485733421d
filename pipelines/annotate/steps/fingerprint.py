"""The step `fingerprint`: a few bits a moment that stay the same when a recording is coded, resampled, made louder or
cut at its edges (after Haitsma and Kalker, "A Highly Robust Audio Fingerprinting System", ISMIR 2002).

A bit says whether the difference in level of two neighbouring bands has grown over the last 64 ms. Levels are in
decibels, so that the gain does not matter, and over a floor, so that silence is all zeros whatever noise a codec
leaves. Only what any coder keeps is looked at, 300 to 3,400 Hz.

Shapes: N samples, F frames, B bands, Q frequencies of the spectrum.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from pipelines.annotate.step import Segment, SegmentStep
from pipelines.steps.step import StepConfig, Value

SAMPLE_RATE = 8_000
FRAME_SAMPLES, HOP_SAMPLES = 1024, 128
GROWTH_FRAMES = 4
"""Levels are compared over this many hops, 64 ms."""
NUM_BANDS = 17
"""Frequency bands: one more than the bits of a frame."""
LOWEST_HZ, HIGHEST_HZ = 300.0, 3400.0
FLOOR_DB = 40.0
"""Level below the clip's loudest band from which a band counts as silent."""
MARGIN_DB = 0.2
"""Smallest growth of a level that counts as one."""
_BLOCK_FRAMES = 4096


class FingerprintConfig(StepConfig):
    """Settings of `fingerprint`: none, as fingerprints of two corpora must be comparable."""


class Fingerprint(SegmentStep[FingerprintConfig]):
    """`{"bits": ...}`: four hexadecimal digits for each 16 ms; empty where nothing can be heard."""

    name = "fingerprint"
    settings = FingerprintConfig
    measures_sounds = True

    def process(self, segment: Segment) -> Value:
        bits_F = fingerprint(segment.samples(SAMPLE_RATE))
        return {"bits": bits_F.astype(">u2").tobytes().hex()}


def fingerprint(samples_N: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of each frame of a clip at 8 kHz, one integer a frame, `[F]`; empty where all of it is silent."""
    levels_FB = _levels(samples_N)
    floor = levels_FB.max(initial=0.0) * 10 ** (-FLOOR_DB / 10)
    if floor <= 0 or len(levels_FB) <= GROWTH_FRAMES:
        return np.zeros(0, np.uint16)
    decibels_FB = 10 * np.log10(levels_FB + floor)
    slope_FB = decibels_FB[:, :-1] - decibels_FB[:, 1:]
    growth_FB = slope_FB[GROWTH_FRAMES:] - slope_FB[:-GROWTH_FRAMES]
    packed_F2 = np.packbits(growth_FB > MARGIN_DB, axis=1)
    bits_F = packed_F2.view(">u2")[:, 0].astype(np.uint16)
    return bits_F if bits_F.any() else np.zeros(0, np.uint16)


def _levels(samples_N: NDArray[np.float32]) -> NDArray[np.float64]:
    """The power of each band in each frame, `[F, B]`; frames reach half their length over the edges."""
    edge_N = np.zeros(FRAME_SAMPLES // 2)
    padded_N = np.concatenate([edge_N, np.asarray(samples_N, np.float64), edge_N])
    frames = np.lib.stride_tricks.sliding_window_view(padded_N, FRAME_SAMPLES)[::HOP_SAMPLES]
    window_N, weights_QB = np.hanning(FRAME_SAMPLES), _band_weights()
    parts = [
        np.abs(np.fft.rfft(frames[start : start + _BLOCK_FRAMES] * window_N)) ** 2 @ weights_QB
        for start in range(0, len(frames), _BLOCK_FRAMES)
    ]
    return np.concatenate(parts)


@cache
def _band_weights() -> NDArray[np.float64]:
    """Triangles around the centres of bands of equal width in octaves, at least one bin wide, `[Q, B]`."""
    edges = np.geomspace(LOWEST_HZ, HIGHEST_HZ, NUM_BANDS + 1)
    centres_B = np.sqrt(edges[:-1] * edges[1:])
    widths_B = np.maximum(np.diff(edges), SAMPLE_RATE / FRAME_SAMPLES)
    frequencies_Q = np.fft.rfftfreq(FRAME_SAMPLES, 1 / SAMPLE_RATE)
    weights_QB: NDArray[np.float64] = np.maximum(
        0.0, 1 - np.abs(frequencies_Q[:, None] - centres_B) / widths_B
    )
    return weights_QB
