"""What there is to annotate: the input's audio files, each with the transcript, speaker and split given."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audiollm.config import nearest
from pipelines.annotate.segments import set_aside
from pipelines.annotate.transcripts import (
    SPLITS,
    Condition,
    Transcript,
    TranscriptError,
    compile_pattern,
    is_pattern,
    match_pattern,
    parse_condition,
    read_transcripts,
)

DEFAULT_SPEAKER = "speaker"


@dataclass(frozen=True)
class Source:
    """A recording: `path` is absolute, `name` the same below the input, with forward slashes."""

    path: str
    name: str
    speaker: str
    text: str | None = None
    split: str | None = None


@dataclass
class Sources:
    """What the input holds; every audio file is in `found` or in `rejected`."""

    found: list[Source] = field(default_factory=list)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    not_audio: int = 0
    orphans: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the transcripts for which there is no audio file."""

    @property
    def num_audio(self) -> int:
        return len(self.found) + len(self.rejected)


def find_sources(input_path: Path, transcripts: str | None, test: str | None) -> Sources:
    """The recordings below a folder (or the one file), matched with their transcripts.

    Args:
        transcripts: None, a file, or a pattern over file names; see `transcripts.py`.
        test: the condition that marks the test set; everything else is then for training.

    Raises:
        TranscriptError: transcripts or a condition that cannot be used, or that match nothing at all.
    """
    sources = Sources()
    root = input_path if input_path.is_dir() else input_path.parent
    names, sources.not_audio = _find_names(input_path, root)
    given: dict[str, Transcript] | None = None
    if transcripts is not None:
        if is_pattern(transcripts):
            given = _from_pattern(transcripts, names)
            why = f"its name does not match {transcripts!r}"
        else:
            given, sources.orphans = _from_file(Path(transcripts).expanduser(), root, names)
            why = f"no row of {transcripts}"
        if names and not given:
            raise TranscriptError(
                f"not one of the {len(names)} recordings has a transcript ({names[0]!r}: {why})"
            )
    condition = parse_condition(test) if test is not None else None
    for name in names:
        path = _absolute(root / name)
        if given is not None and name not in given:
            sources.rejected.append(set_aside(path, "no transcript", why))
            continue
        transcript = given[name] if given is not None else None
        speaker = (transcript.speaker if transcript else None) or _speaker_by_folder(name)
        text, split = (transcript.text, _split(transcript, condition)) if transcript else (None, None)
        sources.found.append(Source(path, name, speaker, text, split))
    if (
        condition is not None
        and sources.found
        and not any(source.split == "test" for source in sources.found)
    ):
        raise TranscriptError(f"the condition {test!r} holds for none of the {len(sources.found)} recordings")
    return sources


def pattern_hint(names: Sequence[str]) -> str | None:
    """A pattern that most of these names seem to follow, if they look like fields joined by `_` or `-`."""
    stems = [re.sub(r"\.[^.]*$", "", name.rsplit("/", 1)[-1]) for name in names]
    for separator in "_-":
        counts = Counter(stem.count(separator) + 1 for stem in stems if all(stem.split(separator)))
        num_fields, num_names = max(counts.items(), key=lambda item: item[1], default=(1, 0))
        if num_fields > 1 and num_names >= 0.9 * len(stems):
            others = ["{speaker}", "{take}", *(f"{{field{index}}}" for index in range(4, num_fields + 1))]
            return separator.join(["{text}", *others[: num_fields - 1]])
    return None


def _find_names(input_path: Path, root: Path) -> tuple[list[str], int]:
    from audiollm.audio import find_audio, looks_like_audio

    if input_path.is_dir():
        audio, others = find_audio(input_path)
    else:
        audio, others = ([input_path], []) if looks_like_audio(input_path) else ([], [input_path])
    return [path.relative_to(root).as_posix() for path in audio], len(others)


def _from_pattern(pattern: str, names: Sequence[str]) -> dict[str, Transcript]:
    expression = compile_pattern(pattern)
    matches = ((name, match_pattern(pattern, expression, name)) for name in names)
    return {name: transcript for name, transcript in matches if transcript is not None}


def _from_file(
    file: Path, root: Path, names: Sequence[str]
) -> tuple[dict[str, Transcript], list[dict[str, Any]]]:
    """Transcripts by name. A path is relative to the input folder, else to the folder of the transcripts."""
    by_path = {_absolute(root / name): name for name in names}
    given: dict[str, Transcript] = {}
    orphans: list[dict[str, Any]] = []
    for written, transcript in read_transcripts(file):
        candidates = [_absolute(folder / written) for folder in (root, file.parent)]
        name = next((by_path[path] for path in candidates if path in by_path), None)
        if name is None:
            exists = any(Path(path).exists() for path in candidates)
            detail = (
                f"{transcript.where} ({'not audio, or not below the input' if exists else 'no such file'})"
            )
            orphans.append(set_aside(candidates[0], "transcript without a recording", detail))
        elif name in given:
            raise TranscriptError(f"{transcript.where}  {written!r} is the file of {given[name].where} again")
        else:
            given[name] = transcript
    return given, orphans


def _split(transcript: Transcript, condition: Condition | None) -> str | None:
    if condition is not None:
        return "test" if condition.holds(transcript) else "train"
    if transcript.split is not None and transcript.split not in SPLITS:
        raise TranscriptError(
            f"{transcript.where}  split {transcript.split!r}: {nearest(transcript.split, SPLITS)}; "
            f"or choose the test set by a condition, as in test='split=={transcript.split}'"
        )
    return transcript.split


def _speaker_by_folder(name: str) -> str:
    return name.split("/")[0] if "/" in name else DEFAULT_SPEAKER


def _absolute(path: Path) -> str:
    """Absolute and without `..`, but with links as they are, so that no two files become one."""
    return os.path.normpath(path.absolute())
