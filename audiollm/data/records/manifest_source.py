"""Samples of a JSONL file with the sound files that they name: a `Source`."""

from __future__ import annotations

from pathlib import Path

from audiollm.data.records.manifest import Manifest
from audiollm.data.records.source import AudioClip, LoadedSample
from audiollm.data.records.storage import audio_address, parent
from audiollm.errors import BadSample


class ManifestSource:
    """A manifest as a `Source`.

    The path of an audio part is relative to the manifest's folder; where there is no such file, to the working
    directory, as stages write them.
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
        clips = tuple(
            AudioClip(
                f"{place} {part.path}",
                sample.id,
                audio_address(self._folder, part.path),
                part.start_s,
                part.end_s,
            )
            for part in sample.audio_parts()
        )
        return LoadedSample(sample, [], clips)
