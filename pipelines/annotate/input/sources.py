"""Recordings to annotate: the input's audio files, each with its given transcript, speaker and split."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath

from audiollm.audio.discovery import looks_like_audio
from audiollm.data.tables.splits import is_split, split_of
from audiollm.data.text.words import settle_characters
from audiollm.files.set_aside import Row, set_aside_row
from pipelines.annotate.input.transcripts import (
    Condition,
    Transcript,
    TranscriptError,
    compile_pattern,
    is_pattern,
    match_pattern,
    parse_condition,
    read_manifest,
    read_transcripts,
)
from pipelines.annotate.step import RecordingMetadata
from pipelines.steps.inputs import FileList, InputFile, InputForm, Inputs, absolute, collect

DEFAULT_SPEAKER = "speaker"
RECORDINGS = InputForm("annotate", looks_like_audio, read_manifest)
"""The files that an annotation takes."""


@dataclass(frozen=True)
class RecordingSource:
    """A recording: `path` is absolute, `name` tells where it comes from, with forward slashes.

    Args:
        digest: SHA-256 of its content.
        folder: the speaker where nothing else tells; see `Found.folder`.
    """

    path: str
    name: str
    digest: str
    folder: str
    metadata: RecordingMetadata = field(default_factory=RecordingMetadata)
    split: str | None = None


@dataclass
class Sources:
    """Audio files of the input, each either in `recordings` or in `rejected`."""

    recordings: list[RecordingSource] = field(default_factory=list)
    rejected: list[Row] = field(default_factory=list)
    not_audio: int = 0
    orphans: list[Row] = field(default_factory=list)
    """Rows of the transcripts without an audio file, and texts of a corpus that could not be spoken."""
    notes: list[str] = field(default_factory=list)
    """Facts about lists and transcripts to say: the columns read, a guessed encoding."""
    warnings: list[str] = field(default_factory=list)
    """What the run and its page warn of."""

    @property
    def num_audio(self) -> int:
        return len(self.recordings) + len(self.rejected)


def collect_recordings(
    inputs: Sequence[str],
    fetched: Path,
    on_fetched: Callable[[str], None],
    max_unpacked_gb: float = math.inf,
) -> Inputs:
    """Collect all recordings; see `pipelines.steps.inputs.collect`.

    Raises:
        InputError: an input that is missing or cannot be read.
        TranscriptError: a list that is malformed.
    """
    return collect(inputs, fetched, on_fetched, RECORDINGS, max_unpacked_gb)


def match_sources(
    inputs: Inputs,
    digests: Mapping[str, str],
    transcripts: str | None,
    test: str | None,
    *,
    recognize_untranscribed: bool = False,
) -> Sources:
    """Match the recordings of the inputs with their transcripts.

    Args:
        digests: by path; a recording without one is in `inputs.rejected` by another name, and is left out.
        transcripts: None, a file, or a pattern over file names; see `transcripts.py`.
        test: the condition that marks the test set; everything else is then for training.
        recognize_untranscribed: keep recordings without a transcript, whose text a recognizer writes; else they are
            rejected.

    Raises:
        TranscriptError: transcripts or a condition that cannot be used, or that match nothing at all.
    """
    sources = Sources(
        not_audio=inputs.num_other_files, rejected=list(inputs.rejected), notes=list(inputs.notes)
    )
    audio = [item for item in inputs.files if item.path in digests]
    transcript_by_name: dict[str, Transcript] | None = None
    if transcripts is not None:
        if is_pattern(transcripts):
            transcript_by_name = _from_pattern(transcripts, [item.name for item in audio])
            why = f"its name does not match {transcripts!r}"
        else:
            listed = read_transcripts(
                Path(transcripts).expanduser(), texts_required=not recognize_untranscribed
            )
            sources.notes += listed.notes
            transcript_by_name, sources.orphans = _from_list(
                listed, Path(transcripts).expanduser().parent, inputs.root, audio
            )
            why = f"no row of {transcripts}"
        if audio and not transcript_by_name:
            unmatched = f"; {sources.orphans[0]['reason']}" if sources.orphans else ""
            raise TranscriptError(
                f"not one of the {len(audio)} recordings has a transcript ({audio[0].name!r}: {why}{unmatched})"
            )
        num_untranscribed = sum(item.name not in transcript_by_name for item in audio)
        if num_untranscribed and not recognize_untranscribed:
            sources.notes.append(
                f"{num_untranscribed:,} of {len(audio):,} recordings have no transcript and are set aside; "
                "with the setting untranscribed=recognize, recognizers write their texts"
            )
    condition = parse_condition(test) if test is not None else None
    for item in audio:
        is_untranscribed = transcript_by_name is not None and item.name not in transcript_by_name
        if is_untranscribed and not recognize_untranscribed:
            sources.rejected.append(set_aside_row("annotate", item.path, "no transcript", why))
            continue
        transcript = (inputs.facts if transcript_by_name is None else transcript_by_name).get(item.name)
        metadata = (
            RecordingMetadata(
                settle_characters(transcript.text) or None,
                settle_characters(transcript.speaker or "").strip() or None,
                _transcript_language(transcript),
            )
            if transcript
            else RecordingMetadata()
        )
        split = _choose_recording_split(transcript, condition) if transcript else None
        folder = item.folder or DEFAULT_SPEAKER
        sources.recordings.append(
            RecordingSource(item.path, item.name, digests[item.path], folder, metadata, split)
        )
    if (
        condition is not None
        and sources.recordings
        and not any(source.split == "test" for source in sources.recordings)
    ):
        raise TranscriptError(
            f"the condition {test!r} holds for none of the {len(sources.recordings)} recordings"
        )
    return sources


def speaker_warning(recordings: Sequence[RecordingSource]) -> str:
    """Why the recordings' speakers look wrong where nothing names them; empty where nothing does.

    The first folder stands for the speaker then: a flat folder is one voice, a folder of splits one voice a split.
    """
    folders = {source.folder for source in recordings}
    if len(recordings) < 2 or any(source.metadata.speaker for source in recordings):
        return ""
    if len(folders) == 1:
        problem = (
            f"all {len(recordings):,} recordings count as one speaker, {min(folders)!r}: "
            "nothing names their speakers"
        )
    elif all(is_split(folder) for folder in folders):
        names = ", ".join(repr(folder) for folder in sorted(folders))
        problem = f"the folders {names} count as the speakers, and are names of splits"
    else:
        return ""
    return (
        f"{problem}. If several people speak, put each one's recordings into a folder of their own, or give "
        "transcripts with a column speaker or {speaker} in their pattern, or find the voices with steps.speakers"
    )


def pattern_hint(names: Sequence[str]) -> str | None:
    """A pattern that most of these names seem to follow, if they look like fields joined by `_` or `-`."""
    stems = [re.sub(r"\.[^.]*$", "", name.rsplit("/", 1)[-1]) for name in names]
    for separator in "_-":
        counts = Counter(stem.count(separator) + 1 for stem in stems if all(stem.split(separator)))
        num_fields, num_names = max(counts.items(), key=lambda item: item[1], default=(1, 0))
        if num_fields > 1 and num_names >= 0.9 * len(stems):
            field_names = [
                "{speaker}",
                "{take}",
                *(f"{{field{index}}}" for index in range(4, num_fields + 1)),
            ]
            return separator.join(["{text}", *field_names[: num_fields - 1]])
    return None


def _from_pattern(pattern: str, names: Sequence[str]) -> dict[str, Transcript]:
    expression = compile_pattern(pattern)
    matches = ((name, match_pattern(pattern, expression, name)) for name in names)
    return {name: transcript for name, transcript in matches if transcript is not None}


def _from_list(
    listed: FileList, folder: Path, root: Path | None, audio: Sequence[InputFile]
) -> tuple[dict[str, Transcript], list[Row]]:
    """Transcripts by name. A path is relative to the input folder, else to the folder of the transcripts; it may be
    written with backslashes, or in other Unicode characters that look the same."""
    by_path = {settle_characters(item.path): item.name for item in audio}
    by_path |= {item.path: item.name for item in audio}
    names = {item.name for item in audio}
    transcript_by_name: dict[str, Transcript] = {}
    orphans: list[Row] = []
    for listed_path, transcript in listed.rows:
        candidates = [
            absolute(place / path)
            for path in dict.fromkeys((listed_path, listed_path.replace("\\", "/")))
            for place in (root, folder)
            if place is not None
        ]
        spellings = [*candidates, *map(settle_characters, candidates)]
        name = next((by_path[path] for path in spellings if path in by_path), None)
        if name is None and listed_path in names:  # a member of a tar, or an address
            name = listed_path
        if name is None:
            exists = any(Path(path).exists() for path in candidates)
            problem = (
                "not audio, or not below the input"
                if exists
                else f"no such file{_namesake(listed_path, audio)}"
            )
            detail = f"{transcript.where} ({problem})"
            orphans.append(set_aside_row("annotate", candidates[0], "transcript without a recording", detail))
        elif name in transcript_by_name:
            raise TranscriptError(
                f"{transcript.where}  {listed_path!r} is the file of {transcript_by_name[name].where} again"
            )
        else:
            transcript_by_name[name] = transcript
    return transcript_by_name, orphans


def _namesake(listed_path: str, audio: Sequence[InputFile]) -> str:
    """Return the path of a recording of the same name in another folder, as a remedy; empty: there is none."""
    name = PureWindowsPath(listed_path).name
    path = next((item.name for item in audio if PurePosixPath(item.name).name == name), None)
    return "" if path is None else f"; a recording of this name is {path!r}: write its path"


def _transcript_language(transcript: Transcript) -> str | None:
    return transcript.fields.get("language") or None


def _choose_recording_split(transcript: Transcript, condition: Condition | None) -> str | None:
    if condition is not None:
        return "test" if condition.holds(transcript) else "train"
    if transcript.split is None:
        return None
    try:
        return split_of(transcript.split)
    except ValueError as error:
        raise TranscriptError(
            f"{transcript.where}  {error}; or choose the test set by a condition, as in "
            f"test='split=={transcript.split}'"
        ) from None
