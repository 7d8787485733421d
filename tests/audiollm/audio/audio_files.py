"""A signal written in every format that `audiollm.audio` reads, for its tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import soundfile
import torch
from torch import Tensor

SAMPLE_RATE = 48000
DURATION_S = 8.0


def sweep(num_channels: int = 1, sample_rate: int = SAMPLE_RATE, duration_s: float = DURATION_S) -> Tensor:
    """A tone that rises from 200 Hz to 3 kHz: no two places look alike. [C, N]."""
    time_s = np.arange(round(duration_s * sample_rate)) / sample_rate
    phase = 2 * np.pi * (200 * time_s + 0.5 * 2800 / duration_s * time_s**2)
    channels = [0.4 * np.sin(phase + channel) for channel in range(num_channels)]
    return torch.from_numpy(np.stack(channels).astype(np.float32))


def write_av(path: Path, container: str, codec: str, samples: Tensor, **options: str) -> Path:
    """Write with FFmpeg what libsndfile cannot: M4A, ADTS, WebM."""
    layout = {1: "mono", 2: "stereo"}[samples.shape[0]]
    with av.open(str(path), "w", format=container, options=options) as output:
        stream = output.add_stream(codec, rate=SAMPLE_RATE, layout=layout)
        stream.bit_rate = 128_000
        for start in range(0, samples.shape[1], SAMPLE_RATE):
            block = np.ascontiguousarray(samples[:, start : start + SAMPLE_RATE].numpy())
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=layout)
            frame.rate, frame.pts = SAMPLE_RATE, start
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


def write_soundfile(path: Path, samples: Tensor, kind: str, subtype: str) -> Path:
    with soundfile.SoundFile(
        path, "w", SAMPLE_RATE, samples.shape[0], subtype=subtype, format=kind
    ) as handle:
        for block in samples.T.contiguous().split(1 << 16):
            handle.write(block.numpy())
    return path


# name -> (writer, RMS error re the written signal, largest error of a span re the slice of the whole)
FORMATS: dict[str, tuple[Callable[[Path, Tensor], Path], float, float]] = {
    "pcm16.wav": (lambda p, x: write_soundfile(p, x, "WAV", "PCM_16"), 3e-5, 0.0),
    "float.wav": (lambda p, x: write_soundfile(p, x, "WAV", "FLOAT"), 0.0, 0.0),
    "adpcm.wav": (lambda p, x: write_soundfile(p, x, "WAV", "MS_ADPCM"), 0.02, 0.0),
    "gsm.wav": (lambda p, x: write_soundfile(p, x[:1], "WAV", "GSM610"), 0.02, 0.02),
    "a.flac": (lambda p, x: write_soundfile(p, x, "FLAC", "PCM_24"), 1e-7, 0.0),
    "a.ogg": (lambda p, x: write_soundfile(p, x, "OGG", "VORBIS"), 0.02, 0.0),
    "a.opus": (lambda p, x: write_soundfile(p, x, "OGG", "OPUS"), 0.02, 0.01),
    "a.aiff": (lambda p, x: write_soundfile(p, x, "AIFF", "PCM_16"), 3e-5, 0.0),
    "a.au": (lambda p, x: write_soundfile(p, x, "AU", "PCM_16"), 3e-5, 0.0),
    "a.caf": (lambda p, x: write_soundfile(p, x, "CAF", "PCM_16"), 3e-5, 0.0),
    "a.w64": (lambda p, x: write_soundfile(p, x, "W64", "PCM_16"), 3e-5, 0.0),
    "a.sph": (lambda p, x: write_soundfile(p, x, "NIST", "PCM_16"), 3e-5, 0.0),
    "a.mp3": (lambda p, x: write_av(p, "mp3", "libmp3lame", x), 0.02, 1e-4),
    "lame.mp3": (lambda p, x: write_soundfile(p, x, "MP3", "MPEG_LAYER_III"), 0.02, 1e-4),
    "a.m4a": (lambda p, x: write_av(p, "ipod", "aac", x), 0.02, 1e-3),
    "a.mp4": (lambda p, x: write_av(p, "mp4", "aac", x), 0.02, 1e-3),
    "alac.m4a": (lambda p, x: write_av(p, "ipod", "alac", x), 1e-6, 0.0),
    "8-bit.wv": (lambda p, x: write_av(p, "wv", "wavpack", x), 0.005, 0.0),
}


def write_formats(folder: Path) -> dict[str, Path]:
    """The sweep in stereo, a file a format."""
    return {name: write(folder / name, sweep(2)) for name, (write, _, _) in FORMATS.items()}
