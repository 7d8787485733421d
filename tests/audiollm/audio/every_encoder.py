"""Files by every audio encoder of the installed FFmpeg, in each of its sample formats, for the tests of decoding.

Shapes: C channels, N samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import av
import numpy as np
from av.audio.plane import AudioPlane
from av.codec.codec import Codec, UnknownCodecError

DURATION_S = 0.5
# fmt: off
CONTAINERS = (
    "mov", "matroska", "ogg", "wav", "au", "nut", "caf", "aiff", "wv", "tta", "asf", "flac", "mp3",
    "adts", "ac3", "mp2", "amr", "gsm", "adx", "argo_asf", "alp", "apm", "kvag", "wsaud", "amv", "flv",
    "swf", "rm", "roq", "g723_1", "g722", "sbc", "aptx", "aptx_hd",
)
# fmt: on
"""Containers tried in order for an encoder."""
BIT_RATES = {"wmav1": 128_000, "wmav2": 128_000, "g723_1": 6300}
"""Bit rates (bits per second) of encoders without a default."""
TYPES = {"u8": "u1", "s16": "i2", "s32": "i4", "s64": "i8", "flt": "f4", "dbl": "f8"}
RATES = (48000, 44100, 22050, 16000, 8000)


def encoders() -> Iterator[tuple[str, str]]:
    """Name and sample format of every audio encoder."""
    seen = set()
    for name in sorted(av.codecs_available):
        with suppress(UnknownCodecError):
            codec = Codec(name, "w")
            if codec.type == "audio" and codec.name not in seen:
                seen.add(codec.name)
                yield from ((codec.name, form.name) for form in codec.audio_formats or ())


def pitch_hz(layout: str) -> list[float]:
    """Pitch of each channel's tone: 300 Hz and upwards, and 60 Hz for a low-frequency channel."""
    channels = av.AudioLayout(layout).channels
    return [60.0 if each.name == "LFE" else 300.0 + 100 * number for number, each in enumerate(channels)]


def tones(layout: str, rate: int, duration_s: float = DURATION_S) -> np.ndarray:
    """A tone of its own pitch in every channel. float64 `[C, N]`."""
    time_N = np.arange(round(duration_s * rate)) / rate
    return np.stack([0.3 * np.sin(2 * np.pi * hz * time_N) for hz in pitch_hz(layout)])


def as_format(samples_CN: np.ndarray, form: str) -> np.ndarray:
    """The samples as a sample format of FFmpeg holds them, `[C, N]`."""
    dtype = np.dtype(TYPES[form.removesuffix("p")])
    if dtype.kind == "f":
        return samples_CN.astype(dtype)
    full_scale = 2.0 ** (8 * dtype.itemsize - 1)
    levels_CN = np.round(samples_CN * full_scale)
    return (levels_CN + (full_scale if dtype.kind == "u" else 0)).astype(dtype)


def frame_of(levels_CN: np.ndarray, form: str, layout: str, rate: int, pts: int) -> av.AudioFrame:
    """Plane by plane: `AudioFrame.from_ndarray` fails from 8 channels on."""
    frame = av.AudioFrame(form, layout, levels_CN.shape[1])
    frame.rate, frame.pts = rate, pts
    if frame.format.is_planar:
        for number, level_N in enumerate(levels_CN):
            AudioPlane(frame, number).update(np.ascontiguousarray(level_N))
    else:
        AudioPlane(frame, 0).update(np.ascontiguousarray(levels_CN.T))
    return frame


def layouts(channels: int) -> Iterator[str]:
    """Names of FFmpeg for so many channels, the usual ones first."""
    usual = (
        "mono",
        "stereo",
        "2.1",
        "3.0",
        "4.0",
        "quad",
        "5.0",
        "5.1",
        "6.1",
        "7.1",
        "7.1.2",
        "7.1.4",
        "hexadecagonal",
    )
    yield from (name for name in usual if av.AudioLayout(name).nb_channels == channels)
    yield f"{channels} channels"


def write(path: Path, container: str, name: str, form: str, layout: str, rate: int) -> int:
    """Write the tones; how many samples of each channel were written.

    Raises:
        av.FFmpegError, ValueError: the encoder or the container refuses.
    """
    samples_CN = tones(layout, rate)
    with av.open(str(path), "w", format=container) as output:
        stream = output.add_stream(name, rate=rate, layout=layout, format=form)
        _settle(stream.codec_context, name)
        stream.codec_context.open()
        size = min(stream.codec_context.frame_size or 1024, samples_CN.shape[1])
        levels_CN = as_format(samples_CN, form)
        for start in range(0, levels_CN.shape[1] // size * size, size):
            frame = frame_of(levels_CN[:, start : start + size], form, layout, rate, start)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return samples_CN.shape[1] // size * size


def written(
    folder: Path, name: str, form: str, channels: int, containers: int = 1
) -> Iterator[tuple[Path, int, int, str]]:
    """Path, rate, samples written and layout, in the first containers that take it; none where the encoder refuses."""
    accepted = next(_accepted(name, form, channels), None)
    if accepted is None:
        return
    found = 0
    for container in CONTAINERS:
        path = folder / f"{name}-{form}-{channels}.{container}"
        with suppress(av.FFmpegError, ValueError, OSError):
            count = write(path, container, name, form, *accepted)
            if path.exists():
                yield path, accepted[1], count, accepted[0]
                found += 1
        if found == containers:
            return


def _accepted(name: str, form: str, channels: int) -> Iterator[tuple[str, int]]:
    """Layouts and rates that the encoder takes."""
    for layout in layouts(channels):
        for rate in RATES:
            context = av.CodecContext.create(name, "w")
            context.format, context.layout, context.rate = form, layout, rate
            _settle(context, name)
            with suppress(av.FFmpegError, ValueError):
                context.open()
                yield layout, rate


def _settle(context: av.CodecContext, name: str) -> None:
    """Set the options that an encoder needs beside the format."""
    context.options = {"strict": "experimental"}
    if name in BIT_RATES:
        context.bit_rate = BIT_RATES[name]
