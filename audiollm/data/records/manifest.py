"""A JSONL file of samples by number, with the files of sound and codes that they name: a `Source`.

A million samples open in a second, and each is read when it is asked for.

Shapes: N samples.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from audiollm.data.records.arrays import named_arrays
from audiollm.data.records.part_codes import at_addresses, load_encodings
from audiollm.data.records.sample import AudioPart, ContentPart, Sample, VideoPart, parse_sample
from audiollm.data.records.source import AudioClip, LoadedSample
from audiollm.data.records.storage import audio_address, parent, read_blocks, read_range
from audiollm.errors import BadSample, ConfigError

_NEWLINE = 10
_SHORT_BYTES = 64
"""A line shorter than this may be empty; no sample is as short."""


class Manifest:
    """The samples of a JSONL file, by number; empty lines are not counted.

    Args:
        url: a local path or any fsspec URL.

    Attributes:
        digest: of the whole content.

    Raises:
        ConfigError: it cannot be read at all.
    """

    def __init__(self, url: str | Path) -> None:
        self.url = str(url)
        try:
            self._ends_N, self._empty, self.digest = _scan(self.url)
        except OSError as error:
            reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
            raise ConfigError(reason, self.url, "give a .jsonl of samples") from error

    def __len__(self) -> int:
        return len(self._ends_N) - len(self._empty)

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`, parsed now.

        Raises:
            BadSample: the line holds no usable sample, or the file has changed.
            IndexError: there is none of this number.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"{self.url}: no sample {index} among {len(self)}")
        line = self._line(index)
        place = f"{self.url}:{line + 1}"
        start, end = (int(self._ends_N[line - 1]) if line else 0), int(self._ends_N[line])
        try:
            content = read_range(self.url, start, end - start)
        except OSError as error:
            raise BadSample(place, "", f"cannot be read ({error})", "unreadable file") from error
        if len(content) < end - start:
            raise BadSample(
                place, "", "the file has been cut short since it was opened", "truncated manifest"
            )
        return parse_sample(content.removeprefix(b"\xef\xbb\xbf") if line == 0 else content, place)

    def place(self, index: int) -> str:
        """The file and the line of sample `index`."""
        return f"{self.url}:{self._line(index) + 1}"

    def _line(self, index: int) -> int:
        """Counted from 0, with the empty ones: the first line with `index` others that are not empty before it."""
        # the j-th empty line e_j has e_j - j samples before it
        before = np.searchsorted(self._empty - np.arange(len(self._empty)), index, side="right")
        return index + int(before)


def _scan(url: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Scan for the end of each line (behind its newline), the numbers of empty lines, and a digest of the content."""
    digest = hashlib.sha256()
    ends: list[np.ndarray] = []
    empty: list[int] = []
    position, lines, last_end, tail = 0, 0, 0, b""
    for block in read_blocks(url):
        digest.update(block)
        ends_L = np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE) + (position + 1)
        sizes_L = np.diff(ends_L, prepend=last_end)
        buffer, buffer_start = tail + block, position - len(tail)
        for n in np.flatnonzero(sizes_L < _SHORT_BYTES):
            end = int(ends_L[n]) - buffer_start
            if not buffer[end - int(sizes_L[n]) : end].strip():
                empty.append(lines + int(n))
        ends.append(ends_L)
        position, lines, tail = position + len(block), lines + len(ends_L), buffer[-_SHORT_BYTES:]
        last_end = int(ends_L[-1]) if len(ends_L) else last_end
    if position > last_end:  # no newline behind the last one
        ends.append(np.array([position], np.int64))
        if position - last_end < _SHORT_BYTES and not tail[last_end - position :].strip():
            empty.append(lines)
    ends_N = np.concatenate([*ends, np.zeros(0, np.int64)])
    return ends_N, np.array(empty, np.int64), digest.hexdigest()


def read_samples(path: Path) -> tuple[list[Sample], list[BadSample]]:
    """All samples of a JSONL file in their order, and what its other lines are (a doubled id among them).

    The paths of their audio are those from here: a path is relative to the file's folder, and where there is no such
    file, to the working directory, as stages write them.

    Raises:
        ConfigError: the file cannot be read at all.
    """
    manifest = Manifest(path)
    samples: list[Sample] = []
    bad: list[BadSample] = []
    place_of_id: dict[str, str] = {}
    for index in range(len(manifest)):
        place = manifest.place(index)
        try:
            sample = manifest[index]
        except BadSample as error:
            bad.append(error.with_traceback(None))
            continue
        if sample.id in place_of_id:
            line = place_of_id[sample.id].rpartition(":")[2]
            reason = f"id {sample.id!r} was used on line {line}"
            bad.append(BadSample(place, sample.id, reason, "doubled id"))
            continue
        place_of_id[sample.id] = place
        samples.append(_with_addresses(sample, path.parent))
    return samples, bad


def _with_addresses(sample: Sample, folder: Path) -> Sample:
    def moved(content_part: ContentPart) -> ContentPart:
        if isinstance(content_part, VideoPart):
            return content_part.model_copy(update={"path": audio_address(str(folder), content_part.path)})
        return (
            at_addresses(content_part, str(folder)) if isinstance(content_part, AudioPart) else content_part
        )

    arrays = {name: audio_address(str(folder), file) for name, file in sample.arrays.items()}
    return sample.with_parts(moved).model_copy(update={"arrays": arrays})


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
