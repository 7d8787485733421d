"""Files that are frames of sound one behind another, without a container: MPEG audio, AAC in ADTS, AC-3 and E-AC-3.

Decoders look for the next frame wherever one is missing, and say nothing. Here each frame begins where the last one
ends, or the place is named. Imports no torch.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

_MPEG_BITRATES = {
    (True, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
"""kbit/s by version 1 or not, and layer."""
_MPEG_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
_ADTS_RATES = (
    96_000,
    88_200,
    64_000,
    48_000,
    44_100,
    32_000,
    24_000,
    22_050,
    16_000,
    12_000,
    11_025,
    8_000,
    7_350,
)
_AC3_RATES = (48_000, 44_100, 32_000)
_AC3_BITRATES = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 576, 640)
_EAC3_BLOCKS = (1, 2, 3, 6)
_HEADER_BYTES = 7
"""The longest header that is read here."""
_TAGS = (b"TAG", b"APETAGEX", b"LYRICSBEGIN", b"ID3", b"3DI")
"""First bytes of tags around frames."""


class Frame(NamedTuple):
    """A frame's header."""

    size: int
    """Bytes, header included."""
    seconds: float
    form: tuple[int, ...]
    """Header fields that all frames of a stream share: version, layer, sample rate."""


def frame_damage(source: str | bytes, format: str) -> str | None:
    """Say where frames are not whole, or have something other between them; None: nowhere, or no such format.

    Bytes before the first frame are not named: a recording of a radio stream begins anywhere.

    Args:
        source: the path of a file, or its content.
        format: FFmpeg's name of it.
    """
    read_header = _READERS.get(format)
    if read_header is None:
        return None
    with ExitStack() as stack:
        content: bytes | mmap.mmap
        if isinstance(source, bytes):
            content = source
        else:
            file = stack.enter_context(open(source, "rb"))
            content = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return _damage(content, read_header)


