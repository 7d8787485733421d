"""The material of tasks: clips and conversations of segments, with the fields that a task's phrasings name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from audiollm.data.chat.scene import dialogue_text, voices
from audiollm.data.chat.tasks import FieldValue, TaskTemplate
from audiollm.data.records.sample import AudioPart, ContentPart
from audiollm.data.text.forms import prompt_form, without_sound_tags
from audiollm.data.text.words import settle_characters
from audiollm.errors import BadSample, first_problem
from pipelines.compose.facts import Facts
from pipelines.review.applied import corrected_lines

MAX_CONVERSATION_GAP_S = 2.0
"""Longest pause within a conversation."""
MAX_CONVERSATION_S = 30.0
"""Longest conversation; a longer one is split."""
_PARTS = TypeAdapter(list[ContentPart])


class Refusal(BaseModel):
    """Why a recognized text was not trusted."""

    model_config = ConfigDict(extra="allow")

    kind: str
    reason: str = ""


class SegmentRow(BaseModel):
    """A row of `segments.jsonl`. Columns that are not named here are fields of the tasks, too."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    id: str = Field(min_length=1)
    path: str = Field(min_length=1)
    file: str | None = None
    start_s: float = Field(ge=0)
    end_s: float
    speaker: str = Field(min_length=1)
    text: str
    kind: Literal["speech", "sound"] = "speech"
    """sound: a segment without speech, whose `speaker` has no meaning."""
    split: Literal["train", "test"] | None = None
    text_refused: Refusal | None = None
    """Why there is no text, where a recognizer heard one."""

    @field_validator("speaker", "text")
    @classmethod
    def _look_is_spelling(cls, value: str) -> str:
        """Texts and names that look the same are the same."""
        return settle_characters(value)

    @property
    def source(self) -> str:
        """Name of the segment's recording, which does not change when the folder moves."""
        return self.file or self.path

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def language(self) -> str | None:
        """The segment's language, as its column says."""
        language = (self.model_extra or {}).get("language")
        return language if isinstance(language, str) and language else None

    @property
    def clip(self) -> AudioPart:
        return AudioPart(path=self.path, start_s=self.start_s, end_s=self.end_s, speaker=self.speaker)


@dataclass(frozen=True)
class Row:
    """One clip or conversation, and the fields that it has."""

    id: str
    split: str | None
    speaker: str
    segment: str
    words: str
    """The spoken text without tags."""
    fields: dict[str, FieldValue]
    columns: Mapping[str, Any]
    """Other columns of the segments, unchanged."""
    file: str
    facts: Mapping[str, str]
    """Fields derived from the columns (`pipelines/compose/facts.py`); a column of the same name takes precedence."""

    def fields_for(self, task: TaskTemplate) -> dict[str, FieldValue]:
        """All fields, the columns read as recordings where the task says that they are.

        Raises:
            ValueError: a column that is to be a recording and is none.
        """
        read = {name: _column(name, value, name in task.audio) for name, value in self.columns.items()}
        column_fields = {
            name: value for name, value in read.items() if value is not None and name != "language"
        }
        return {**self.facts, **column_fields, **self.fields}

    @property
    def names(self) -> set[str]:
        """Names of the fields, and of the columns that may become fields."""
        return {*self.fields, *self.columns, *self.facts}


def read_segments(path: Path) -> tuple[list[SegmentRow], list[BadSample]]:
    """The usable rows of a `segments.jsonl`, with all corrections of people, and what the others are.

    Raises:
        DamagedFile: the file of corrections is damaged.
    """
    segments: list[SegmentRow] = []
    bad: list[BadSample] = []
    used_ids: set[str] = set()
    for where, line, drop in corrected_lines(path):
        if drop is not None:
            bad.append(BadSample(where, drop.id, drop.kind))
            continue
        try:
            segment = SegmentRow.model_validate_json(line)
        except ValidationError as error:
            bad.append(BadSample(where, "", first_problem(error), "malformed segment"))
            continue
        if segment.end_s <= segment.start_s or segment.id in used_ids:
            reason = "its id was used before" if segment.id in used_ids else "it ends before it starts"
            bad.append(BadSample(where, segment.id, reason, "malformed segment"))
            continue
        used_ids.add(segment.id)
        segments.append(segment)
    return segments, bad


def format_transcript(text: str, normalize: bool, language: str | None = None) -> str:
    """A transcript as prompts show it: single spaces and, on demand, its numbers as words, sounds as Higgs's tags."""
    return prompt_form(text, language) if normalize else " ".join(text.split())


def clips(segments: Sequence[SegmentRow], seed: int) -> list[Row]:
    """A row a segment; `reference` is another clip of the same speaker and split, where there is one."""
    references = _References(segments, seed)
    facts = Facts((segment.model_extra or {} for segment in segments), seed)
    rows = []
    for segment in segments:
        fields: dict[str, FieldValue] = {"audio": segment.clip}
        if segment.kind == "speech":
            fields["speaker"] = segment.speaker
        reference = references.of(segment, {segment.id})
        columns = dict(segment.model_extra or {})
        if segment.text:
            fields["text"] = segment.text
        if reference and "reference" not in columns:
            fields |= {"reference": reference.clip, "reference_text": reference.text}
        words = without_sound_tags(segment.text)
        segment_facts = facts.of(segment.id, columns, _speakers_heard(segment))
        rows.append(
            Row(
                segment.id,
                segment.split,
                segment.speaker,
                segment.id,
                words,
                fields,
                columns,
                segment.source,
                segment_facts,
            )
        )
    return rows


