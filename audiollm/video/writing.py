"""Videos written with PyAV: pictures with sound, and another sound under pictures that stay as they are.

Shapes: C channels, N samples, H rows, W columns of pixels.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from audiollm.audio.samples import Waveform
from audiollm.files.atomic import atomic_path
from audiollm.video.decoders import NO_OTHER_FILES, VideoError

_SOUND_CODECS = {".mp4": "aac", ".mov": "pcm_s16le", ".mkv": "flac"}
"""Endings of files, and the codec of their sound; FLAC keeps 24 bits of every sample, PCM 16."""
_PICTURE_CODEC = "libx264"
_AAC_BITS_PER_CHANNEL = 96_000
_BLOCK = 1 << 18
"""Samples of every channel that are encoded at once."""


def write_video(
    path: Path, frames: Iterable[NDArray[np.uint8]], frame_rate: float, sound: Waveform | None = None
) -> None:
    """Write pictures `[H, W, 3]`, RGB, of even height and width, with sound; the file is whole or absent.

    Raises:
        VideoError: an ending other than .mp4, .mov and .mkv, or pictures that cannot be encoded.
    """
    codec = _sound_codec(path)
    with atomic_path(path) as temporary:
        try:
            with av.open(str(temporary), "w", format=_container(path)) as container:
                pictures = container.add_stream(
                    _PICTURE_CODEC, rate=Fraction(frame_rate).limit_denominator(1001)
                )
                pictures.pix_fmt = "yuv420p"
                pictures.options = {"crf": "16", "preset": "veryfast"}
                samples = None if sound is None else _sound_stream(container, codec, sound)
                for number, frame_HWC in enumerate(frames):
                    if number == 0:
                        pictures.height, pictures.width = frame_HWC.shape[:2]
                    container.mux(pictures.encode(av.VideoFrame.from_ndarray(frame_HWC, format="rgb24")))
                container.mux(pictures.encode(None))
                if sound is not None:
                    _encode_sound(container, samples, sound)
        except (av.error.FFmpegError, ValueError) as error:
            raise VideoError(path, f"cannot be written ({error})") from error


def replace_sound(source: Path, sound: Waveform, path: Path) -> None:
    """Write the pictures of `source`, copied and not encoded anew, with `sound`; the file is whole or absent.

    Raises:
        VideoError: `source` has no pictures or cannot be read, or pictures of its codec do not go into such a file.
    """
    codec = _sound_codec(path)
    with atomic_path(path) as temporary:
        try:
            with (
                source.open("rb") as binary,
                av.open(binary, "r", options=NO_OTHER_FILES) as old,
                av.open(str(temporary), "w", format=_container(path)) as new,
            ):
                if not old.streams.video:
                    raise VideoError(source, "has no pictures: give a video")
                pictures = new.add_stream_from_template(old.streams.video[0])
                samples = _sound_stream(new, codec, sound)
                for packet in old.demux(old.streams.video[0]):
                    if packet.dts is not None:
                        packet.stream = pictures
                        new.mux(packet)
                _encode_sound(new, samples, sound)
        except (av.error.FFmpegError, OSError, ValueError) as error:
            raise VideoError(path, f"cannot be written ({error})") from error


# Private


def _sound_codec(path: Path) -> str:
    ending = path.suffix.lower()
    if ending not in _SOUND_CODECS:
        raise VideoError(path, f"a video ends with {', '.join(_SOUND_CODECS)}, not {ending or 'nothing'}")
    return _SOUND_CODECS[ending]


def _container(path: Path) -> str:
    return {".mkv": "matroska"}.get(path.suffix.lower(), path.suffix.lower()[1:])


def _sound_stream(container: Any, codec: str, sound: Waveform) -> Any:
    channels = sound.samples_CN.shape[0]
    stream = container.add_stream(codec, rate=sound.sample_rate)
    stream.layout = {1: "mono", 2: "stereo"}.get(channels, f"{channels} channels")
    if codec == "flac":
        stream.format = "s32"  # 24 bits of each sample; FFmpeg's own choice are 16
    if codec == "aac":
        stream.bit_rate = _AAC_BITS_PER_CHANNEL * channels
    return stream


def _encode_sound(container: Any, stream: Any, sound: Waveform) -> None:
    """Encode block by block: an hour of sound is 1.4 GB, of which FFmpeg would hold two more copies."""
    resampler = av.AudioResampler(stream.format, stream.layout, sound.sample_rate, stream.frame_size or None)
    for begin in range(0, sound.num_samples, _BLOCK):
        values_CN = np.ascontiguousarray(sound.samples_CN[:, begin : begin + _BLOCK].numpy(), np.float32)
        frame = av.AudioFrame.from_ndarray(values_CN, format="fltp", layout=stream.layout.name)
        frame.sample_rate = sound.sample_rate
        frame.time_base = Fraction(1, sound.sample_rate)
        frame.pts = begin
        for piece in resampler.resample(frame):
            container.mux(stream.encode(piece))
    for piece in resampler.resample(None):
        container.mux(stream.encode(piece))
    container.mux(stream.encode(None))
