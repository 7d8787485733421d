"""The length of a FLAC by its last frame, whose number tells it whatever the header says. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

_STREAMINFO_END = 42
_TAIL_BYTES = 1 << 17
"""Bytes at the end in which the last frame begins: a frame of 4096 samples in 8 channels of 24 bits takes 98 kB."""
_BLOCK_SIZES = {
    1: 192,
    **{code: 576 << (code - 2) for code in range(2, 6)},
    **{code: 1 << code for code in range(8, 16)},
}
_RATES = {4: 8000, 5: 16_000, 6: 22_050, 7: 24_000, 8: 32_000, 9: 44_100, 10: 48_000, 11: 96_000, 1: 88_200,
          2: 176_400, 3: 192_000}  # fmt: skip


class FlacLength(NamedTuple):
    """Samples per channel: as the header tells, and as the frames go."""

    header: int
    frames: int
    sample_rate: int


def flac_length(source: str | bytes) -> FlacLength | None:
    """The length of a FLAC; None: it is none, its header tells no length, or no frame is at its end.

    Args:
        source: the path of a file, or its content.
    """
    if isinstance(source, bytes):
        head, tail = source[:_STREAMINFO_END], source[-_TAIL_BYTES:]
    else:
        with open(source, "rb") as file:
            head = file.read(_STREAMINFO_END)
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            tail = file.read()
    if head[:4] != b"fLaC" or len(head) < _STREAMINFO_END or head[4] & 127:
        return None
    facts = int.from_bytes(head[18:26], "big")
    total, rate = facts & (1 << 36) - 1, facts >> 44
    if not total:
        return None
    max_block = int.from_bytes(head[10:12], "big")
    at = len(tail)
    while (at := tail.rfind(b"\xff", 0, at)) >= 0:
        end = _frame_end(tail[at : at + 16], max_block, rate)
        if end is not None:
            return FlacLength(total, end, rate)
    return None


def _frame_end(header: bytes, max_block: int, rate: int) -> int | None:
    """The number of the sample behind a frame; None: the bytes are no header of one."""
    if len(header) < 16 or header[1] & 0xFE != 0xF8 or header[3] & 1:
        return None
    block_code, rate_code = header[2] >> 4, header[2] & 15
    ones = f"{header[4]:08b}".index("0") if header[4] != 0xFF else 8
    if block_code == 0 or rate_code == 15 or ones in (1, 8) or _RATES.get(rate_code, rate) != rate:
        return None
    at = 4 + max(1, ones)
    number = header[4] & (0x7F >> ones)
    for byte in header[5:at]:
        number = number << 6 | byte & 63
    extra = {6: 1, 7: 2}.get(block_code, 0)
    block = _BLOCK_SIZES.get(block_code) or int.from_bytes(header[at : at + extra], "big") + 1
    at += extra + {12: 1, 13: 2, 14: 2}.get(rate_code, 0)
    if block > max_block or _crc8(header[:at]) != header[at]:
        return None
    return number + block if header[1] & 1 else number * max_block + block


def _crc8(content: bytes) -> int:
    value = 0
    for byte in content:
        value ^= byte
        for _ in range(8):
            value = (value << 1 ^ 0x07) & 0xFF if value & 0x80 else value << 1
    return value
