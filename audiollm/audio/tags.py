"""Tags of sound files and films, read in a process that a crash of the decoder may cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from audiollm.audio.decoders import DecodeRequest, open_av
from audiollm.audio.decoding_process import DecoderCrash, contained_results
from audiollm.audio.discovery import AudioError

_OF_THE_FILE = (
    "encoder", "major_brand", "minor_version", "compatible_brands", "handler_name", "vendor_id", "duration", "language",
)  # fmt: skip


@dataclass(frozen=True)
class SoundTags:
    """Text metadata of a sound file."""

    texts: dict[str, str]
    """By FFmpeg's names: title, artist, album, date, ...; of the file and of its sound."""
    non_text: tuple[str, ...]
    """Metadata that is not text: cover pictures, chapters."""


NO_TAGS = SoundTags({}, ())


def read_tags(path: Path) -> SoundTags:
    """The tags of a file.

    Raises:
        AudioError: it cannot be read as sound.
    """
    try:
        (tags,) = contained_results(
            f"{__name__}:tags_of", DecodeRequest(str(path), path, 0.0, None, None, False)
        )
    except DecoderCrash as crash:
        raise AudioError(crash.path, crash.reason) from None
    assert isinstance(tags, SoundTags)
    return tags


def tags_of(request: DecodeRequest) -> Iterator[SoundTags]:
    """Read the tags in this process."""
    with open_av(request.source, request.name) as (container, stream):
        tags = {**container.metadata, **stream.metadata}
        texts = {key.lower(): text for key, text in tags.items() if key.lower() not in _OF_THE_FILE and text}
        covers = [s for s in container.streams.video if s.disposition & s.disposition.attached_pic]
        chapters = container.chapters()
        non_text = (*(["the cover"] if covers else []), *([f"{len(chapters)} chapters"] if chapters else []))
        yield SoundTags(texts, non_text)
