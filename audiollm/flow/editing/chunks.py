"""What a sound file holds beside its samples: chunks of WAV, RF64 and AIFF, blocks of FLAC, carried over to an edit.

A time reference, cue points, a title and a cover stand in chunks of their own. They are copied as they are, and so is
the WAV format with its mask of channels; what describes the samples is that of the new ones.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

_CHUNKED = {b"RIFF": "<", b"RF64": "<", b"FORM": ">"}
"""First bytes of files of chunks, and the order of bytes in their lengths."""
_WAV = ("WAV", "WAVEX", "RF64")
_FORMATS = {b"RIFF": _WAV, b"RF64": _WAV, b"FORM": ("AIFF",), b"fLaC": ("FLAC",)}
_SAMPLES = (b"data", b"SSND")
_OF_SAMPLES = (
    *_SAMPLES,
    b"fmt ",
    b"fact",
    b"PEAK",
    b"COMM",
    b"FVER",
    b"ds64",
    b"levl",
    b"JUNK",
    b"FLLR",
    b"PAD ",
)
"""Chunks that hold or describe the samples, or pad the file."""
_UNKNOWN = 0xFFFFFFFF
_STREAMINFO, _FLAC_PADDING, _SEEKTABLE = 0, 1, 3


class FileChunk(NamedTuple):
    """A chunk of a file: its name, and where its content begins and how many bytes it has."""

    name: bytes
    start: int
    size: int


def can_copy(source: Path, format: str) -> bool:
    """Whether what a file holds beside its samples can be copied into a file of a format, by soundfile's name."""
    try:
        with open(source, "rb") as file:
            first = file.read(4)
    except OSError:
        return False
    return format in _FORMATS.get(first, ())


def copy_descriptions(source: Path, samples: Path, out: Path) -> None:
    """Write `out`: the samples of one file with everything that another one holds beside them (`can_copy`)."""
    with open(source, "rb") as old, open(samples, "rb") as new, open(out, "wb") as target:
        if old.read(4) == b"fLaC":
            _write_flac(old, new, target)
        else:
            _write_chunks(old, new, target)


def chunks(file: BinaryIO) -> Iterator[FileChunk]:
    """The chunks of a WAV, RF64 or AIFF file, up to the first that its end cuts off."""
    file.seek(0)
    order = _CHUNKED[file.read(4)]
    length, place, long = file.seek(0, 2), 12, 0
    while place + 8 <= length:
        file.seek(place)
        name, size = struct.unpack(f"{order}4sI", file.read(8))
        if name == b"ds64":
            long = struct.unpack("<Q", file.read(16)[8:])[0]
        if name in _SAMPLES and (size == _UNKNOWN or place + 8 + size > length):
            size = min(long or length, length - place - 8)
        if place + 8 + size > length:
            return
        yield FileChunk(name, place + 8, size)
        place += 8 + size + size % 2


# Private


def _write_chunks(old: BinaryIO, new: BinaryIO, target: BinaryIO) -> None:
    """The new file's chunks of samples, and around its samples the old file's other chunks in their order."""
    new.seek(0)
    head = new.read(12)
    order, is_long = _CHUNKED[head[:4]], head[:4] == b"RF64"
    target.write(head)
    described, fresh = list(chunks(old)), list(chunks(new))
    is_same_format = _format(old, described) == _format(new, fresh)
    place = next((n for n, chunk in enumerate(described) if chunk.name in _SAMPLES), len(described))
    before, behind = (
        [(old, chunk) for chunk in group if chunk.name not in _OF_SAMPLES]
        for group in (described[:place], described[place:])
    )
    for chunk in fresh:
        if chunk.name in _SAMPLES:
            pieces = [*before, (new, chunk), *behind]
        elif chunk.name == b"fmt " and is_same_format:
            pieces = [(old, next(old_chunk for old_chunk in described if old_chunk.name == b"fmt "))]
        else:
            pieces = [(new, chunk)] if chunk.name in _OF_SAMPLES else []
        for file, piece in pieces:
            size = _UNKNOWN if is_long and piece.name == b"data" else piece.size
            target.write(struct.pack(f"{order}4sI", piece.name, size))
            _copy(file, target, piece)
            target.write(bytes(piece.size % 2))
    length = target.tell() - 8
    if is_long:
        target.seek(20)  # the content of ds64, which is the first chunk
        target.write(struct.pack("<Q", length))
    else:
        target.seek(4)
        target.write(struct.pack(f"{order}I", length))


def _format(file: BinaryIO, parts: list[FileChunk]) -> bytes | None:
    """What a WAV's format says of its samples: codec, channels, rate, bytes; without the mask of channels."""
    for chunk in parts:
        if chunk.name == b"fmt ":
            file.seek(chunk.start)
            return file.read(16)
    return None


def _copy(file: BinaryIO, target: BinaryIO, chunk: FileChunk) -> None:
    file.seek(chunk.start)
    remaining = chunk.size
    while block := file.read(min(remaining, 1 << 20)):
        target.write(block)
        remaining -= len(block)


def _write_flac(old: BinaryIO, new: BinaryIO, target: BinaryIO) -> None:
    """The new file's facts of its stream and its frames, with the old file's other blocks between them."""
    blocks = [
        block for block in _flac_blocks(old) if block[0] not in (_STREAMINFO, _FLAC_PADDING, _SEEKTABLE)
    ]
    facts = [block for block in _flac_blocks(new) if block[0] == _STREAMINFO]
    target.write(b"fLaC")
    pieces = [*facts, *blocks]
    for number, (kind, content) in enumerate(pieces):
        is_last = number == len(pieces) - 1
        target.write(bytes([kind | (0x80 if is_last else 0)]) + len(content).to_bytes(3, "big") + content)
    shutil.copyfileobj(new, target)


def _flac_blocks(file: BinaryIO) -> list[tuple[int, bytes]]:
    """Kind and content of a FLAC file's blocks; the file then stands at its first frame."""
    file.seek(4)
    blocks: list[tuple[int, bytes]] = []
    is_last = False
    while not is_last and len(head := file.read(4)) == 4:
        is_last = bool(head[0] & 0x80)
        blocks.append((head[0] & 0x7F, file.read(int.from_bytes(head[1:], "big"))))
    return blocks
