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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import soundfile
from numpy.typing import NDArray

from audiollm.audio.discovery import AudioError, is_rate
from audiollm.audio.flac import flac_length
from audiollm.audio.frames import frame_damage
from audiollm.audio.lengths import AudioInfo, header_frames, holds_facts, stream_lengths, uncounted_sound
from audiollm.audio.ogg import OggLink, link_content, ogg_links

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
    Not FLAC whose header counts fewer samples than its frames hold: it ends there.
    Not Ogg of more than two channels: it leaves them in the order of Vorbis, with the centre before the right.
    """
    handle = soundfile.SoundFile(source if isinstance(source, str) else io.BytesIO(source))
    is_surround = handle.format == "OGG" and handle.channels > 2
    flac = flac_length(source) if handle.format == "FLAC" else None
    is_longer = flac is not None and flac.frames > flac.header
    if handle.format in ("MP3", "RAW") or is_surround or is_longer or handle.frames == 0:
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
        if handle.format == "OGG" and len(ogg_links(request.source)) > 1:
            raise ValueError("left to FFmpeg: a chain of Ogg streams")
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
            remaining = stop - start
            count = remaining if remaining < block + last_packet else block
            block_NC = handle.read(count, dtype="float32", always_2d=True)
            if len(block_NC) == 0:
                raise ValueError(f"left to FFmpeg: {stop - start} frames fewer than promised")
            start += len(block_NC)
            yield block_NC.T, rate


def soundfile_info(source: str | bytes) -> AudioInfo:
    """Read the header with libsndfile, which raises for formats that it does not read."""
    with open_soundfile(source) as handle:
        links = ogg_links(source) if handle.format == "OGG" else ()
        if len(links) > 1:
            return _chain_info(source, "<chain>", links)
        rate, has_length = handle.samplerate, handle.frames < _UNKNOWN_FRAMES
        header = header_frames(handle, source) if has_length and not links else None
        return AudioInfo(
            rate,
            handle.channels,
            handle.frames if has_length else None,
            handle.frames / rate if has_length else None,
            handle.format,
            handle.subtype,
            None if header is None else header / rate,
            _ogg_damage(links) or uncounted_sound(handle, source),
        )


def has_last_frame(source: str) -> bool:
    """Return whether libsndfile can read the last sample that a file's header promises."""
    with open_soundfile(source) as handle:
        try:
            handle.seek(handle.frames - 1)
            return len(handle.read(1)) == 1
        except soundfile.LibsndfileError:
            return False


# FFmpeg


def av_blocks(request: DecodeRequest, may_seek: bool = True) -> Iterator[Block]:
    """Decode the requested span with FFmpeg: seek to shortly before the span, drop the surplus, stop after the span.

    The sound of a video is counted from the second that its pictures are counted from: where it begins later, silence
    precedes it. Blocks of dropped samples are yielded empty.

    Raises:
        AudioError: it cannot be read, or the request does not fit the file.
    """
    name, start_s = request.name, request.start_s
    links = ogg_links(request.source)
    if len(links) > 1:
        yield from _chained_blocks(request, links)
        return
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
        kind = _describe_frame(first)

        def pieces() -> Iterator[NDArray[np.float32]]:
            nonlocal position
            for begin in range(start, min(position, stop), request.block_frames):
                size = min(begin + request.block_frames, position, stop) - begin
                yield np.zeros((first.layout.nb_channels, size), np.float32)
            if position >= stop:
                return
            for frame in itertools.chain([first], frames):
                if _describe_frame(frame) != kind:
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

        for block_CN in _gather_blocks(pieces(), request.block_frames):
            yield block_CN, rate
        if position <= start:
            raise request.starts_beyond(position / rate)


def av_info(source: str | bytes, name: str | Path) -> AudioInfo:
    """Read the header with FFmpeg.

    Raises:
        AudioError: it cannot be read.
    """
    links = ogg_links(source)
    if len(links) > 1:
        return _chain_info(source, name, links)
    with open_av(source, name) as (container, stream):
        context = stream.codec_context
        if not context.sample_rate:
            raise AudioError(name, "has no readable audio header: it is damaged or not audio, get it anew")
        duration_s = container.duration / 1e6 if container.duration is not None else None
        if stream.duration is not None and stream.time_base is not None:
            begins_s = float((stream.start_time or 0) * stream.time_base)
            duration_s = float(stream.duration * stream.time_base) + _late_s(container, begins_s)
        rate, channels, kind = context.sample_rate, context.channels, (container.format.name, context.name)
        duration_s, header_s = stream_lengths(container, stream, source, duration_s)
        damage = _ogg_damage(links) or frame_damage(source, container.format.name)
        return AudioInfo(rate, channels, None, duration_s, *kind, header_s, damage)


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
            # one MP3 behind another begins with a frame of facts, which is no hole
            is_broken = is_broken or (end_s is not None and not holds_facts(bytes(packet)))
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


