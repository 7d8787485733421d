"""Videos written with PyAV: pictures with sound, and another sound under pictures that stay as they are.

Shapes: C channels, N samples, H rows, W columns of pixels.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from audiollm.audio.decoding_process import DecoderCrash, contained_results
from audiollm.audio.samples import Waveform
from audiollm.files.atomic import atomic_path
from audiollm.video.decoders import VideoError
from audiollm.video.replacing import ReplaceRequest, encoded_sound, sound_stream

_SOUND_CODECS = {".mp4": "aac", ".mov": "pcm_s16le", ".mkv": "flac"}
"""Endings of files, and the codec of their sound; FLAC keeps 24 bits of every sample, PCM 16."""
_BEYOND_FULL_SCALE = "pcm_f32le"
"""The codec of sound with samples above full scale, such as peaks of an MP3, which integers would clip."""
_PICTURE_CODEC = "libx264"


def write_video(
    path: Path, frames: Iterable[NDArray[np.uint8]], frame_rate: float, sound: Waveform | None = None
) -> None:
    """Write pictures `[H, W, 3]`, RGB, of even height and width, with sound; the file is whole or absent.

    Raises:
        VideoError: an ending other than .mp4, .mov and .mkv, or pictures that cannot be encoded.
    """
    codec = _SOUND_CODECS[_check_ending(path)]
    with atomic_path(path) as temporary:
        try:
            with av.open(str(temporary), "w", format=_container_of(path)) as container:
                pictures = container.add_stream(
                    _PICTURE_CODEC, rate=Fraction(frame_rate).limit_denominator(1001)
                )
                pictures.pix_fmt = "yuv420p"
                pictures.options = {"crf": "16", "preset": "veryfast"}
                if sound is not None:
                    samples_CN = sound.samples_CN.numpy()
                    stream = sound_stream(container, codec, len(samples_CN), sound.sample_rate)
                for number, frame_HWC in enumerate(frames):
                    if number == 0:
                        pictures.height, pictures.width = frame_HWC.shape[:2]
                    container.mux(pictures.encode(av.VideoFrame.from_ndarray(frame_HWC, format="rgb24")))
                container.mux(pictures.encode(None))
                if sound is not None:
                    for _ in encoded_sound(container, stream, samples_CN, sound.sample_rate):
                        pass
        except (av.error.FFmpegError, ValueError) as error:
            raise VideoError(path, f"cannot be written ({error})") from error


def replace_sound(source: Path, sound: Waveform, path: Path) -> None:
    """Write the pictures of `source`, copied and not encoded anew, with `sound`; the file is whole or absent.

    The sound takes the place of the first one of `source`. Other sounds, subtitles, chapters and tags are copied where
    the format takes them (`lost_by_replacing`). FFmpeg reads and writes in a process of its own
    (`audiollm.audio.decoding_process`): a file that crashes it costs this call. The samples go there in a file beside
    `path`, as 32-bit floating-point numbers.

    Raises:
        VideoError: `source` has no pictures or cannot be read, or pictures of its codec do not go into such a file.
    """
    codec = sound_codec(path, sound.samples_CN)
    with atomic_path(path) as temporary:
        samples = temporary.with_name(f"{temporary.name}.npy")
        try:
            np.save(samples, sound.samples_CN.numpy().astype(np.float32, copy=False))
            request = ReplaceRequest(
                str(source), source, str(samples), sound.num_channels, sound.sample_rate, codec, str(temporary),
                _container_of(path),
            )  # fmt: skip
            # not remembered: other containers may take the pictures, and they can still be shown
            for _ in contained_results("audiollm.video.replacing:replaced", request, remember=False):
                pass
        except DecoderCrash as crash:
            raise VideoError(crash.path, crash.reason) from None
        finally:
            samples.unlink(missing_ok=True)


def lost_by_replacing(source: Path, path: Path, sample_rate: int, channels: int) -> list[str]:
    """What `source` holds and `replace_sound` would not take over into a file of this name, in words.

    The beginning of the file is written in the folder of temporary files, and read.

    Raises:
        VideoError: see `replace_sound`.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / f"trial{path.suffix.lower()}"
        codec = _SOUND_CODECS[_check_ending(path)]
        request = ReplaceRequest(
            str(source), source, "", channels, sample_rate, codec, str(out), _container_of(path)
        )
        try:
            (names,) = contained_results("audiollm.video.replacing:lost", request, remember=False)
        except DecoderCrash as crash:
            raise VideoError(crash.path, crash.reason) from None
    return list(names)


def sound_codec(path: Path, samples_CN: Tensor) -> str:
    """The codec of the sound of a file of this name: one that holds what it can of the samples.

    Raises:
        VideoError: an ending other than .mp4, .mov and .mkv.
    """
    ending = _check_ending(path)
    if ending != ".mp4" and bool((samples_CN.abs() > 1).any()):
        return _BEYOND_FULL_SCALE
    return _SOUND_CODECS[ending]


# Private


def _check_ending(path: Path) -> str:
    ending = path.suffix.lower()
    if ending not in _SOUND_CODECS:
        raise VideoError(path, f"a video ends with {', '.join(_SOUND_CODECS)}, not {ending or 'nothing'}")
    return ending


def _container_of(path: Path) -> str:
    return {".mkv": "matroska"}.get(path.suffix.lower(), path.suffix.lower()[1:])
