"""Parts shared by all conversions: where audio may lie, which column is which field, and how a row becomes a sample."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from audiollm.data.chat.question_prompts import MAX_WORDS, PLAIN
from audiollm.data.chat.tasks import FieldValue, TaskTemplate, fill_task
from audiollm.data.records.aligned_recording import AlignedRecording
from audiollm.data.records.sample import AudioPart, Sample
from audiollm.data.tables.columns import NAME_FIELDS, is_missing
from audiollm.data.tables.splits import split_of
from audiollm.data.tables.table import BadRow
from audiollm.errors import BadSample, ConfigError, first_problem
from audiollm.files.spelled_paths import as_spelled


class SourceRows(NamedTuple):
    """Rows of a source: their number, if known, and for each row a record or the reason why there is none."""

    total: int | None
    results: Iterator[Sample | BadSample] | Iterator[AlignedRecording | BadSample]
    notes: tuple[str, ...] = ()
    """Facts about the source to print before the rows are read."""
    makes_samples: bool = True
    """Whether the results are samples; else they are recordings with translations, for `compose_streams`."""
    remarks: Mapping[str, int] | None = None
    """Facts about rows that are used all the same, counted while they are read: "score_chosen is below ..."."""


Converter = Callable[["ConversionRequest"], SourceRows]


@dataclass(frozen=True)
class QuestionAsking:
    """How questions with options are asked, and how many."""

    prompt: str = PLAIN
    """A name of `question_prompts.PROMPTS`, or a text of one's own."""
    max_words: int = MAX_WORDS
    """Longest thought that the prompt asks for, in words."""
    count: int | None = None
    """Questions that are drawn; None: all."""
    held_out: float = 0.0
    """Share of the questions that is held out (`split: test`), by recording."""


@dataclass(frozen=True)
class ConversionRequest:
    """A request to convert a data set to a manifest.

    Args:
        source: the dataset.
        out: the manifest to write.
        audio: the folder that audio files must lie in. Their paths are relative to it, or else to the source's.
        columns: the column of each field; fields that are not named go by `columns.USUAL_COLUMNS`.
        task: the task that the samples teach; for kinds that hold chats only its name is used. None: the kind's own.
        seed: seed of the choice of phrasings, of questions, and of their options.
        asking: how questions with options are asked.
    """

    source: Path
    out: Path
    audio: Path
    columns: Mapping[str, str]
    task: TaskTemplate | None
    seed: int = 0
    asking: QuestionAsking = QuestionAsking()

    def first_audio_part(self, names: Sequence[str]) -> AudioPart:
        """The first of several names that is a file of the audio folder.

        Raises:
            ValueError: none is; the error is that of the first name.
        """
        first: ValueError | None = None
        for name in names:
            try:
                return self.audio_part(name)
            except ValueError as error:
                first = first or error
        raise first or ValueError("has no recording")

    def audio_part(
        self, name: str, start_s: float = 0.0, end_s: float | None = None, speaker: str | None = None
    ) -> AudioPart:
        """A file of the audio folder, named as seen from the manifest: relative where it is below it.

        Raises:
            ValueError: no such file, or one outside of the folder.
        """
        try:
            home = self.source if self.source.is_dir() else self.source.parent
            paths = [as_spelled(folder / name).resolve() for folder in (self.audio, home)]
            path = next((path for path in paths if path.is_file()), None)
            if path is None:
                raise ValueError(f"{name}: no such file in {self.audio}; --audio names another folder")
            if not path.is_relative_to(self.audio.resolve()):
                raise ValueError(f"{name}: lies outside of {self.audio}; give a folder above it with --audio")
        except OSError as error:  # a name that no system takes
            raise ValueError(f"{name:.80}: {error.strerror}") from None
        folder = self.out.parent.resolve()
        manifest_path = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
        return AudioPart(path=manifest_path, start_s=start_s, end_s=end_s, speaker=speaker)

    def sample(self, place: str, id: str, fields: Mapping[str, FieldValue]) -> Sample | BadSample:
        """The task's chat, filled with the fields; the texts among them go to the metadata."""
        present = {
            name: value
            for name, value in fields.items()
            if value and not is_missing(value, name in NAME_FIELDS)
        }
        texts = {name: value for name, value in present.items() if isinstance(value, str)}
        if "split" in texts:
            texts["split"] = present["split"] = known_split(place, texts["split"])
        if self.task is None:
            raise ValueError("this kind of source needs a task")
        try:
            return fill_task(self.task, id, present, self.seed, texts)
        except ValidationError as error:
            return bad_row(place, id, first_problem(error))
        except ValueError as error:
            return bad_row(place, id, str(error))


def known_split(place: str, name: str) -> str:
    """`train` or `test`, for the name that a source gives a split.

    Raises:
        ConfigError: the name says neither; the known names are in it.
    """
    try:
        return split_of(name)
    except ValueError as error:
        remedy = "rename it, or take the column out; to convert one split, give its files alone"
        raise ConfigError(str(error), place, remedy) from None


def bad_row(place: str, id: str, reason: str) -> BadSample:
    """A row of the source that makes no sample."""
    return BadSample(place, id, reason, "unusable row")


def draw_held_out(recordings: Sequence[tuple[str, str]], share: float, seed: int) -> set[str]:
    """Return the ids of the questions about held-out recordings: about `share` of all, at least one recording.

    Recordings are taken in the order of numbers that are drawn for their names, while their questions fit the share.

    Args:
        recordings: the id of each question, and the name of its recording.
        share: 0 holds out none.
    """
    by_recording: dict[str, list[str]] = {}
    for id, recording in recordings:
        by_recording.setdefault(recording, []).append(id)
    names = sorted(by_recording, key=lambda name: random.Random(f"{seed}/split/{name}").random())
    max_questions = round(share * len(recordings))
    held_out: set[str] = set()
    for name in names if share else ():
        if not held_out or len(held_out) + len(by_recording[name]) <= max_questions:
            held_out.update(by_recording[name])
    return held_out


def row_id(source: Path, place: str) -> str:
    """The id of a row that has none: the file's name, and the row's number or line."""
    number = re.split(r"[:\[]", place)[-1].rstrip("]")
    return f"{source.stem}-{number}"


def bad_rows_sample(place: str, row: BadRow) -> BadSample:
    """A row that its reader could not read, as it is set aside."""
    return BadSample(place, "", row.reason, row.kind)
