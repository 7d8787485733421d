"""Files of a run: videos, recordings, and lists that tell their texts or the truth of composed scenes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audiollm.audio.discovery import looks_like_audio
from audiollm.data.records.sample import AudioPart, Sample, VideoPart
from audiollm.data.tables.columns import USUAL_COLUMNS, ColumnFinder, is_missing
from audiollm.data.tables.rows import checked_rows
from audiollm.data.tables.splits import split_of
from audiollm.errors import ConfigError
from audiollm.files.set_aside import Row
from audiollm.files.spelled_paths import as_spelled
from pipelines.audiocot.clip import FileFacts
from pipelines.steps.inputs import FileList, InputFile, InputForm, Inputs, absolute

VIDEO_EXTENSIONS = frozenset({".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts"})
STAGE_NAME = "audiocot"
_COLUMNS = {
    "path": USUAL_COLUMNS["audio"],
    "text": ("caption", *USUAL_COLUMNS["text"], "title"),
    "video": ("video",),
    "split": USUAL_COLUMNS["split"],
}
"""Fields of a list, and the columns that are taken for them, the first that is there."""


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
    facts: FileFacts = field(default_factory=FileFacts)


@dataclass
class FileSources:
    """Files of the input, each either in `files` or in `rejected`."""

    files: list[FileSource] = field(default_factory=list)
    rejected: list[Row] = field(default_factory=list)
    num_other_files: int = 0


def looks_like_source(path: str | Path) -> bool:
    """Return whether a file is a video or a recording, by its name and first bytes; never raises."""
    path = Path(path)
    return (path.suffix.lower() in VIDEO_EXTENSIONS and path.is_file()) or looks_like_audio(path)


def read_source_list(path: Path) -> FileList:
    """Read the files of a list: samples, or rows with `path` and perhaps `caption`, `video` and `split`.

    Raises:
        ListError: a row without a path, a sample without one sound, an unknown split, or a file that is no list.
    """
    try:
        listed = checked_rows(path, [name for names in _COLUMNS.values() for name in names])
    except ConfigError as error:
        raise ListError(f"{error.where}: {error.message} ({error.remedy})") from None
    finder = ColumnFinder(listed.columns, {}, str(path), _COLUMNS)
    files = [
        _of_sample(row, path.parent, where)
        if "messages" in row
        else _of_row({field: row[column] for field, column in finder.of_row(row).items()}, path.parent, where)
        for where, row in listed.rows
    ]
    return FileList(files, (*listed.notes, f"{path.name}: {finder.note()}"))


FILES = InputForm(STAGE_NAME, looks_like_source, read_source_list)
"""The files that an AudioCoT run takes."""


def video_files(inputs: Inputs) -> list[InputFile]:
    """The files of pictures that lists name beside those of sound."""
    videos = {facts.video for facts in inputs.facts.values() if facts.video is not None}
    return [InputFile(path, path) for path in sorted(videos)]


def file_sources(inputs: Inputs, digests: Mapping[str, str], use_truth: bool) -> FileSources:
    """Match files with what lists tell about them.

    Args:
        digests: by path; a file without one is left out, and is in `inputs.rejected` by another name.
        use_truth: pass on the truth of composed scenes.
    """
    sources = FileSources(rejected=list(inputs.rejected), num_other_files=inputs.num_other_files)
    for item in inputs.files:
        if item.path not in digests:
            continue
        facts = inputs.facts.get(item.name) or FileFacts()
        if facts.video is not None:
            facts = facts._replace(video_digest=digests.get(facts.video))
        if not use_truth:
            facts = facts._replace(truth=None)
        sources.files.append(FileSource(item.path, item.name, digests[item.path], facts))
    return sources


# Private


def _of_row(row: dict[str, Any], folder: Path, where: str) -> tuple[str, FileFacts | None]:
    listed_path, video, text, split = (row.get(name) for name in ("path", "video", "text", "split"))
    if not isinstance(listed_path, str) or is_missing(listed_path):
        raise ListError(f"{where}: no path: each row needs the column path")
    facts = FileFacts(
        text=None if is_missing(text) else str(text).strip(),
        video=None if is_missing(video) else absolute(as_spelled(folder / str(video))),
        split=None if is_missing(split, is_name=True) else _parse_listed_split(str(split), where),
    )
    return listed_path, None if facts == FileFacts() else facts


def _parse_listed_split(name: str, where: str) -> str:
    try:
        return split_of(name)
    except ValueError as error:
        raise ListError(f"{where}: {error}") from None


def _of_sample(row: dict[str, Any], folder: Path, where: str) -> tuple[str, FileFacts]:
    try:
        sample = Sample.model_validate(row)
    except ValueError as error:
        problem = " ".join(str(error).split())
        raise ListError(f"{where}: no sample ({problem:.160})") from None
    parts = [content_part for message in sample.messages for content_part in message.content]
    sounds = [content_part for content_part in parts if isinstance(content_part, AudioPart)]
    videos = [content_part for content_part in parts if isinstance(content_part, VideoPart)]
    if len(sounds) != 1 or len(videos) > 1:
        raise ListError(f"{where}: {len(sounds)} sounds and {len(videos)} videos; one sound is needed")
    for content_part in (*sounds, *videos):
        if (
            content_part.start_s > 0
            or content_part.end_s is not None
            or getattr(content_part, "region", None)
        ):
            raise ListError(
                f"{where}: {content_part.path} is a part of a file; name whole files, which audiocot cuts"
            )
    metadata = sample.metadata
    truth = None
    if isinstance(metadata.get("events"), list):
        truth = {
            "events": [_placed(event, folder) for event in metadata["events"]],
            "backdrop": _placed(metadata["backdrop"], folder) if metadata.get("backdrop") else None,
        }
    facts = FileFacts(
        text=str(metadata["caption"]) if metadata.get("caption") else None,
        video=absolute(folder / videos[0].path) if videos else None,
        truth=truth,
        split=metadata.get("split"),
    )
    return sounds[0].path, facts


def _placed(event: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    path = event.get("path")
    return {**event, "path": absolute(folder / str(path))} if path else dict(event)
