"""Files that people bring: their kind is told by their content, and everything is checked before it enters a project.

Shapes: N samples, C channels.
"""

from __future__ import annotations

import itertools
import shutil
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from audiollm.audio import AudioError, AudioInfo, probe
from audiollm.audio.decoding import DecodeRequest, decoded_blocks
from audiollm.audio.discovery import is_audio_header, is_plain, read_header
from audiollm.audio.files import sound_writer
from audiollm.video.decoders import VideoError, VideoInfo
from audiollm.video.frames import pictures_end_s, probe_video
from pipelines.studio.limits import MB, StudioLimits, StudioRefusal, told_length

_INTEGERS = {
    "PCM_S8": "PCM_16",
    "PCM_U8": "PCM_U8",
    "PCM_16": "PCM_16",
    "PCM_24": "PCM_24",
    "PCM_32": "PCM_32",
}
"""Integer sample formats, and the one of a WAV file that holds them exactly."""
WAV_SUBTYPES = frozenset({*_INTEGERS.values(), "FLOAT"})
"""Sample formats of versions."""
_LOSSLESS = ("WAV", "WAVEX", "RF64", "FLAC", "AIFF", "W64", "CAF")
"""Containers of libsndfile that hold samples as they were recorded."""
_TEXT = frozenset(b"\t\n\r") | frozenset(range(0x20, 0x7F))
_ROOM_EVERY = 64_000_000
"""Bytes after which the room on the disk is looked at again while a sound is written."""
_EBML = b"\x1a\x45\xdf\xa3"
_MP4_ATOMS = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
_ENDINGS = {"mp4": ".mp4", "ebml": ".mkv", "avi": ".avi", "sound": ".sound"}
_NAME_CHARACTERS = 80
_DAMAGED = (
    "it is damaged or incomplete. Copy or export it anew, or repair it with another program "
    "(ffmpeg -i IN -c copy OUT.mp4)."
)
WHAT_CAN_BE_OPENED = "open a recording (WAV, FLAC, MP3, OGG, M4A, …) or a video (MP4, MOV, MKV, WebM, AVI)"


@dataclass(frozen=True)
class SourceFacts:
    """An opened file."""

    duration_s: float
    has_sound: bool
    has_pictures: bool
    width: int = 0
    height: int = 0
    frame_rate: float = 0.0
    sample_rate: int = 0
    channels: int = 0
    pictures_s: float = 0.0
    """Seconds after which no picture is shown any more."""
    sound: AudioInfo | None = None
    """What the header says of the sound; None: there is none."""


def shown_name(name: str) -> str:
    """A file's name as it is shown: printable, without folders, never empty. No file on the disk is called so."""
    text = unicodedata.normalize("NFC", name.replace("\\", "/").rsplit("/", 1)[-1])
    printable = "".join(
        letter for letter in text if letter.isprintable() and unicodedata.category(letter)[0] != "C"
    )
    return " ".join(printable.split())[:_NAME_CHARACTERS] or "untitled"


def source_ending(path: Path) -> str:
    """The ending that a file is stored under, by its first bytes.

    Playlists and scripts, with which FFmpeg would open other files, are none of the known kinds.

    Raises:
        StudioRefusal: it is neither a recording nor a video.
    """
    header = read_header(path)
    # a manifest of streams may begin with <!--free-->: no atom is larger than its file
    is_text = _TEXT.issuperset(header[:4]) and int.from_bytes(header[:4], "big") > path.stat().st_size
    if header[4:8] in _MP4_ATOMS and not is_text:
        return _ENDINGS["mp4"]
    if header.startswith(_EBML):
        return _ENDINGS["ebml"]
    if header[:4] == b"RIFF" and header[8:12] == b"AVI ":
        return _ENDINGS["avi"]
    if is_audio_header(header):
        return _ENDINGS["sound"]
    if not header:
        raise StudioRefusal(f"The file is empty: {WHAT_CAN_BE_OPENED}.", 415)
    raise StudioRefusal(f"The file is neither a recording nor a video: {WHAT_CAN_BE_OPENED}.", 415)