def conversations(segments: Sequence[SegmentRow], seed: int) -> list[Row]:
    """Successive segments of one recording and split with at least two speakers, as one clip each.

    `references` shows a clip of every speaker from outside of the conversation, where all have one.
    """
    references = _References(segments, seed)
    facts = Facts((segment.model_extra or {} for segment in segments), seed)
    rows = []
    for group in _group_conversations(segments):
        first, ids = group[0], {segment.id for segment in group}
        speakers = list(dict.fromkeys(segment.speaker for segment in group))
        reference_by_speaker = {s.speaker: references.of(s, ids) for s in group}
        text = dialogue_text(_join_turns(group))
        end_s = max(segment.end_s for segment in group)
        fields: dict[str, FieldValue] = {
            "audio": AudioPart(path=first.path, start_s=first.start_s, end_s=end_s),
            "text": text,
            "voices": voices({name: name for name in speakers}),
        }
        if all(reference_by_speaker.values()):
            fields["references"] = voices(
                {name: reference.clip for name, reference in reference_by_speaker.items() if reference}
            )
        columns = {
            name: value
            for name, value in (first.model_extra or {}).items()
            if all((segment.model_extra or {}).get(name) == value for segment in group)
        }
        words = " ".join(without_sound_tags(segment.text) for segment in group)
        conversation_facts = facts.of(first.id, columns, len(speakers))
        names = ", ".join(speakers)
        rows.append(
            Row(
                first.id,
                first.split,
                names,
                first.id,
                words,
                fields,
                columns,
                first.source,
                conversation_facts,
            )
        )
    return rows


class _References:
    """The clips of each speaker and split: which one stands for the voice of another."""

    def __init__(self, segments: Sequence[SegmentRow], seed: int) -> None:
        self._seed = seed
        self._clips: dict[tuple[str, str | None], list[SegmentRow]] = defaultdict(list)
        for segment in sorted(segments, key=lambda segment: segment.id):
            if segment.text:
                self._clips[segment.speaker, segment.split].append(segment)

    def of(self, segment: SegmentRow, without: set[str]) -> SegmentRow | None:
        """Draw, by a hash of the segment's id, a clip that is not in `without`; None where there is none."""
        speaker_clips = self._clips[segment.speaker, segment.split]
        start = int(sha256(f"{self._seed}:reference:{segment.id}".encode()).hexdigest()[:16], 16)
        for step in range(min(len(speaker_clips), len(without) + 1)):
            candidate = speaker_clips[(start + step) % len(speaker_clips)]
            if candidate.id not in without:
                return candidate
        return None


def _speakers_heard(segment: SegmentRow) -> int | None:
    """Number of people who speak in a segment: none in a sound, and one where a step has looked for others."""
    if segment.kind == "sound":
        return 0
    return 1 if "speakers" in ((segment.model_extra or {}).get("measured") or {}) else None


def _group_conversations(segments: Sequence[SegmentRow]) -> list[list[SegmentRow]]:
    groups: list[list[SegmentRow]] = []
    previous: SegmentRow | None = None
    for segment in sorted(segments, key=lambda segment: (segment.path, segment.start_s, segment.id)):
        goes_on = (
            previous is not None
            and (previous.path, previous.split) == (segment.path, segment.split)
            and previous.text
            and segment.text
            and segment.start_s - previous.end_s <= MAX_CONVERSATION_GAP_S
            and segment.end_s - groups[-1][0].start_s <= MAX_CONVERSATION_S
        )
        if goes_on:
            groups[-1].append(segment)
        else:
            groups.append([segment])
        previous = segment
    return [group for group in groups if len({segment.speaker for segment in group}) > 1]


def _join_turns(group: Sequence[SegmentRow]) -> list[tuple[str, str]]:
    turns: list[tuple[str, str]] = []
    for segment in group:
        if turns and turns[-1][0] == segment.speaker:
            turns[-1] = (segment.speaker, f"{turns[-1][1]} {segment.text}")
        else:
            turns.append((segment.speaker, segment.text))
    return turns


def _column(name: str, value: Any, is_audio: bool) -> FieldValue | None:
    """A text, or a recording by its path or by `{path, start_s, end_s}`, or a list of texts and recordings as messages
    hold them; None for what is none of these."""
    if value in (None, "", [], {}):
        return None
    if is_audio:
        try:
            if isinstance(value, list):
                return _PARTS.validate_python(value)
            return AudioPart.model_validate({"path": value} if isinstance(value, str) else value)
        except ValidationError as error:
            raise ValueError(f"{name} is no recording: {first_problem(error)}") from None
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return str(value) if isinstance(value, (str, int, float)) else None
