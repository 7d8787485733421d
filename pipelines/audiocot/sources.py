"""Files of a run: videos, recordings, and lists that tell their texts or the truth of composed scenes."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audiollm.audio.discovery import looks_like_audio
from audiollm.data.records.sample import AudioPart, Sample, VideoPart
from audiollm.files.set_aside import Row
from pipelines.audiocot.clip import Told
from pipelines.steps.inputs import Found, InputForm, Inputs, absolute

VIDEO_EXTENSIONS = frozenset({".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts"})
STAGE_NAME = "audiocot"
_TEXT_COLUMNS = ("caption", "text", "title")


class ListError(ValueError):
    """A list of inputs that is malformed; the message names the line."""


@dataclass(frozen=True)
class FileSource:
    """A file of the input: `path` is absolute, `name` tells where it comes from.

    Args:
        digest: SHA-256 of its content.
    """

    path: str
    name: str
    digest: str
    told: Told = field(default_factory=Told)


@dataclass
class FileSources:
    """Files of the input, each either in `found` or in `rejected`."""

    found: list[FileSource] = field(default_factory=list)
    rejected: list[Row] = field(default_factory=list)
    others: int = 0


def looks_like_source(path: str | Path) -> bool:
    """Return whether a file is a video or a recording, by its name and first bytes; never raises."""
    path = Path(path)
    return (path.suffix.lower() in VIDEO_EXTENSIONS and path.is_file()) or looks_like_audio(path)


def read_source_list(path: Path) -> Iterator[tuple[str, Told | None]]:
    """Yield the files of a list: samples, or rows with `path` and perhaps `caption`, `video` and `split`.

    Raises:
        ListError: a row without a path, a sample without one sound, or a file that is no text in UTF-8.
    """
    for line, row in _rows(path):
        where = f"{path.name}:{line}"
        if "messages" in row:
            yield _of_sample(row, path.parent, where)
            continue
        written = row.get("path") or row.get("file")
        if not isinstance(written, str) or not written:
            raise ListError(f"{where}: no path: each row needs the column path")
        text = next((str(row[name]).strip() for name in _TEXT_COLUMNS if row.get(name)), None)
        video = row.get("video") or None
        told = Told(
            text=text or None,
            video=absolute(path.parent / str(video)) if video else None,
            split=str(row["split"]) if row.get("split") else None,
        )
        yield written, None if told == Told() else told


FILES = InputForm(STAGE_NAME, looks_like_source, read_source_list)
"""The files that an AudioCoT run takes."""


def video_files(inputs: Inputs) -> list[Found]:
    """The files of pictures that lists name beside those of sound."""
    videos = {told.video for told in inputs.given.values() if told.video is not None}
    return [Found(path, path) for path in sorted(videos)]


def file_sources(inputs: Inputs, digests: Mapping[str, str], use_truth: bool) -> FileSources:
    """Match files with what lists tell about them.

    Args:
        digests: by path; a file without one is left out, and is in `inputs.rejected` by another name.
        use_truth: pass on the truth of composed scenes.
    """
    sources = FileSources(rejected=list(inputs.rejected), others=inputs.others)
    for item in inputs.found:
        if item.path not in digests:
            continue
        told = inputs.given.get(item.name) or Told()
        if told.video is not None:
            told = told._replace(video_digest=digests.get(told.video))
        if not use_truth:
            told = told._replace(truth=None)
        sources.found.append(FileSource(item.path, item.name, digests[item.path], told))
    return sources


# Private


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """
    Raises:
        ListError: the file is no text, or a line of it is no row.
    """
    try:
        yield from _read_rows(path)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ListError(f"{path.name}: not a list in UTF-8 ({error}): save it anew as such") from None


def _read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix.lower() in (".csv", ".tsv"):
            reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            yield from enumerate(reader, start=2)
            return
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ListError(f"{path.name}:{number}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise ListError(f"{path.name}:{number}: not a JSON object")
            yield number, row


def _of_sample(row: dict[str, Any], folder: Path, where: str) -> tuple[str, Told]:
    try:
        sample = Sample.model_validate(row)
    except ValueError as error:
        said = " ".join(str(error).split())
        raise ListError(f"{where}: no sample ({said:.160})") from None
    parts = [part for message in sample.messages for part in message.content]
    sounds = [part for part in parts if isinstance(part, AudioPart)]
    videos = [part for part in parts if isinstance(part, VideoPart)]
    if len(sounds) != 1 or len(videos) > 1:
        raise ListError(f"{where}: {len(sounds)} sounds and {len(videos)} videos; one sound is needed")
    for part in (*sounds, *videos):
        if part.start_s > 0 or part.end_s is not None or getattr(part, "region", None):
            raise ListError(
                f"{where}: {part.path} is a part of a file; name whole files, which audiocot cuts"
            )
    facts = sample.metadata
    truth = None
    if isinstance(facts.get("events"), list):
        truth = {
            "events": [_placed(event, folder) for event in facts["events"]],
            "backdrop": _placed(facts["backdrop"], folder) if facts.get("backdrop") else None,
        }
    told = Told(
        text=str(facts["caption"]) if facts.get("caption") else None,
        video=absolute(folder / videos[0].path) if videos else None,
        truth=truth,
        split=facts.get("split"),
    )
    return sounds[0].path, told


def _placed(event: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    path = event.get("path")
    return {**event, "path": absolute(folder / str(path))} if path else dict(event)