def check_source(path: Path, limits: StudioLimits) -> SourceFacts:
    """Read what a file says of itself, before anything is decoded.

    Raises:
        StudioRefusal: it cannot be used.
    """
    pictures = None if path.suffix == _ENDINGS["sound"] else _pictures(path)
    try:
        info = probe(path)
    except AudioError:
        if pictures is None:
            raise StudioRefusal(f"The file cannot be read: {_DAMAGED}", 415) from None
        info = None
    if pictures is not None:
        _check_pictures(pictures, limits)
    seconds = [value for value in (pictures and pictures.duration_s, info and info.duration_s) if value]
    duration_s = max(seconds, default=0.0)
    if duration_s > limits.duration_s:
        raise StudioRefusal(
            f"The file lasts {told_length(duration_s)}; the limit is {told_length(limits.duration_s)}: cut the part "
            "that you need out of it.",
            413,
        )
    if info is not None:
        check_sound(info.sample_rate, info.num_channels, limits)
    if pictures is not None and not duration_s:
        raise StudioRefusal(
            "The video does not tell its length: copy it into an .mp4 (ffmpeg -i IN -c copy OUT.mp4)."
        )
    has_pictures = pictures is not None
    return SourceFacts(
        duration_s,
        info is not None,
        has_pictures,
        pictures.width if pictures else 0,
        pictures.height if pictures else 0,
        (pictures.frame_rate or 0.0) if pictures else 0.0,
        info.sample_rate if info else 0,
        info.num_channels if info else 0,
        _pictures_end(path, duration_s) if has_pictures else 0.0,
        info,
    )


def check_sound(sample_rate: int, channels: int, limits: StudioLimits) -> None:
    """Refuse a form of sound that makes a small file large in memory, or that nothing can play.

    Raises:
        StudioRefusal: too many channels, or an odd sample rate.
    """
    if channels > limits.channels:
        raise StudioRefusal(
            f"The sound has {channels} channels, and {limits.channels} are the most: mix it down to stereo."
        )
    low, high = limits.sample_rates
    if not low <= sample_rate <= high:
        raise StudioRefusal(
            f"The sound has a sample rate of {sample_rate} Hz: convert it to 48000 Hz "
            "(ffmpeg -i IN -ar 48000 OUT.wav).",
            415,
        )


def write_sound(source: Path, target: Path, limits: StudioLimits) -> float:
    """Write the sound of a file as WAV, block by block, with the same sample values where they are not lossy.

    Returns:
        Its seconds.

    Raises:
        StudioRefusal: it cannot be decoded, or is longer than its header said and than is allowed.
    """
    try:
        if is_plain(str(source)):  # other formats may crash their decoder, which then is not in this process
            return _copy_lossless(source, target, limits)
    except (soundfile.LibsndfileError, OSError):
        pass  # the decoders below can read it, or say what is wrong
    try:
        return _decode(source, target, limits)
    except AudioError:
        raise StudioRefusal(f"The sound cannot be read: {_DAMAGED}", 415) from None


def check_room(folder: Path, num_bytes: float, limits: StudioLimits) -> None:
    """Refuse what would fill the disk.

    Raises:
        StudioRefusal: less than the spare room would be left.
    """
    free = shutil.disk_usage(folder).free
    if free - num_bytes < limits.spare_mb * MB:
        raise StudioRefusal(
            f"The disk has {free / MB:.0f} MB left, and {num_bytes / MB:.0f} are needed: delete projects or make room.",
            507,
        )


# Private


def _pictures(path: Path) -> VideoInfo | None:
    """
    Raises:
        StudioRefusal: there are pictures that cannot be decoded.
    """
    try:
        return probe_video(path)
    except VideoError as error:
        if "has no pictures" in error.reason:
            return None
        raise StudioRefusal(f"The video cannot be read: {_DAMAGED}", 415) from None


def _pictures_end(path: Path, duration_s: float) -> float:
    """The end of the pictures; that of the file where they are damaged before it."""
    try:
        return max(0.0, min(pictures_end_s(path), duration_s))
    except VideoError:
        return duration_s


