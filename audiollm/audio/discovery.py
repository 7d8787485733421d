"""Recognition of audio files by name and first bytes, and the error for other files. Imports no torch."""

from __future__ import annotations

import numbers
import os
from pathlib import Path

HEADERLESS_EXTENSIONS = frozenset({".raw", ".pcm"})
# fmt: off
AUDIO_EXTENSIONS = HEADERLESS_EXTENSIONS | {
    ".wav", ".wave", ".rf64", ".w64", ".flac", ".ogg", ".oga", ".opus", ".mp2", ".mp3", ".m4a", ".m4b",
    ".aac", ".mp4", ".sph", ".aif", ".aiff", ".aifc", ".au", ".snd", ".caf", ".wma", ".webm", ".mka", ".amr",
    ".ac3", ".wv",
}
# fmt: on
_MAGIC_BYTES = tuple(b"fLaC OggS ID3 NIST_1A .snd caff #!AMR wvpk riff\x2e\x91\xcf\x11".split())

_PLAIN_ENCODINGS = (0x0001, 0x0003, 0x0006, 0x0007, 0xFFFE)
"""WAV format codes of plain samples: integers, floats, A-law, mu-law, and "extensible" (one of these, or ADPCM)."""


class AudioError(Exception):
    """A file (or the bytes of one) that cannot be read or written: `path`, and in `reason` what to do."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(path, reason)  # both in args, so that the error survives pickling between processes
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def is_rate(sample_rate: object) -> bool:
    """Return whether `rate` is a sample rate: a positive integer."""
    return isinstance(sample_rate, numbers.Integral) and int(sample_rate) > 0


def looks_like_audio(path: str | Path) -> bool:
    """Return whether a file is audio by its extension or its first bytes. Reads at most 64 bytes, never raises.

    `.raw` and `.pcm` count: they hold audio that `load` refuses with a reason.
    """
    path = Path(path)
    try:
        if path.suffix.lower() in AUDIO_EXTENSIONS:
            return not path.is_dir()
        return path.is_file() and is_audio_header(read_header(path))
    except (OSError, ValueError):  # unreadable, or a name the system refuses
        return False


def find_audio(folder: str | Path) -> tuple[list[Path], list[Path]]:
    """All files below a folder: (those that look like audio, the others), each sorted by path.

    Hidden files and folders are skipped. Links to folders are not followed; a link that leads out of the
    folder, or nowhere, is listed among the others, so that nothing is dropped unseen.

    Raises:
        AudioError: the folder, or one below it, is missing or cannot be read.
    """
    root = Path(folder)
    resolved_root = root.resolve()
    audio: list[Path] = []
    other_files: list[Path] = []
    errors: list[OSError] = []
    for parent, folders, files in os.walk(root, onerror=errors.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        linked_folders = [name for name in folders if Path(parent, name).is_symlink()]
        for path in (Path(parent, name) for name in files + linked_folders if not name.startswith(".")):
            inside = not path.is_symlink() or path.resolve().is_relative_to(resolved_root)
            (audio if inside and path.is_file() and looks_like_audio(path) else other_files).append(path)
    if errors:
        raise AudioError(errors[0].filename or root, f"cannot be listed ({errors[0].strerror})")
    return sorted(audio), sorted(other_files)


def links_note(*places: str | Path) -> str:
    """What to add to an error where no sound was found: links in folders that lead out of them; empty without any."""
    folders = [Path(place) for place in places if Path(place).is_dir()]
    count = sum(path.is_symlink() for folder in folders for path in find_audio(folder)[1])
    return (
        f" (links that lead out of it: {count}, not followed; give the folder they lead to)" if count else ""
    )


def check_readable(path: Path) -> None:
    """Raise `AudioError` for what is no file, cannot be opened, is empty, or is raw samples without a header."""
    try:
        if not path.is_file():
            raise AudioError(path, "is not a file: check the path" if path.exists() else "does not exist")
        header = read_header(path)
    except OSError as error:
        raise AudioError(path, f"cannot be opened ({error.strerror}): check its permissions") from error
    if not header:
        raise AudioError(path, "is empty (0 bytes): get it anew")
    if path.suffix.lower() in HEADERLESS_EXTENSIONS and not is_audio_header(header):
        convert = "convert it first, like: ffmpeg -f s16le -ar RATE -ac CHANNELS -i IN.raw OUT.wav"
        raise AudioError(
            path, f"is raw samples without a header, so rate and encoding are unknown: {convert}"
        )


def read_header(path: Path) -> bytes:
    """The first bytes of a file, 64 at most."""
    with open(path, "rb", buffering=0) as file:
        return file.read(64)


def is_audio_header(header: bytes) -> bool:
    """Return whether a file that begins with these bytes is audio."""
    if header.startswith(_MAGIC_BYTES):
        return True
    if header[:4] in (b"RIFF", b"RIFX", b"RF64", b"BW64"):
        return header[8:12] == b"WAVE"
    if header[:4] == b"FORM":
        return header[8:12] in (b"AIFF", b"AIFC")
    if header[4:8] == b"ftyp":
        return header[8:12] in (b"M4A ", b"M4B ")
    return _is_mpeg_frame(header)


def _is_mpeg_frame(header: bytes) -> bool:
    """A frame header of MPEG audio layer II or III (ISO/IEC 11172-3) or of ADTS AAC (ISO/IEC 13818-7)."""
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE0 != 0xE0:
        return False
    version, layer = header[1] >> 3 & 3, header[1] >> 1 & 3
    if layer == 0:
        return version >= 2 and header[1] & 0xF0 == 0xF0 and header[2] >> 2 & 15 < 13
    return layer in (1, 2) and version != 1 and header[2] >> 4 not in (0, 15) and header[2] >> 2 & 3 != 3


def is_plain(source: str | bytes) -> bool:
    """Return whether a file, or its content, begins like a WAV of plain samples or like a FLAC.

    Most corpora consist of these formats, and libsndfile reads them with its simplest and best tested code.

    Raises:
        OSError: the file cannot be opened.
    """
    header = source[:64] if isinstance(source, bytes) else read_header(Path(source))
    if header.startswith(b"fLaC"):
        return True
    if header[:4] not in (b"RIFF", b"RF64") or header[8:12] != b"WAVE":
        return False
    chunk = 12
    if header[12:16] in (b"ds64", b"JUNK"):  # room for 64-bit sizes, which some programs always leave
        chunk += 8 + int.from_bytes(header[16:20], "little")
    encoding = int.from_bytes(header[chunk + 8 : chunk + 10], "little")
    return header[chunk : chunk + 4] == b"fmt " and encoding in _PLAIN_ENCODINGS
