"""The two decoders of sound files: from a file, or its content, to blocks of samples or what its header says.

libsndfile (through soundfile) and FFmpeg (through PyAV). Imports no torch: `decoding_process` runs this in processes
of its own, because a damaged file can crash either of them.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import io
import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import soundfile
from numpy.typing import NDArray

from audiollm.audio.discovery import AudioError, is_rate

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer

# Headers lie about lengths, and libsndfile's Vorbis encoder overflows its stack on long writes: go by blocks.
BLOCK_FRAMES = 1 << 16
_UNKNOWN_FRAMES = 1 << 62  # libsndfile's answer for a stream of unknown length is 2**63 - 1
_PREROLL_S = 1.0  # decoded and thrown away after a seek, until a lossy decoder's state has settled
# Seeking into the last page of a Vorbis stream, libsndfile ends up elsewhere (its issue 885). A page holds at
# most 255 packets, 8 s with libvorbis: seek to before it and read on from there.
_VORBIS_PREROLL_S = 20
_MAX_GAP_S = 0.1  # a longer hole between two decoded frames means lost data
_MAX_LATE_S = 600.0  # sound that begins later after its pictures has a damaged clock
_MAX_PIECES = 1024  # of FFmpeg's frames in a block: some 20 s, even where they are thrown away
_SAMPLE_TYPES = {"u8": "u1", "s16": "i2", "s32": "i4", "s64": "i8", "flt": "f4", "dbl": "f8"}

Block: TypeAlias = "tuple[NDArray[np.float32], int]"
"""Samples `[C, N]`, of which there may be none, and their rate."""


@dataclass(frozen=True)
class AudioInfo:
    """Format facts from a file's header. A length is None where the header has none; `duration_s` is an estimate from
    the bit rate in streams without a length (ADTS, MP3 without a Xing header)."""

    sample_rate: int
    num_channels: int
    num_samples: int | None
    duration_s: float | None
    format: str
    codec: str


@dataclass(frozen=True)
class DecodeRequest:
    """A read request: a span of `source` (the path of a file, or its content), called `name` in errors.

    `block_frames` is about how many samples of every channel a block holds.
    """

    source: str | bytes
    name: str | Path
    start_s: float
    end_s: float | None
    sample_rate: int | None
    mono: bool
    block_frames: int = BLOCK_FRAMES

    def check(self) -> None:
        if not 0.0 <= self.start_s < math.inf:
            raise AudioError(self.name, f"start_s must be 0 or more, not {self.start_s}")
        if self.end_s is not None and not self.start_s < self.end_s < math.inf:
            raise AudioError(self.name, f"end_s must be after start_s={self.start_s}, not {self.end_s}")
        if self.sample_rate is not None and not is_rate(self.sample_rate):
            raise AudioError(self.name, f"sample_rate must be a positive integer, not {self.sample_rate!r}")

    def in_samples(self, sample_rate: int) -> tuple[int, int]:
        start = round(self.start_s * sample_rate)
        stop = sys.maxsize if self.end_s is None else round(self.end_s * sample_rate)
        if stop <= start:
            raise AudioError(self.name, f"{self.start_s} to {self.end_s} s: no sample at {sample_rate} Hz")
        return start, stop

    def starts_beyond(self, duration_s: float) -> AudioError:
        return AudioError(self.name, f"start_s={self.start_s} is beyond the end at {duration_s:.3f} s")


# libsndfile


def open_soundfile(source: str | bytes) -> soundfile.SoundFile:
    """Open what libsndfile reads well; anything else raises, and is left to FFmpeg.

    Not MP3: libsndfile estimates the length and cuts files of variable bit rate off there.
    Not RAW: it takes any bytes with the extension .au, .gsm or .vox for samples.
    Not Ogg of more than two channels: it leaves them in the order of Vorbis, with the centre before the right.
    """
    handle = soundfile.SoundFile(source if isinstance(source, str) else io.BytesIO(source))
    is_surround = handle.format == "OGG" and handle.channels > 2
    if handle.format in ("MP3", "RAW") or is_surround or handle.frames == 0:
        handle.close()
        raise ValueError(f"left to FFmpeg: {handle.format}, {handle.frames} frames")
    return handle


def soundfile_blocks(request: DecodeRequest) -> Iterator[Block]:
    """Decode the requested span with libsndfile, block by block.

    Raises:
        AudioError: the request does not fit the file.
        Exception: libsndfile has something against the file, which FFmpeg may still read.
    """
    with open_soundfile(request.source) as handle:
        rate, num_frames = handle.samplerate, handle.frames
        start, stop = request.in_samples(rate)
        stop = min(stop, num_frames)
        if start >= num_frames:
            raise request.starts_beyond(num_frames / rate)
        if start > 0:
            preroll = min(start, _VORBIS_PREROLL_S * rate) if handle.subtype == "VORBIS" else 0
            handle.seek(start - preroll)
            handle.read(preroll)
        block = max(1, request.block_frames // handle.channels)
        last_packet = rate if handle.subtype == "OPUS" else 0  # a read that starts there gives other samples
        while start < stop:
            left = stop - start
            count = left if left < block + last_packet else block
            block_NC = handle.read(count, dtype="float32", always_2d=True)
            if len(block_NC) == 0:
                raise ValueError(f"left to FFmpeg: {stop - start} frames fewer than promised")
            start += len(block_NC)
            yield block_NC.T, rate


def soundfile_info(source: str | bytes) -> AudioInfo:
    """Read the header with libsndfile, which raises for formats that it does not read."""
    with open_soundfile(source) as handle:
        known = handle.frames < _UNKNOWN_FRAMES
        num_samples = handle.frames if known else None
        duration_s = handle.frames / handle.samplerate if known else None
        return AudioInfo(
            handle.samplerate, handle.channels, num_samples, duration_s, handle.format, handle.subtype
        )


# FFmpeg


def av_blocks(request: DecodeRequest, may_seek: bool = True) -> Iterator[Block]:
    """Decode the requested span with FFmpeg: seek to shortly before the span, drop the surplus, stop after the span.

    The sound of a video is counted from the second that its pictures are counted from: where it begins later, silence
    precedes it. Blocks of dropped samples are yielded empty.

    Raises:
        AudioError: it cannot be read, or the request does not fit the file.
    """
    name, start_s = request.name, request.start_s
    with open_av(request.source, name) as (container, stream):
        frames = av_frames(container, stream, name)
        first = next(frames, None)
        if first is None:
            raise AudioError(name, "holds no samples that can be decoded: empty or cut off, get it anew")
        rate, begins_s = first.sample_rate, first.time or 0.0
        late_s = _late_s(container, begins_s)
        if late_s > _MAX_LATE_S:
            reason = f"its sound begins {late_s:.0f} s after its pictures: its clock is damaged, get it anew"
            raise AudioError(name, reason)
        origin_s, position = begins_s - late_s, round(late_s * rate)
        start, stop = request.in_samples(rate)
        if may_seek and start_s > _PREROLL_S:
            frames = av_frames(container, stream, name, seek_s=origin_s + start_s - _PREROLL_S)
            first = next(frames, None)
            if first is None or first.time is None or first.time - origin_s > start_s:
                yield from av_blocks(request, may_seek=False)
                return
            position = round((first.time - origin_s) * rate)
        kind = _kind(first)

        def pieces() -> Iterator[NDArray[np.float32]]:
            nonlocal position
            for begin in range(start, min(position, stop), request.block_frames):
                size = min(begin + request.block_frames, position, stop) - begin
                yield np.zeros((first.layout.nb_channels, size), np.float32)
            if position >= stop:
                return
            for frame in itertools.chain([first], frames):
                if _kind(frame) != kind:
                    raise AudioError(
                        name, "changes its sample rate or channels midway: re-encode it with ffmpeg"
                    )
                if position + frame.samples > start:
                    yield frame_samples(frame)[:, max(0, start - position) : stop - position]
                else:
                    yield np.empty((frame.layout.nb_channels, 0), np.float32)
                position += frame.samples
                if position >= stop:
                    return

        for block_CN in _gathered(pieces(), request.block_frames):
            yield block_CN, rate
        if position <= start:
            raise request.starts_beyond(position / rate)


def av_info(source: str | bytes, name: str | Path) -> AudioInfo:
    """Read the header with FFmpeg.

    Raises:
        AudioError: it cannot be read.
    """
    with open_av(source, name) as (container, stream):
        context = stream.codec_context
        if not context.sample_rate:
            raise AudioError(name, "has no readable audio header: it is damaged or not audio, get it anew")
        duration_s = container.duration / 1e6 if container.duration is not None else None
        if stream.duration is not None and stream.time_base is not None:
            begins_s = float((stream.start_time or 0) * stream.time_base)
            duration_s = float(stream.duration * stream.time_base) + _late_s(container, begins_s)
        kind = (container.format.name, context.name)
        return AudioInfo(context.sample_rate, context.channels, None, duration_s, *kind)


@contextmanager
def open_av(source: str | bytes, name: str | Path) -> Iterator[tuple[InputContainer, AudioStream]]:
    import av

    # No protocol is allowed: a playlist dressed up as audio must not reach other files or the network.
    options = {"protocol_whitelist": "none"}
    try:
        with (
            open(source, "rb") if isinstance(source, str) else io.BytesIO(source) as binary,
            av.open(binary, "r", options=options) as container,
        ):
            if not container.streams.audio:
                raise AudioError(name, "has no audio stream")
            stream = container.streams.audio[0]
            if stream.codec_context.name == "flac":  # otherwise FFmpeg plays damaged frames as noise
                stream.codec_context.options = {"err_detect": "crccheck+explode"}
            yield container, stream
    except AudioError:
        raise
    except MemoryError as error:
        reason = "asks for more memory than there is: it is damaged, or larger than this machine can take"
        raise AudioError(name, reason) from error
    except Exception as error:
        reason = f"cannot be read as audio ({getattr(error, 'strerror', None) or error})"
        raise AudioError(name, f"{reason}: get it anew, or convert it to WAV or FLAC") from error


def av_frames(
    container: InputContainer, stream: AudioStream, name: str | Path, seek_s: float | None = None
) -> Iterator[AudioFrame]:
    """Decoded frames in order, from the one before `seek_s` if given; none where the container cannot seek.

    Packets that fail before the first frame or after the last are junk around the recording; between
    frames they are, like a jump of the clock, a hole in it.
    """
    import av

    if seek_s is not None:
        try:
            container.seek(int(seek_s / (stream.time_base or 1)), stream=stream)
        except av.FFmpegError:
            return
    end_s: float | None = None
    is_broken = False
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except av.FFmpegError:
            is_broken = end_s is not None
            continue
        for frame in frames:
            time_s = (end_s or 0.0) if frame.time is None else frame.time
            if end_s is not None and (is_broken or time_s - end_s > _MAX_GAP_S):
                repair = "ffmpeg -i IN -af aresample=async=1 OUT.wav fills the hole with silence"
                raise AudioError(name, f"is damaged at about {end_s:.1f} s: get it anew, or {repair}")
            end_s = time_s + frame.samples / frame.sample_rate
            yield frame


def frame_samples(frame: AudioFrame) -> NDArray[np.float32]:
    """A decoded frame of any sample format and number of channels as float32 `[C, N]`.

    Not by `AudioFrame.to_ndarray`: of 8 or more channels in planes PyAV does not know how many planes there
    are, and reads on behind the last one until the process crashes.
    """
    channels, count = frame.layout.nb_channels, frame.samples
    dtype = np.dtype(_SAMPLE_TYPES[frame.format.packed.name])
    if frame.format.is_planar:
        samples_CN = np.stack([_plane(frame, index, dtype, count) for index in range(channels)])
    else:
        samples_CN = _plane(frame, 0, dtype, count * channels).reshape(count, channels).T
    if dtype.kind in "iu":
        full_scale = 2.0 ** (8 * dtype.itemsize - 1)
        samples_CN = (samples_CN - (full_scale if dtype.kind == "u" else 0.0)) / full_scale
    return np.ascontiguousarray(samples_CN, dtype=np.float32)


# Private


def _plane(frame: AudioFrame, index: int, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """
    Raises:
        ValueError: it holds fewer values than `count`.
    """
    from av.audio.plane import AudioPlane

    memory: Any = AudioPlane(frame, index)
    return np.frombuffer(memory, dtype=dtype, count=count)


def _late_s(container: InputContainer, begins_s: float) -> float:
    """Seconds by which sound begins after the pictures beside it; 0 where there are none, or a cover alone."""
    pictures = [s for s in container.streams.video if not s.disposition & s.disposition.attached_pic]
    if not pictures or container.start_time is None:
        return 0.0
    return max(0.0, begins_s - container.start_time / 1e6)


def _kind(frame: AudioFrame) -> tuple[int, str]:
    return frame.sample_rate, frame.layout.name


def _gathered(pieces: Iterable[NDArray[np.float32]], block_frames: int) -> Iterator[NDArray[np.float32]]:
    """Joined to blocks of about this many samples: a frame of FFmpeg is some 20 ms."""
    gathered: list[NDArray[np.float32]] = []
    count = 0
    for piece_CN in pieces:
        gathered.append(piece_CN)
        count += piece_CN.shape[1]
        if count >= block_frames or len(gathered) >= _MAX_PIECES:
            yield np.concatenate(gathered, axis=1)
            gathered, count = [], 0
    if gathered:
        yield np.concatenate(gathered, axis=1)
