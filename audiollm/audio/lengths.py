"""Lengths of sound files: what a header tells, what is there, and the sentence that names a difference.

A file that was cut off decodes without an error as far as it goes, and a header may tell anything. Imports no torch.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from audiollm.audio.flac import flac_length

if TYPE_CHECKING:
    import soundfile
    from av.audio.stream import AudioStream
    from av.container import InputContainer

_EXACT_S = 0.02
"""Largest difference that is not named for codecs without a delay: PCM, FLAC."""
_LOSSY_S, _LOSSY_SAMPLES = 0.05, 4096
"""Largest difference that is not named for lossy codecs: seconds of rounding, and samples of delay and padding (AAC:
2112 before, a frame behind)."""
_STREAMED_BYTES = 0x7FFF0000
"""Sizes in 32-bit headers from which a program means that it did not know: 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF."""
_COUNTED_BYTES = 1 << 24
"""Frames of smaller files are counted. In larger ones a plausible header is trusted: an hour of MP3 takes 0.8 s."""
_FIRST_PACKETS = 2000
_PLAUSIBLE = 1.5
"""Largest factor between a file and its frames, by the number in its header and the size of the first ones."""
_BEHIND_S = 0.5
"""Duration of bytes behind a WAV's data, in no chunk, from which they are sound that the header does not count."""
_STREAMS = frozenset({"mp3", "aac", "ac3", "eac3", "amr", "amrnb", "amrwb"})
"""FFmpeg's names of formats that are frames alone: it guesses their duration by the bit rate."""
_WITH_LENGTH = (
    "mov",
    "matroska",
    "wv",
    "tta",
    "asf",
    "flac",
    "aiff",
    "au",
    "caf",
    "ape",
    "tak",
    "nistsphere",
)
"""Beginnings of FFmpeg's names of formats whose header tells a duration."""


@dataclass(frozen=True)
class AudioInfo:
    """Format facts of a file, read without decoding it. A length is None where neither the header nor the frames tell.

    `duration_s` is that of what is there, as far as this shows before decoding. `header_s` is what the header
    promises: None where it promises nothing. `damage` says what shows that the file is not whole.
    """

    sample_rate: int
    num_channels: int
    num_samples: int | None
    duration_s: float | None
    format: str
    codec: str
    header_s: float | None = None
    damage: str | None = None

    def difference(self, decoded_s: float) -> str | None:
        """Name the difference between the header and the sound that was decoded; None: the file is whole."""
        tolerance_s = _EXACT_S if self._is_exact else _LOSSY_S + _LOSSY_SAMPLES / self.sample_rate
        if self.header_s is not None and abs(self.header_s - decoded_s) > tolerance_s:
            what = "it is cut off" if decoded_s < self.header_s else "its header does not count all of it"
            return f"its header tells {self.header_s:.2f} s, {decoded_s:.2f} s could be decoded: {what}"
        return f"{self.damage}: {decoded_s:.2f} s could be decoded" if self.damage else None

    @property
    def _is_exact(self) -> bool:
        return self.codec.lower().startswith(("pcm", "float", "double", "ulaw", "alaw", "flac", "alac")) or (
            self.format == "FLAC"
        )


# libsndfile


def header_frames(handle: soundfile.SoundFile, source: str | bytes) -> int | None:
    """Frames that the header promises; None where it promises none. libsndfile corrects them by the file's size."""
    log = handle.extra_info
    if match := re.search(r"value from 'ds64' chunk of (\d+)", log):
        return int(match[1])
    if match := re.search(r"^ *(?:data|SSND|BODY|Data Size) *: (\d+) \(should be (\d+)\)", log, re.MULTILINE):
        promised, present = int(match[1]), int(match[2])
        return (
            None if promised >= _STREAMED_BYTES or not present else round(handle.frames * promised / present)
        )
    if match := re.search(r"^riff : (\d+) \(should be (\d+)\)\n(?:.*\n)*?data : (\d+)", log, re.MULTILINE):
        missing, promised = int(match[1]) - int(match[2]), int(match[3]) - 24
        return round(handle.frames * promised / max(1, promised - missing))
    if handle.format == "NIST":
        count_match = re.search(rb"sample_count -i (\d+)", _first_bytes(source, 1024))
        return int(count_match[1]) if count_match else None
    return handle.frames


