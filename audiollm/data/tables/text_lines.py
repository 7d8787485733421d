"""The lines of a text file of any encoding that exports of tables have.

Encodings are UTF-8, with a BOM or without, UTF-16 and UTF-32, and Windows-1252 where a file is none of these (with a
note). Lines end with LF, CRLF or CR.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from pathlib import Path

from audiollm.errors import ConfigError

NOT_UTF8 = "is not UTF-8: convert the file"
_MAX_WIDE_SHARE = 0.2
"""Share of bytes above 127 beyond which a text is no Western one: French has 0.04, Russian in one byte each 0.8."""
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Byte order marks; those of UTF-32 begin with those of UTF-16."""


@dataclass
class TextLines:
    """The decoded lines of a file."""

    lines: list[str]
    """Without line ends. Bytes that are not UTF-8 are lone surrogates in them."""
    notes: list[str] = field(default_factory=list)
    """Says where the encoding was guessed."""


def read_lines(path: Path) -> TextLines:
    """Read the lines of a text file of any of the encodings.

    Raises:
        ConfigError: the file cannot be read, or its encoding is not known.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot be read ({error.strerror})", str(path), "give a table: CSV, TSV or JSON lines"
        ) from error
    decoded, note = decode_text(content, path)
    end = "\n" if "\n" in decoded else "\r"
    lines = [line.removesuffix("\r") for line in decoded.split(end)]
    while lines and not lines[-1].strip("\x00\x1a"):  # the end of the last line, and DOS's mark of the end
        lines.pop()
    return TextLines(lines, [note] if note else [])


def decode_text(content: bytes, path: Path) -> tuple[str, str]:
    """Decode a file's bytes; bytes that are not UTF-8 among others that are become lone surrogates.

    Returns:
        The text, and a note where the encoding was guessed.

    Raises:
        ConfigError: the encoding is not known.
    """
    remedy = "convert it to UTF-8: iconv -f ENCODING -t UTF-8"
    encoding = next((name for mark, name in _BOMS if content.startswith(mark)), None) or _wide(content)
    if encoding not in (None, "utf-8"):
        try:
            return content.decode(str(encoding)), ""
        except UnicodeDecodeError as error:
            raise ConfigError(f"is broken {encoding}: {error}", str(path), remedy) from None
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode("utf-8"), ""
    except UnicodeDecodeError:
        pass
    lossy = content.decode("utf-8", errors="surrogateescape")
    wide = sum(byte > 127 for byte in content)
    if encoding == "utf-8" or any(_is_wide_utf8(line) for line in lossy.split("\n")):
        return lossy, ""  # UTF-8 with some broken lines, which are set aside one by one
    try:
        if wide > _MAX_WIDE_SHARE * len(content):
            raise ValueError
        return content.decode("cp1252"), f"{path} is not UTF-8 and is read as Windows-1252 (Latin-1)"
    except ValueError:
        problem = "is neither UTF-8, UTF-16 nor Windows-1252"
        raise ConfigError(problem, str(path), remedy) from None


# Private


def _is_wide_utf8(line: str) -> bool:
    """Return whether a line has letters beyond ASCII in UTF-8, and none that are not."""
    return not line.isascii() and not any("\udc80" <= letter <= "\udcff" for letter in line)


def _wide(content: bytes) -> str | None:
    """UTF-16 without a byte order mark, by the zeros in place of every other byte."""
    head = content[:2000]
    if len(head) < 4 or b"\x00" not in head:
        return None
    low, high = head[1::2].count(0), head[0::2].count(0)
    if max(low, high) < 0.4 * len(head) / 2:
        return None
    return "utf-16-le" if low > high else "utf-16-be"