def mpeg_frame(header: bytes) -> Frame | None:
    """The header of a frame of MPEG audio, layers I to III; None: it is none, or has no bit rate of the tables."""
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE0 != 0xE0:
        return None
    version, layer = header[1] >> 3 & 3, 4 - (header[1] >> 1 & 3)
    bitrate, rate = header[2] >> 4, header[2] >> 2 & 3
    if version == 1 or layer == 4 or bitrate in (0, 15) or rate == 3:
        return None
    is_first = version == 3
    hertz, padding = _MPEG_RATES[version][rate], header[2] >> 1 & 1
    bits_per_s = 1000 * _MPEG_BITRATES[is_first, layer][bitrate - 1]
    samples = 384 if layer == 1 else 1152 if layer == 2 or is_first else 576
    size = (
        (12 * bits_per_s // hertz + padding) * 4
        if layer == 1
        else samples // 8 * bits_per_s // hertz + padding
    )
    return Frame(size, samples / hertz, (version, layer, hertz))


def adts_frame(header: bytes) -> Frame | None:
    """The header of a frame of AAC in ADTS; None: it is none."""
    if len(header) < 7 or header[0] != 0xFF or header[1] & 0xF6 != 0xF0:
        return None
    rate, size = header[2] >> 2 & 15, (header[3] & 3) << 11 | header[4] << 3 | header[5] >> 5
    if rate >= len(_ADTS_RATES) or size < 7:
        return None
    return Frame(
        size, 1024 * ((header[6] & 3) + 1) / _ADTS_RATES[rate], (header[1] & 8, header[2] >> 6, rate)
    )


def ac3_frame(header: bytes) -> Frame | None:
    """The header of a frame of AC-3 or E-AC-3; None: it is none."""
    if len(header) < 6 or header[:2] != b"\x0b\x77":
        return None
    bsid, rate, code = header[5] >> 3, header[4] >> 6, header[4] & 63
    if bsid <= 10:
        if rate == 3 or code >= 2 * len(_AC3_BITRATES):
            return None
        words = _AC3_BITRATES[code >> 1] * 96_000 // _AC3_RATES[rate]
        words += code & 1 if rate == 1 else 0
        return Frame(2 * words, 1536 / _AC3_RATES[rate], (bsid, rate))
    if bsid > 16:
        return None
    stream, size = header[2] >> 3, 2 * (((header[2] & 7) << 8 | header[3]) + 1)
    hertz = (
        _AC3_RATES[rate] if rate < 3 else _AC3_RATES[header[4] >> 4 & 3] / 2 if header[4] >> 4 & 3 < 3 else 0
    )
    if not hertz:
        return None
    blocks = _EAC3_BLOCKS[header[4] >> 4 & 3] if rate < 3 else 6
    # frames of the other substreams sound together with the first one
    return Frame(size, 0.0 if stream else 256 * blocks / hertz, (bsid, rate))


# Private

_READERS: dict[str, Callable[[bytes], Frame | None]] = {
    "mp3": mpeg_frame,
    "aac": adts_frame,
    "ac3": ac3_frame,
    "eac3": ac3_frame,
}


def _damage(content: bytes | mmap.mmap, read_header: Callable[[bytes], Frame | None]) -> str | None:
    at = _next_frame(content, _tags_end(content), read_header, None)
    if at is None:
        return None
    first = read_header(content[at : at + _HEADER_BYTES])
    form = first.form if first is not None else ()
    seconds, gaps, gap_bytes, gap_s = 0.0, 0, 0, 0.0
    while at < len(content):
        frame = read_header(content[at : at + _HEADER_BYTES])
        if frame is not None and frame.form == form:
            if at + frame.size > len(content):
                return _sentence(gaps, gap_bytes, gap_s, "its last frame is cut off")
            seconds, at = seconds + frame.seconds, at + frame.size
            continue
        following = _next_frame(content, at, read_header, form)
        if following is None:
            return _sentence(gaps, gap_bytes, gap_s, _end_damage(content[at:], read_header))
        between = content[at:following]
        if not _is_tag(between):
            gaps, gap_bytes = gaps + 1, gap_bytes + len(between)
            gap_s = seconds if gaps == 1 else gap_s
        at = following
    return _sentence(gaps, gap_bytes, gap_s, None)


def _sentence(gaps: int, gap_bytes: int, gap_s: float, end: str | None) -> str | None:
    middle = None
    if gaps:
        places = f"at {gap_s:.2f} s" if gaps == 1 else f"in {gaps} places, the first at {gap_s:.2f} s,"
        middle = f"{gap_bytes} bytes {places} are no whole frame: sound is missing there, or they do not belong to it"
    return "; ".join(clause for clause in (middle, end) if clause) or None


def _next_frame(
    content: bytes | mmap.mmap,
    start: int,
    read_header: Callable[[bytes], Frame | None],
    form: tuple[int, ...] | None,
) -> int | None:
    """The first place from `start` where a frame begins that another one follows, or with which the file ends."""
    sync = b"\x0b\x77" if read_header is ac3_frame else b"\xff"
    at = content.find(sync, start)
    while at >= 0:
        frame = read_header(content[at : at + _HEADER_BYTES])
        if frame is not None and form in (None, frame.form):
            end = at + frame.size
            following = read_header(content[end : end + _HEADER_BYTES])
            if end == len(content) or (following is not None and following.form == frame.form):
                return at
        at = content.find(sync, at + 1)
    return None


def _tags_end(content: bytes | mmap.mmap) -> int:
    """The end of the ID3 tags with which a file begins."""
    at = 0
    while content[at : at + 3] == b"ID3" and len(size := content[at + 6 : at + 10]) == 4:
        at += 10 + (size[0] << 21 | size[1] << 14 | size[2] << 7 | size[3])
    return at


def _is_tag(between: bytes) -> bool:
    return between.startswith(_TAGS) or not any(between)


def _end_damage(end: bytes, read_header: Callable[[bytes], Frame | None]) -> str | None:
    if _is_tag(end):
        return None
    if len(end) < _HEADER_BYTES:
        return "its last frame is cut off"
    return f"{len(end)} bytes at its end are no whole frame"