def _check_pictures(pictures: VideoInfo, limits: StudioLimits) -> None:
    if pictures.width * pictures.height > limits.picture_pixels:
        raise StudioRefusal(
            f"The pictures are {pictures.width} x {pictures.height}, which is too large: scale the video down "
            "(ffmpeg -i IN -vf scale=1920:-2 OUT.mp4).",
            413,
        )


def _copy_lossless(source: Path, target: Path, limits: StudioLimits) -> float:
    info = soundfile.info(source)
    if info.subtype not in _INTEGERS and info.subtype not in ("FLOAT", "DOUBLE"):
        raise OSError("not plain samples")
    subtype = _INTEGERS.get(info.subtype, "FLOAT")
    return _write_blocks(
        target, info.samplerate, info.channels, subtype, _dtyped(source, info.subtype in _INTEGERS), limits
    )


def _dtyped(source: Path, is_integer: bool) -> Any:
    with soundfile.SoundFile(source) as file:
        while len(block_NC := file.read(1 << 18, dtype="int32" if is_integer else "float64", always_2d=True)):
            yield block_NC if is_integer else _require_finite_block(block_NC)


def _require_finite_block(block_NC: Any) -> Any:
    """
    Raises:
        StudioRefusal: NaN or infinite samples.
    """
    if not np.isfinite(block_NC).all():
        raise StudioRefusal("The sound holds NaN or infinite samples: write the file anew from its origin.")
    return block_NC


def _decode(source: Path, target: Path, limits: StudioLimits) -> float:
    info = probe(source)
    is_lossless = info.format in _LOSSLESS
    subtype = _INTEGERS.get(info.codec, "FLOAT") if is_lossless else "FLOAT"
    if subtype == "PCM_32":  # decoders give 32-bit floating-point numbers, which hold 24 bits
        subtype = "FLOAT"
    blocks = decoded_blocks(DecodeRequest(str(source), source.name, 0.0, None, None, False))
    first = next(blocks, None)
    if first is None:
        raise StudioRefusal("The sound holds no samples.", 415)
    samples_CN, rate = first

    def all_blocks() -> Any:
        for block_CN, block_rate in itertools.chain([first], blocks):
            if block_rate != rate or block_CN.shape[0] != samples_CN.shape[0]:
                raise StudioRefusal(
                    "The sound changes its rate or channels on the way: convert it to WAV.", 415
                )
            block_NC = block_CN.T.numpy()
            if subtype != "FLOAT":
                yield np.round(block_NC.astype(np.float64) * 2**31).astype(np.int32)
            elif is_lossless:
                yield _require_finite_block(block_NC)
            else:
                yield np.nan_to_num(block_NC, posinf=1, neginf=-1)  # peaks of an MP3 may be above 1

    return _write_blocks(target, rate, samples_CN.shape[0], subtype, all_blocks(), limits)


def _write_blocks(
    target: Path, rate: int, channels: int, subtype: str, blocks: Any, limits: StudioLimits
) -> float:
    """
    Raises:
        StudioRefusal: more samples than are allowed, or than the disk has room for: a file whose header lies.
    """
    count, room_at = 0, 0
    try:
        # a WAV holds 4 GB; RF64 is written as WAV where it is shorter
        with sound_writer(target, rate, channels, subtype, "WAV") as file:
            for block_NC in blocks:
                count += len(block_NC)
                if count > (limits.duration_s + 1) * rate or count * channels * 4 > 4_000_000_000:
                    raise StudioRefusal(
                        f"The sound is longer than {told_length(limits.duration_s)} or 4 GB: cut the part that you "
                        "need out of it.",
                        413,
                    )
                if count * channels * 4 >= room_at:
                    check_room(target.parent, 0, limits)
                    room_at = count * channels * 4 + _ROOM_EVERY
                file.write(block_NC)
        if not count:
            raise StudioRefusal("The sound holds no samples.", 415)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return count / rate
