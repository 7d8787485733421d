"""Load, save, resample and measure sound: the one waveform type of the whole project.

A waveform is a float32 tensor in [-1, 1] with its sample rate beside it. Whatever goes wrong with a file
surfaces as `AudioError`, which names the file, what is wrong with it and how to mend it; a wrong argument
to a function on tensors is a `ValueError`.

Reading and writing files is below; `samples` holds what works on tensors alone, `decoding` what is done with what the
two decoders of `decoders` give, `discovery` how files are found and what their first bytes say. `audiollm.audio` has
the public names of all. `decoders` and `discovery` import no torch.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor

from audiollm.audio.decoding import BLOCK_FRAMES, AudioInfo, DecodeRequest, decode, read_info
from audiollm.audio.discovery import (
    AUDIO_EXTENSIONS,
    HEADERLESS_EXTENSIONS,
    AudioError,
    check_readable,
    find_audio,
    looks_like_audio,
)
from audiollm.audio.mixing import to_mono
from audiollm.audio.samples import (
    LevelMeter,
    Waveform,
    integrated_loudness_lufs,
    normalize_rms,
    peak_dbfs,
    resample,
    rms_dbfs,
    set_channels,
)
from audiollm.files.spelled_paths import as_spelled

__all__ = [
    "AUDIO_EXTENSIONS",
    "HEADERLESS_EXTENSIONS",
    "SOUND_ENDINGS",
    "AudioError",
    "AudioInfo",
    "LevelMeter",
    "Waveform",
    "encode_bytes",
    "find_audio",
    "integrated_loudness_lufs",
    "load",
    "load_bytes",
    "looks_like_audio",
    "normalize_rms",
    "peak_dbfs",
    "probe",
    "resample",
    "rms_dbfs",
    "save",
    "set_channels",
    "to_mono",
]

_WRITERS = {  # file extension -> libsndfile's format and its default subtype
    ".wav": ("WAV", "PCM_16"),
    ".flac": ("FLAC", "PCM_16"),
    ".ogg": ("OGG", "VORBIS"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
}
SOUND_ENDINGS = tuple(_WRITERS)
"""Endings of the files that `save` writes."""
_VORBIS_ORDER = {  # channels -> of those of WAV, each that an Ogg file holds, where it is in another order
    3: [0, 2, 1],
    5: [0, 2, 1, 3, 4],
    6: [0, 2, 1, 4, 5, 3],
    7: [0, 2, 1, 5, 6, 4, 3],
    8: [0, 2, 1, 6, 7, 4, 5, 3],
}
_PCM_BITS = {"PCM_U8": 8, "PCM_S8": 8, "PCM_16": 16, "PCM_24": 24, "PCM_32": 32}


# Reading


def probe(path: str | Path) -> AudioInfo:
    """Rate, channels, length and codec of a file, without decoding it: from its header, and of an Ogg file or an MP3,
    whose headers do not tell or lie, from those of its pages or frames.

    Raises:
        AudioError: the file cannot be opened, is not audio, or is raw samples without a header.
    """
    path = as_spelled(Path(path))
    check_readable(path)
    return read_info(str(path), path)


def load(
    path: str | Path,
    start_s: float = 0.0,
    end_s: float | None = None,
    sample_rate: int | None = None,
    mono: bool = False,
) -> Waveform:
    """Read an audio file, or a time span of it, whatever its format and extension.

    libsndfile reads what it reads well (WAV, FLAC, Ogg Vorbis and Opus, SPH, AIFF, CAF, ...), FFmpeg the
    rest (MP3, AAC, M4A, WebM, ...). A span is read by seeking: the rest is not decoded. It equals the same
    slice of the whole file exactly, but for Opus and GSM (the decoder's state: below -40 dB), noise-coded
    bands of AAC, and WebM/Matroska, raw AC-3 and MPEG-TS, which can be out of place by a few milliseconds.
    Values beyond [-1, 1] (float files, overs of a lossy codec) are clipped. The sound of a video is counted from the
    second that its pictures are counted from: silence precedes sound that begins later.

    Args:
        path: the file, also in other Unicode characters that look the same; its content decides the format, not its
            extension.
        start_s: where the span starts, in seconds.
        end_s: where it ends; None, or beyond the end: the end of the file.
        sample_rate: resample to this rate in Hz (after the span is cut out); None keeps the file's.
        mono: return one channel: the mean, or the loudest where the channels cancel each other in the span.

    Returns:
        The waveform, [C, N], never empty. A file cut short loads as far as it goes, and a difference between its
        length and the length that its header promises is logged (logger `audiollm.audio`).

    Raises:
        AudioError: not a readable audio file, no samples, NaN or infinite samples, damaged in the middle,
            or a span that is empty or starts beyond the end.
    """
    path = as_spelled(Path(path))
    check_readable(path)
    return decode(DecodeRequest(str(path), path, start_s, end_s, sample_rate, mono))


def load_bytes(
    data: bytes,
    name: str = "<bytes>",
    start_s: float = 0.0,
    end_s: float | None = None,
    sample_rate: int | None = None,
    mono: bool = False,
) -> Waveform:
    """`load` from the content of a file (a member of a shard); `name` stands for the path in errors."""
    return decode(DecodeRequest(data, name, start_s, end_s, sample_rate, mono))


# Writing


def save(path: str | Path, samples_CN: Tensor, sample_rate: int, subtype: str | None = None) -> None:
    """Write a .wav, .flac, .ogg or .mp3 file: whole or not at all, with the folders above it.

    Values beyond [-1, 1] are clipped. PCM is rounded without dither so that saving what was loaded from
    PCM of that depth changes no sample.

    Args:
        path: the extension chooses the format.
        samples_CN: [C, N], floating point, on any device.
        sample_rate: in Hz.
        subtype: libsndfile's name of the encoding (PCM_16, PCM_24, FLOAT, ...); None is PCM_16 for .wav and
            .flac, VORBIS for .ogg, MPEG_LAYER_III for .mp3.

    Raises:
        AudioError: samples that are NaN, infinite or none; a format that cannot hold them; a failing disk.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{uuid.uuid4().hex}.tmp"
        try:
            _write_sound_file(str(temporary), path, samples_CN, sample_rate, path.suffix.lower(), subtype)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise AudioError(path, f"cannot be written ({error}): check the folder and the disk") from error


def encode_bytes(samples_CN: Tensor, sample_rate: int, format: str = "wav") -> bytes:
    """The content of a "wav", "flac", "ogg" or "mp3" file, for a shard or a report; see `save`."""
    buffer = io.BytesIO()
    _write_sound_file(buffer, f"<{format}>", samples_CN, sample_rate, f".{format}", None)
    return buffer.getvalue()


@contextmanager
def sound_writer(
    target: str | Path | io.BytesIO, sample_rate: int, channels: int, subtype: str, format: str
) -> Iterator[soundfile.SoundFile]:
    """A sound file that is written block by block.

    Args:
        format: libsndfile's name of the container (WAV, FLAC, ...).

    Raises:
        OSError: the disk or the folder refuses it, in the system's own words: libsndfile says "System error" alone.
        soundfile.SoundFileError: the container cannot hold such samples.
    """
    try:
        with soundfile.SoundFile(target, "w", sample_rate, channels, subtype, format=format) as file:
            yield file
    except (soundfile.SoundFileError, AssertionError):
        if not isinstance(target, io.BytesIO):
            _require_space(Path(target))
        raise


# Private


def _write_sound_file(
    target: str | io.BytesIO,
    name: str | Path,
    samples_CN: Tensor,
    sample_rate: int,
    extension: str,
    subtype: str | None,
) -> None:
    if extension not in _WRITERS:
        raise AudioError(name, f"cannot write format {extension!r}: use one of {', '.join(_WRITERS)}")
    if samples_CN.ndim != 2 or samples_CN.numel() == 0:
        raise AudioError(name, f"not written: [channels, samples] expected, got {tuple(samples_CN.shape)}")
    if not bool(torch.isfinite(samples_CN).all()):
        raise AudioError(name, "not written: the samples hold NaN or infinity")
    file_format, default_subtype = _WRITERS[extension]
    if file_format == "OGG":
        samples_CN = samples_CN[_VORBIS_ORDER.get(len(samples_CN), slice(None))]
    subtype = subtype or default_subtype
    samples_NC = samples_CN.detach().cpu().float().clamp(-1.0, 1.0).T.numpy()
    try:
        with sound_writer(target, int(sample_rate), samples_NC.shape[1], subtype, file_format) as handle:
            for start in range(0, len(samples_NC), BLOCK_FRAMES):
                block_NC = np.ascontiguousarray(samples_NC[start : start + BLOCK_FRAMES])
                bits = _PCM_BITS.get(subtype)
                handle.write(_quantize(block_NC, bits) if bits else block_NC)
    except (soundfile.SoundFileError, AssertionError, ValueError, TypeError) as error:
        detail = f"{samples_NC.shape[1]} channels, {sample_rate} Hz, {subtype}"
        raise AudioError(name, f"cannot be written as {file_format} with {detail}: {error}") from error


def _require_space(path: Path) -> None:
    """Write a little more: libsndfile says "System error" for whatever the disk refuses, the system says what.

    Raises:
        OSError: the disk takes no more.
    """
    with path.open("ab", buffering=0) as file:
        for _ in range(2):  # the first write may be cut short without an error
            file.write(bytes(1 << 16))


def _quantize(block_NC: np.ndarray, bits: int) -> np.ndarray:
    """Round to the grid of `bits` in the top bits of an int32, where libsndfile looks for them.

    libsndfile's own conversion scales by 2**15 - 1 and reads back by 2**15, so that saving a loaded file
    would change it.
    """
    scale = 2.0 ** (bits - 1)
    levels = np.clip(np.round(block_NC.astype(np.float64) * scale), -scale, scale - 1)
    return levels.astype(np.int32) << (32 - bits)
