"""Sound and spectrogram of a span of a recording.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.review.table import ReviewRefusal

if TYPE_CHECKING:
    from audiollm.audio import Waveform

MAX_WINDOW_S = 120.0
_MAX_RATE = 48_000
"""Highest sample rate that every browser plays, in Hz."""


def span_wav(path: Path, start_s: float, end_s: float) -> bytes:
    """The span as a WAV of one channel.

    Raises:
        ReviewRefusal: an empty span, or one that is too long.
        AudioError: the recording cannot be read.
    """
    from audiollm.audio import encode_bytes

    waveform = _load_span(path, start_s, end_s)
    return encode_bytes(waveform.samples_CN, waveform.sample_rate)


def span_picture(path: Path, start_s: float, end_s: float) -> bytes:
    """The mel spectrogram of the span as a PNG, low frequencies at the bottom.

    Raises:
        ReviewRefusal: an empty span, or one that is too long.
        AudioError: the recording cannot be read.
    """
    from audiollm.pages.spectrograms import draw_spectrogram, mel_decibels

    waveform = _load_span(path, start_s, end_s)
    decibels_MT = mel_decibels(waveform.samples_CN[0].numpy(), waveform.sample_rate)
    image = draw_spectrogram(decibels_MT, waveform.sample_rate, waveform.duration_s).image
    return base64.b64decode(image.partition(",")[2])


def load_libraries() -> None:
    """Load what the first picture needs, some seconds of work, before anybody waits for it."""
    import numpy as np

    from audiollm.pages.spectrograms import draw_spectrogram, mel_decibels

    draw_spectrogram(mel_decibels(np.zeros(16_000, np.float32), 16_000), 16_000, 1.0)


def _load_span(path: Path, start_s: float, end_s: float) -> Waveform:
    if not 0 <= start_s < end_s <= start_s + MAX_WINDOW_S:
        raise ReviewRefusal(f"Of a recording up to {MAX_WINDOW_S:g} s are shown at once.")
    from audiollm.audio import load

    waveform = load(path, start_s, end_s, mono=True)
    return waveform if waveform.sample_rate <= _MAX_RATE else waveform.resample(_MAX_RATE)
