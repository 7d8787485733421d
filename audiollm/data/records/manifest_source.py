"""Samples of a JSONL file with the files of sound and codes that they name: a `Source`."""

from __future__ import annotations

from pathlib import Path

from audiollm.data.records.arrays import named_arrays
from audiollm.data.records.manifest import Manifest
from audiollm.data.records.part_codes import at_addresses, load_encodings
from audiollm.data.records.sample import VideoPart
from audiollm.data.records.source import AudioClip, LoadedSample
from audiollm.data.records.storage import audio_address, parent
from audiollm.errors import BadSample


class ManifestSource:
    """A manifest as a `Source`.

    The path of an audio part, and of its codes, is relative to the manifest's folder; where there is no such file, to
    the working directory, as stages write them.
    """

    bad: tuple[BadSample, ...] = ()

    def __init__(self, url: str | Path) -> None:
        self._manifest = Manifest(url)
        self._folder = parent(self._manifest.url)

    @property
    def name(self) -> str:
        return self._manifest.url

    @property
    def digest(self) -> str:
        return self._manifest.digest

    def __len__(self) -> int:
        return len(self._manifest)

    def __getitem__(self, index: int) -> LoadedSample:
        sample = self._manifest[index]
        place = self._manifest.place(index)
        parts = [at_addresses(audio_part, self._folder) for audio_part in sample.audio_parts()]
        clips = tuple(
            AudioClip(
                f"{place} {named.path}", sample.id, audio_part.path, audio_part.start_s, audio_part.end_s
            )
            for named, audio_part in zip(sample.audio_parts(), parts, strict=True)
        )
        arrays = named_arrays(sample, place, self._folder)
        encodings = load_encodings(parts, sample.id, place)
        videos = tuple(
            video_part.model_copy(update={"path": audio_address(self._folder, video_part.path)})
            for message in sample.messages
            for video_part in message.content
            if isinstance(video_part, VideoPart)
        )
        return LoadedSample(sample, encodings, clips, arrays, videos)
