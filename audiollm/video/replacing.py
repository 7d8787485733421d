"""Another sound under pictures that stay as they are; it runs in the process that a crash may cost, without torch.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from audiollm.video.companions import Companions, add_companions, copy_facts, lost_facts, packets
from audiollm.video.decoders import NO_OTHER_FILES, VideoError, shown_stream

_AAC_BITS_PER_CHANNEL = 96_000
_BLOCK = 1 << 18
"""Samples of every channel that are encoded at once."""
_REPORT_EVERY = 1000
"""Packets that are copied between two signs of life."""
_TRIAL_PACKETS = 200
_END = object()


@dataclass(frozen=True)
class ReplaceRequest:
    """A sound to be put under the pictures of `source`, called `name` in errors."""

    source: str
    name: str | Path
    samples: str
    """A .npy file of float32 `[C, N]`; of a trial none is read."""
    channels: int
    sample_rate: int
    codec: str
    out: str
    container: str


def replaced(request: ReplaceRequest) -> Iterator[None]:
    """Write `out` with the pictures of `source`, copied, and the samples, both from 0 s on; gives signs of life.

    The samples take the place of the first sound. Whatever else the film holds is copied where the container takes it:
    `lost` names the rest.

    Raises:
        VideoError: `source` has no pictures or cannot be read, or its pictures do not go into such a file.
    """
    samples_CN = np.load(request.samples, mmap_mode="r")
    with _open_films(request) as (old, new, companions, stream):
        sound, sound_s = encoded_sound(new, stream, samples_CN, request.sample_rate), 0.0
        for number, packet in enumerate(packets(old, companions)):
            while sound_s <= float((packet.dts or 0) * packet.time_base) and next(sound, _END) is not _END:
                sound_s += _BLOCK / request.sample_rate
            new.mux(packet)
            if number % _REPORT_EVERY == 0:
                yield
        yield from sound


def lost(request: ReplaceRequest) -> Iterator[list[str]]:
    """Name what `source` holds and a file with another sound would not; `out` is written in part, as a trial.

    Raises:
        VideoError: `source` has no pictures or cannot be read, or its pictures do not go into such a file.
    """
    with _open_films(request) as (old, new, companions, stream):
        for packet in itertools.islice(packets(old, companions), _TRIAL_PACKETS):
            new.mux(packet)
        silence_CN = np.zeros((request.channels, request.sample_rate // 10), np.float32)
        for _ in encoded_sound(new, stream, silence_CN, request.sample_rate):
            pass
        names = companions.lost
        new.close()
        with av.open(request.out, "r") as trial:
            names = names + lost_facts(old, trial, companions)
    yield names


@contextlib.contextmanager
def _open_films(request: ReplaceRequest) -> Iterator[tuple[Any, Any, Companions, Any]]:
    """The old film, the new one with its streams, and that of its sound."""
    streams: list[Any] = []
    try:
        with (
            open(request.source, "rb") as binary,
            av.open(binary, "r", options=NO_OTHER_FILES) as old,
            av.open(request.out, "w", format=request.container) as new,
        ):

            def add_sound(replaced: Any | None) -> None:
                stream = sound_stream(new, request.codec, request.channels, request.sample_rate)
                if replaced is not None:
                    copy_facts(replaced, stream, request.container)
                streams.append(stream)

            shown_stream(old, request.name)
            yield old, new, add_companions(old, new, add_sound), streams[0]
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise VideoError(request.name, f"cannot be written with another sound ({error})") from None


def sound_stream(container: Any, codec: str, channels: int, sample_rate: int) -> Any:
    """Add a stream of sound to a container that is written."""
    stream = container.add_stream(codec, rate=sample_rate)
    stream.layout = {1: "mono", 2: "stereo"}.get(channels, f"{channels} channels")
    if codec == "flac":
        stream.format = "s32"  # 24 bits of each sample; FFmpeg's own choice are 16
    if codec == "aac":
        stream.bit_rate = _AAC_BITS_PER_CHANNEL * channels
    return stream


def encoded_sound(
    container: Any, stream: Any, samples_CN: NDArray[np.float32], sample_rate: int
) -> Iterator[None]:
    """Encode block by block: an hour of sound is 1.4 GB, of which FFmpeg would hold two more copies."""
    resampler = av.AudioResampler(stream.format, stream.layout, sample_rate, stream.frame_size or None)
    for begin in range(0, samples_CN.shape[1], _BLOCK):
        values_CN = np.ascontiguousarray(samples_CN[:, begin : begin + _BLOCK], np.float32)
        frame = av.AudioFrame.from_ndarray(values_CN, format="fltp", layout=stream.layout.name)
        frame.sample_rate = sample_rate
        frame.time_base = Fraction(1, sample_rate)
        frame.pts = begin
        for piece in resampler.resample(frame):
            container.mux(stream.encode(piece))
        yield
    for piece in resampler.resample(None):
        container.mux(stream.encode(piece))
    container.mux(stream.encode(None))
