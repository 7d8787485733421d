"""Errors of the disk as plain sentences, whichever library met them: a disk is full in the middle of anything."""

from __future__ import annotations

import errno
import re

_BY_NUMBER = {
    errno.ENOSPC: ("the disk is full", "free some space; the same command goes on from here"),
    errno.EDQUOT: ("the disk quota is used up", "free some space; the same command goes on from here"),
    errno.EFBIG: (
        "a file reached the size limit of this shell or file system",
        "raise the limit (ulimit -f)",
    ),
    errno.EROFS: ("the disk is mounted read-only", "make it writable, or choose another folder"),
    errno.EIO: ("the disk failed (input/output error)", "check the disk, or choose another one"),
}
_OF_PLACES = {
    errno.EEXIST: ("a file is there, where a folder is needed", "name another folder"),
    errno.EISDIR: ("a folder is there, where a file is needed", "name another file"),
    errno.ENOTDIR: ("a file is on its way, where a folder is needed", "name another folder"),
    errno.EACCES: ("this user may not read or write it", "change its permissions, or name another place"),
}
"""Errors of a place. They are told where they end a command; where a command met one, went on, and failed of
something else, they are not."""
_BY_TEXT = {
    "no space left on device": errno.ENOSPC,
    "database or disk is full": errno.ENOSPC,
    "disk quota exceeded": errno.EDQUOT,
    "file too large": errno.EFBIG,
    "read-only file system": errno.EROFS,
    "disk i/o error": errno.EIO,
    "input/output error": errno.EIO,
}
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""Pattern of the system's error number in the exceptions of safetensors and tokenizers."""


def disk_error(error: BaseException, where: object = "") -> tuple[str, str] | None:
    """Describe a disk failure and its remedy; None where the error has another cause.

    Args:
        where: the file being written; used where the error names no file.
    """
    if isinstance(error, OSError) and error.errno in _OF_PLACES:
        message, remedy = _OF_PLACES[error.errno]
        return f"{error.filename or where}: {message}", remedy
    cause: BaseException | None = error
    while cause is not None:
        if (number := _find_error_number(cause)) is not None:
            message, remedy = _BY_NUMBER[number]
            place = getattr(cause, "filename", None) or where
            return (f"{place}: {message}" if place else message), remedy
        cause = cause.__cause__ or cause.__context__
    return None


def _find_error_number(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno in _BY_NUMBER:
        return error.errno
    text = str(error)
    if (match := _RUST_ERROR.search(text)) and int(match[1]) in _BY_NUMBER:
        return int(match[1])
    return next((number for phrase, number in _BY_TEXT.items() if phrase in text.lower()), None)
