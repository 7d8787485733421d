"""The pages of an Ogg file (RFC 3533): the streams that follow each other in it, and whether the last one is whole.

Radio recorders and `cat` put one Ogg stream behind another. libsndfile reads the first of such a chain, and FFmpeg
tells the length of the last. Imports no torch.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

_CAPTURE = b"OggS"
_HEADER_BYTES = 27
_BEGINS, _ENDS = 0x02, 0x04  # flags of a page

Content: TypeAlias = "bytes | mmap.mmap"


class OggLink(NamedTuple):
    """Streams of one beginning, such as a recording, or sound beside pictures: bytes `start` to `stop` of a file.

    `is_whole` says whether its last page is there, and marked as the last.
    """

    start: int
    stop: int
    is_whole: bool


def ogg_links(source: str | bytes) -> Sequence[OggLink]:
    """The streams that follow each other in a file, or in the content of one; none where it is no Ogg file.

    All page headers are read, not the pages' content: a file of an hour has some 4,000.

    Raises:
        OSError: the file cannot be read.
    """
    with _open_content(source) as content:
        return list(_links(content))


def link_content(source: str | bytes, link: OggLink) -> bytes:
    """The bytes of a link: an Ogg file of its own.

    Raises:
        OSError: the file cannot be read.
    """
    if isinstance(source, bytes):
        return source[link.start : link.stop]
    with open(source, "rb") as file:
        file.seek(link.start)
        return file.read(link.stop - link.start)


# Private


@contextmanager
def _open_content(source: str | bytes) -> Iterator[Content]:
    if isinstance(source, bytes):
        yield source
        return
    with open(source, "rb") as file:
        if file.read(4) != _CAPTURE or Path(source).stat().st_size < _HEADER_BYTES:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content


def _links(content: Content) -> Iterator[OggLink]:
    if content[:4] != _CAPTURE:
        return
    start = position = 0
    flags, is_beginning = _BEGINS, True
    while 0 <= position <= len(content) - _HEADER_BYTES:
        if content[position : position + 4] != _CAPTURE:  # junk between pages, or behind the last one
            position = content.find(_CAPTURE, position)
            continue
        num_segments = content[position + 26]
        table = content[position + _HEADER_BYTES : position + _HEADER_BYTES + num_segments]
        end = position + _HEADER_BYTES + num_segments + sum(table)
        behind = content[end : end + len(_CAPTURE)]
        if behind and behind != _CAPTURE and content.find(_CAPTURE, position + 1, end) > 0:
            flags, position = (
                0,
                content.find(_CAPTURE, position + 1),
            )  # a page that was cut off, and the next stream
            continue
        page_flags = content[position + 5]
        if page_flags & _BEGINS and not is_beginning:
            yield OggLink(start, position, bool(flags & _ENDS))
            start = position
        is_beginning = bool(page_flags & _BEGINS)
        if end > len(content):
            yield OggLink(start, len(content), is_whole=False)
            return
        flags, position = page_flags, end
    yield OggLink(start, len(content), bool(flags & _ENDS))
