"""Spectrograms as small PNGs, with the ticks of their axes.

Shapes: N samples, M mel bands, T frames.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DYNAMIC_RANGE_DB = 70.0
_SILENT_DB = -50.0
"""A point below it is dark even where nothing is louder: silence is drawn as silence."""
_BANDS, _COLUMNS, _TICKS_HZ = 96, 420, (500, 1000, 2000, 4000, 8000, 16000)


@dataclass(frozen=True)
class Spectrogram:
    """A picture with its axes: ticks as (place in percent from the left or the bottom, text)."""

    image: str
    """A PNG as a data URI, low frequencies at the bottom."""
    time_ticks: list[tuple[float, str]]
    frequency_ticks: list[tuple[float, str]]


def mel_decibels(samples_N: NDArray[np.float32], sample_rate: int) -> NDArray[np.float32]:
    """Mel power in dB, `[M, T]`, with windows of 32 ms and at most some 400 frames."""
    import librosa
    import numpy as np

    window = max(16, round(0.032 * sample_rate))
    hop = max(1, round(0.004 * sample_rate), -(-len(samples_N) // _COLUMNS))
    frame = max(2048, 1 << window.bit_length())
    power_MT = librosa.feature.melspectrogram(
        # of a clip that is shorter than a frame librosa warns; what follows it is silence anyway
        y=np.pad(samples_N, (0, max(0, frame - len(samples_N)))),
        sr=sample_rate,
        n_fft=frame,
        win_length=window,
        hop_length=hop,
        n_mels=_BANDS,
        pad_mode="constant",
    )
    power_MT = power_MT[:, : 1 + len(samples_N) // hop]
    decibels: NDArray[np.float32] = 10 * np.log10(np.maximum(power_MT, 1e-12))
    return decibels


def draw_spectrogram(
    decibels_MT: NDArray[np.float32], sample_rate: int, duration_s: float, loudest_db: float | None = None
) -> Spectrogram:
    """Draw the levels down to `DYNAMIC_RANGE_DB` below the loudest point; silence is dark.

    Args:
        loudest_db: the loudest point of another sound, whose picture this one is compared with.
    """
    import numpy as np
    from matplotlib import colormaps
    from PIL import Image

    loudest = max(float(decibels_MT.max()) if loudest_db is None else loudest_db, _SILENT_DB)
    level_MT = np.clip(1 + (decibels_MT - loudest) / DYNAMIC_RANGE_DB, 0, 1)
    picture = Image.fromarray(np.rint(level_MT[::-1] * 255).astype(np.uint8), "P")
    picture.putpalette(np.rint(colormaps["magma"](np.arange(256))[:, :3] * 255).astype(np.uint8).tobytes())
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    image = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return Spectrogram(image, _time_ticks(duration_s), _frequency_ticks(sample_rate))


def _time_ticks(duration_s: float) -> list[tuple[float, str]]:
    step = next((s for s in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0) if duration_s / s <= 5), 30.0)
    places = [step * number for number in range(int(duration_s / step) + 1)]
    return [(round(100 * at / duration_s, 2), f"{at:g}") for at in places if at <= 0.72 * duration_s]


def _frequency_ticks(sample_rate: int) -> list[tuple[float, str]]:
    import librosa

    top = float(librosa.hz_to_mel(sample_rate / 2))
    visible_hz = [hz for hz in _TICKS_HZ if hz < 0.46 * sample_rate]
    return [(round(100 * float(librosa.hz_to_mel(hz)) / top, 2), f"{hz / 1000:g}") for hz in visible_hz]