def uncounted_sound(handle: soundfile.SoundFile, source: str | bytes) -> str | None:
    """Name bytes behind the sound of a WAV that belong to no chunk: a recorder that died wrote too small a size."""
    match = re.search(r"Unknown chunk marker \(\w+\) at position (\d+)", handle.extra_info)
    if handle.format not in ("WAV", "WAVEX") or not match or not handle.frames:
        return None
    behind = _get_source_size(source) - int(match[1])
    bytes_per_s = (int(match[1]) - 44) / handle.frames * handle.samplerate
    if behind < _BEHIND_S * bytes_per_s:
        return None
    return f"{behind} bytes behind its sound are not counted in its header and were not read"


# FFmpeg


class XingHeader(NamedTuple):
    """The first frame of an MP3 that holds facts and no sound."""

    frames: int


def xing_header(source: str | bytes) -> XingHeader | None:
    """The number of frames in the header that encoders write into an MP3's first frame (Xing, Info, VBRI)."""
    head = _first_bytes(source, 10)
    start = 0
    if head.startswith(b"ID3"):
        size = head[6:10]
        start = 10 + (size[0] << 21 | size[1] << 14 | size[2] << 7 | size[3])
    frame = _first_bytes(source, 4096, start)
    for tag, flags_at, frames_at in ((b"Xing", 4, 8), (b"Info", 4, 8), (b"VBRI", None, 14)):
        at = frame.find(tag, 0, 2048)
        if at < 0 or len(frame) < at + 18:
            continue
        if flags_at is None or struct.unpack_from(">I", frame, at + flags_at)[0] & 1:
            return XingHeader(struct.unpack_from(">I", frame, at + frames_at)[0])
    return None


def holds_facts(frame: bytes) -> bool:
    """Return whether a frame of an MP3 is the first one of a file, which holds facts and no sound."""
    return frame.startswith(b"ID3") or any(tag in frame for tag in (b"Xing", b"Info", b"VBRI"))


def stream_lengths(
    container: InputContainer, stream: AudioStream, source: str | bytes, guess_s: float | None
) -> tuple[float | None, float | None]:
    """The duration that is there and the one that the header promises, of what FFmpeg has opened.

    Args:
        guess_s: FFmpeg's duration.
    """
    name = container.format.name
    if name == "flac" and (flac := flac_length(source)) is not None:
        return flac.frames / flac.sample_rate, flac.header / flac.sample_rate
    if name in _STREAMS:
        header = xing_header(source) if name == "mp3" else None
        return _counted(container, stream, source, header, guess_s)
    if name == "caf" and stream.codec_context.name.startswith("pcm") and stream.frames:
        return guess_s, stream.frames / stream.codec_context.sample_rate
    is_alone = stream.duration is not None or not container.streams.video
    return guess_s, guess_s if name.startswith(_WITH_LENGTH) and is_alone else None


# Private


def _counted(
    container: InputContainer,
    stream: AudioStream,
    source: str | bytes,
    header: XingHeader | None,
    guess_s: float | None,
) -> tuple[float | None, float | None]:
    """Count frames: all, or in large files with a plausible header the first ones."""
    size = _get_source_size(source)
    packets = ticks = first_bytes = 0
    for packet in container.demux(stream):
        if not packet.size:
            continue
        packets, ticks = packets + 1, ticks + (packet.duration or 0)
        if packets <= _FIRST_PACKETS:
            first_bytes += packet.size
        elif packets == _FIRST_PACKETS + 1 and header is not None and size > _COUNTED_BYTES:
            ratio = header.frames * first_bytes / _FIRST_PACKETS / size
            if 1 / _PLAUSIBLE < ratio < _PLAUSIBLE:
                return guess_s, guess_s
    if not packets or stream.time_base is None:
        return guess_s, None
    counted_s = float(ticks * stream.time_base)
    if header is None:
        return counted_s, None
    header_s = header.frames * counted_s / packets
    padding_s = header_s - (guess_s or 0.0)
    if 0 <= padding_s <= _LOSSY_S + _LOSSY_SAMPLES / stream.codec_context.sample_rate:
        header_s -= padding_s  # FFmpeg believes the header, which tells the encoder's delay and padding, too
        counted_s = header_s if abs(packets - header.frames) <= 1 else counted_s
    return counted_s, header_s


def _first_bytes(source: str | bytes, count: int, start: int = 0) -> bytes:
    if isinstance(source, bytes):
        return source[start : start + count]
    with open(source, "rb") as file:
        file.seek(start)
        return file.read(count)


def _get_source_size(source: str | bytes) -> int:
    return len(source) if isinstance(source, bytes) else Path(source).stat().st_size
