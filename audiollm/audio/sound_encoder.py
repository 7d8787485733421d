"""Sound that is encoded while it is made: WAV, raw PCM, FLAC, MP3, Opus and AAC, piece by piece.

Shapes: N samples.
"""

from __future__ import annotations

import struct
from typing import Any, Literal, get_args

import numpy as np
import soxr
import torch
from torch import Tensor

SoundFormat = Literal["wav", "pcm", "flac", "mp3", "opus", "aac"]
SOUND_FORMATS: tuple[SoundFormat, ...] = get_args(SoundFormat)
MEDIA_TYPES: dict[SoundFormat, str] = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}
UNKNOWN_BYTES = 0xFFFFFFFF - 36
"""Size of the data chunk of a WAV that players read as "until the stream ends"."""
_CODECS = {
    "flac": ("flac", "flac"),
    "mp3": ("mp3", "libmp3lame"),
    "opus": ("ogg", "libopus"),
    "aac": ("adts", "aac"),
}
"""Container and encoder of FFmpeg."""
_OPTIONS = {"mp3": {"write_xing": "0"}, "opus": {"page_duration": "200000"}}
"""Options of the containers: no header that tells a length, pages of 0.2 s in place of 1 s."""


def pcm16(samples_1N: Tensor) -> bytes:
    """Samples in [-1, 1] as 16-bit little-endian PCM, rounded without dither."""
    levels_N = (samples_1N[0].cpu().double() * 2**15).round().clamp(-(2**15), 2**15 - 1)
    return levels_N.numpy().astype("<i2").tobytes()


def wav_header(sample_rate: int, data_bytes: int = UNKNOWN_BYTES) -> bytes:
    """The header of a 16-bit mono WAV.

    Args:
        data_bytes: bytes of the samples behind it; by default the end of the stream tells.
    """
    return (
        struct.pack("<4sI4s", b"RIFF", 36 + data_bytes, b"WAVE")
        + struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
        + struct.pack("<4sI", b"data", data_bytes)
    )


class SoundEncoder:
    """Encodes mono sound piece by piece; the joined bytes are one file.

    Args:
        format: of the file. `wav` and `pcm` are 16-bit; Opus lies in an Ogg container, AAC in ADTS frames.
        sample_rate: of the samples, in Hz. A rate that the format cannot have becomes the next one that it can.
    """

    def __init__(self, format: SoundFormat, sample_rate: int) -> None:
        self._format, self._rate = format, sample_rate
        self._out = _ByteSink()
        self._container: Any = None
        self._stream: Any = None
        self._written = 0
        if format in _CODECS:
            import av

            kind, codec = _CODECS[format]
            options = _OPTIONS.get(format, {})
            self._container = av.open(self._out, "w", format=kind, options=options)
            rates = av.codec.Codec(codec, "w").audio_rates or [sample_rate]
            file_rate = min((rate for rate in rates if rate >= sample_rate), default=max(rates))
            self._stream = self._container.add_stream(codec, rate=file_rate, layout="mono")

    def push(self, samples_1N: Tensor) -> bytes:
        """Return the bytes that samples in [-1, 1] complete, none at times."""
        if self._container is None:
            header = wav_header(self._rate) if self._format == "wav" and not self._written else b""
            self._written += samples_1N.shape[1]
            return header + pcm16(samples_1N)
        if samples_1N.shape[1]:
            self._encode(self._frame(samples_1N))
        return self._out.take()

    def finish(self) -> bytes:
        """Return the last bytes of the file."""
        if self._container is None:
            return wav_header(self._rate, 0) if self._format == "wav" and not self._written else b""
        self._encode(None)
        self._container.close()
        return self._out.take()

    def _frame(self, samples_1N: Tensor) -> Any:
        from av import AudioFrame

        clipped_1N = np.ascontiguousarray(samples_1N.cpu().float().clamp(-1.0, 1.0).numpy())
        frame = AudioFrame.from_ndarray(clipped_1N, format="flt", layout="mono")
        frame.sample_rate, frame.pts = self._rate, self._written
        self._written += samples_1N.shape[1]
        return frame

    def _encode(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)


def encode_sound(samples_1N: Tensor, sample_rate: int, format: SoundFormat) -> bytes:
    """Encode a whole sound; a WAV then has its length in the header.

    Args:
        samples_1N: in [-1, 1].
        sample_rate: of the samples, in Hz.
    """
    if format == "wav":
        data = pcm16(samples_1N)
        return wav_header(sample_rate, len(data)) + data
    encoder = SoundEncoder(format, sample_rate)
    return encoder.push(samples_1N) + encoder.finish()


class StreamResampler:
    """Resamples mono sound piece by piece: `resample` of the whole, up to rounding."""

    def __init__(self, orig_rate: int, new_rate: int) -> None:
        self._rates, self._taken, self._returned = (orig_rate, new_rate), 0, 0
        self._stream = soxr.ResampleStream(orig_rate, new_rate, 1, dtype="float32", quality="VHQ")

    def push(self, samples_1N: Tensor) -> Tensor:
        """Return the new samples `[1, N]` that a piece completes."""
        self._taken += samples_1N.shape[1]
        samples_N = self._stream.resample_chunk(samples_1N[0].cpu().float().numpy())
        self._returned += len(samples_N)
        return torch.from_numpy(samples_N)[None]

    def finish(self) -> Tensor:
        """Return the last new samples: as many as the length of the whole asks for."""
        orig_rate, new_rate = self._rates
        missing = -(-self._taken * new_rate // orig_rate) - self._returned
        spare_N = np.zeros(64 * orig_rate // new_rate + 64, dtype=np.float32)
        samples_N = torch.from_numpy(self._stream.resample_chunk(spare_N, last=True))
        return samples_N[None, :missing]


class _ByteSink:
    """A file that can only be written to, as FFmpeg needs one: it holds the bytes until they are taken."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        data = bytes(self._data)
        self._data.clear()
        return data
