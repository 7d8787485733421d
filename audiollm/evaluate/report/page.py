"""Pages of evaluations, each one self-contained HTML file: templates, and recordings as players with spectrograms.

Shapes: C channels, N samples, F frequencies, T frames.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from audiollm.audio import encode_bytes

MAX_SOUND_BYTES = 16_000_000
"""Bytes of encoded sound after which a page takes no more."""
Filters = Mapping[str, Callable[..., Any]]
_NO_FILTERS: Filters = {}


def render_template(
    template: str, *, folders: Sequence[Path] = (), filters: Filters = _NO_FILTERS, **values: Any
) -> str:
    """A template, filled; texts are escaped.

    Args:
        folders: where templates are looked for before those of this package.
        filters: functions that the template applies to values, by name.
    """
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FileSystemLoader([*folders, Path(__file__).parent]),
    )
    environment.filters |= filters
    return environment.get_template(template).render(**values).strip() + "\n"


def player(samples_1N: Tensor, sample_rate: int, loudest: float) -> dict[str, str]:
    """A sound and its spectrogram as data URLs.

    FLAC, which is lossless; the spectrogram shows 80 dB below `loudest`.
    """
    from matplotlib import colormaps
    from PIL import Image

    flac = base64.b64encode(encode_bytes(samples_1N, sample_rate, "flac")).decode()
    level_FT = np.clip(1 + (_decibels(samples_1N) - loudest) / 80, 0, 1)
    picture = Image.fromarray(np.rint(level_FT[::-1] * 255).astype(np.uint8), "P")
    picture.putpalette(np.rint(colormaps["magma"](np.arange(256))[:, :3] * 255).astype(np.uint8).tobytes())
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    image = base64.b64encode(buffer.getvalue()).decode()
    return {"audio": f"data:audio/flac;base64,{flac}", "image": f"data:image/png;base64,{image}"}


def loudest_db(samples_1N: Tensor) -> float:
    """The loudest point of a sound's spectrogram, in dB."""
    return float(_decibels(samples_1N).max())


def _decibels(samples_1N: Tensor) -> np.ndarray[Any, Any]:
    """STFT power in dB, `[193, T]`, at most some 400 frames."""
    import librosa

    samples_N = samples_1N[0].numpy()
    hop = max(96, len(samples_N) // 400)
    spectrum_FT = librosa.stft(samples_N, n_fft=384, hop_length=hop, pad_mode="constant")
    decibels_FT: np.ndarray[Any, Any] = 20 * np.log10(np.maximum(np.abs(spectrum_FT), 1e-6))
    return decibels_FT