# Either


def blocks_of_either(by_soundfile: Iterator[Block], by_av: Callable[[], Iterator[Block]]) -> Iterator[Block]:
    """Blocks of libsndfile and, from where it fails, those of FFmpeg, which decides whatever the first has against it.

    Raises:
        AudioError: the sound cannot be read, or not on from here.
    """
    done = 0
    try:
        for block_CN, rate in by_soundfile:
            done += block_CN.shape[1]
            yield block_CN, rate
        return
    except AudioError:
        raise
    except Exception:  # FFmpeg decides
        pass
    for block_CN, rate in by_av():
        fresh_CN = block_CN[:, done:]
        done = max(0, done - block_CN.shape[1])
        if fresh_CN.shape[1]:
            yield fresh_CN, rate


def info_of_either(source: str | bytes, name: str | Path) -> AudioInfo:
    """Read the header by libsndfile, or else by FFmpeg.

    Raises:
        AudioError: it is not audio.
    """
    try:
        return soundfile_info(source)
    except Exception:  # FFmpeg decides
        return av_info(source, name)


# Chains of Ogg streams


def _chained_blocks(request: DecodeRequest, links: Sequence[OggLink]) -> Iterator[Block]:
    """Decode the requested span of Ogg streams that follow each other, one after the other.

    Raises:
        AudioError: none can be read, or one has another rate or other channels than the first.
    """
    infos = _link_infos(request.source, request.name, links)
    rate, position = next(iter(infos.values())).sample_rate, 0
    start, stop = request.in_samples(rate)
    for link, info in infos.items():
        length = round((info.duration_s or 0.0) * rate) if info.num_samples is None else info.num_samples
        if position + length > start and position < stop:
            span = replace(
                request,
                source=link_content(request.source, link),
                start_s=max(0, start - position) / rate,
                end_s=(stop - position) / rate if stop < position + length else None,
            )
            yield from blocks_of_either(soundfile_blocks(span), partial(av_blocks, span))
        position += length
    if position <= start:
        raise request.starts_beyond(position / rate)


def _chain_info(source: str | bytes, name: str | Path, links: Sequence[OggLink]) -> AudioInfo:
    """
    Raises:
        AudioError: no stream can be read, or one has another rate or other channels than the first.
    """
    infos = list(_link_infos(source, name, links).values())
    samples = [info.num_samples for info in infos if info.num_samples is not None]
    return replace(
        infos[0],
        num_samples=sum(samples) if len(samples) == len(infos) else None,
        duration_s=sum(info.duration_s or 0.0 for info in infos),
        header_s=None,
        damage=_ogg_damage(links),
    )


def _link_infos(source: str | bytes, name: str | Path, links: Sequence[OggLink]) -> dict[OggLink, AudioInfo]:
    """Format facts of the streams. One that was cut off before its first sample is left out: `damage` names it.

    Raises:
        AudioError: as `_chain_info`.
    """
    infos: dict[OggLink, AudioInfo] = {}
    for link in links:
        try:
            infos[link] = info_of_either(link_content(source, link), name)
        except AudioError:
            if link.is_whole or (link is links[-1] and not infos):
                raise
    kinds = list(dict.fromkeys((info.sample_rate, info.num_channels) for info in infos.values()))
    if len(kinds) > 1:
        forms = ", then ".join(f"{rate} Hz with {channels} channels" for rate, channels in kinds)
        reason = f"chains Ogg streams of several forms ({forms}): convert it, ffmpeg -i IN OUT.wav"
        raise AudioError(name, reason)
    return infos


def _ogg_damage(links: Sequence[OggLink]) -> str | None:
    """Name a missing end; None where all of an Ogg file's streams end with their last page, and for other files."""
    number = sum(not link.is_whole for link in links)
    if not number:
        return None
    which = (
        "its last page" if len(links) == 1 else f"the last page of {number} of its {len(links)} Ogg streams"
    )
    return f"is cut off: {which} is missing"


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


def _describe_frame(frame: AudioFrame) -> tuple[int, str]:
    return frame.sample_rate, frame.layout.name


def _gather_blocks(pieces: Iterable[NDArray[np.float32]], block_frames: int) -> Iterator[NDArray[np.float32]]:
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
