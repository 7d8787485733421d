"""Suite `asr`: error rates of transcripts, by speaker and by condition."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audiollm.audio import AudioError, probe
from audiollm.data.records.sample import Sample
from audiollm.data.records.text_origin import TEXT_RECOGNIZERS, read_text_recognizers, text_recognizers
from audiollm.data.tables.columns import USUAL_COLUMNS, ColumnFinder, is_missing
from audiollm.data.tables.rows import checked_rows
from audiollm.data.tables.splits import is_of_split
from audiollm.data.text.repeated_words import loop_reason
from audiollm.errors import BadSample, ConfigError, suggestion
from audiollm.evaluate.listening.replies import Inquiry, Reply
from audiollm.evaluate.report.lists import need_unique
from audiollm.evaluate.report.store import Row
from audiollm.evaluate.report.suite import MAX_TILES, Example, ScoreTable, Sound, SuiteResult, share_tiles
from audiollm.evaluate.report.text_errors import Errors, TextForm, choose_form, count_errors, error_table
from audiollm.evaluate.speech.scoring import error_summary, rate_of, transcript_errors
from audiollm.evaluate.speech.tts import error_rows
from audiollm.files.spelled_paths import as_spelled

QUESTION = "Transcribe the speech."
"""The question to the model: a phrasing of the task `asr` in `audiollm/data/chat/tasks.yaml`."""
MAX_GROUPS = 40
"""Groups that one table of the page shows; results.json has all."""
_RECORDING_KEYS = {"id", "path", "audio", "text", "language", "start_s", "end_s", TEXT_RECOGNIZERS}


@dataclass(frozen=True)
class TranscribedRecording:
    """A recording, or a span of one, with the text that is said in it."""

    id: str
    path: Path
    text: str
    language: str
    start_s: float = 0.0
    end_s: float | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    """Speaker, condition and all other columns of the manifest."""
    text_recognizers: Sequence[str] = ()
    """Digests of the recognizers that wrote the text."""

    def inquiry(self) -> Inquiry:
        return Inquiry(self.id, self.path, QUESTION, self.start_s, self.end_s)


def read_recordings(
    path: Path, language: str, split: str | None = None, say: Callable[[str], None] = lambda note: None
) -> list[TranscribedRecording]:
    """A manifest: a table, JSON or JSON lines with a recording (`path`, `audio`, ...) and its text (`text`,
    `sentence`, ...; see `columns.USUAL_COLUMNS`), or samples of this project.

    Of `id` (by default the path), `language`, `start_s` and `end_s` it may have each; other columns are conditions.
    Paths are relative to the manifest. Of a sample, the recording is the user's first and the text the assistant's.

    Args:
        language: of those that name none.
        split: of samples, only those of this split.
        say: told the columns that are read, and an encoding that was guessed.

    Raises:
        ConfigError: what is wrong with the manifest, and where.
    """
    recordings = []
    listed = checked_rows(path, [name for names in USUAL_COLUMNS.values() for name in names])
    finder = ColumnFinder(listed.columns, {}, str(path))
    for note in (
        [*listed.notes, f"{path}: {finder.note()}"] if "messages" not in listed.columns else listed.notes
    ):
        say(note)
    for where, row in listed.rows:
        # conditions may be named by their column, too
        values = row if "messages" in row else row | {f: row[c] for f, c in finder.of_row(row).items()}
        if listed.is_table:  # an empty cell is none
            values = {key: value for key, value in values.items() if value}
        if split is not None and not is_of_split(_conditions_of(values).get("split"), split):
            continue
        build_recording = (
            _recording_of_sample(values, where, path.parent)
            if "messages" in values
            else _recording_of_row(values, where, path.parent)
        )
        recordings.append(build_recording(language))
    if not recordings:
        raise ConfigError(
            f"no recordings{f' of the split {split}' if split else ''}", str(path), "look at the manifest"
        )
    need_unique([recording.id for recording in recordings], path)
    return recordings


def evaluate_asr(
    recordings: Sequence[TranscribedRecording],
    replies: Mapping[str, Reply],
    form: str,
    by: Sequence[str] = (),
    about: str = "",
    spelling: Path | None = None,
) -> SuiteResult:
    """Compare replies with the texts that are said.

    Args:
        replies: by the recordings' ids. A loop (`loop_reason`) is not scored, and counts as a missing reply.
        form: how texts are compared, one of `text_errors.FORMS`, in each recording's language.
        by: conditions to tell apart (`speaker`, ...).

    Raises:
        ConfigError: a condition that no recording has, or no such form.
    """
    conditions = {key for recording in recordings for key in recording.about}
    for key in by:
        if key not in conditions:
            raise ConfigError(f"{key}: no recording has it", "--by", suggestion(key, conditions))
    languages = sorted({recording.language for recording in recordings})
    forms = {
        language: choose_form(form, language, spelling if language == "en" else None)
        for language in languages
    }
    rows = [
        _transcript_row(recording, replies[recording.id], forms[recording.language])
        for recording in recordings
    ]
    sets = {language: [row for row in rows if row["language"] == language] for language in languages}
    words = {language: error_summary(sets[language], forms[language]) for language in languages}
    groups = {
        key: {language: _group_errors(sets[language], key, forms[language]) for language in languages}
        for key in by
    }
    result = {
        "suite": "asr",
        "recordings": len(rows),
        "words": words,
        "characters": {
            language: _by_character(sets[language])
            for language in languages
            if forms[language].unit == "word"
        },
        "by": groups,
    }
    tables = [error_rows({language: words[language]}) for language in languages]
    for key, of_language in groups.items():
        for group_language, group in of_language.items():
            worst = sorted(group, key=lambda name: -(group[name]["rate"] or 0.0))[:MAX_GROUPS]
            if worst:
                group_table = error_rows({name: group[name] for name in worst})
                tables.append(
                    ScoreTable(
                        f"{group_language} by {key}, the worst first", group_table.headings, group_table.rows
                    )
                )
    return SuiteResult(
        "Speech recognition",
        [line for line in (about, f"texts are compared in the form {form}") if line],
        result,
        tables,
        [
            _transcript_example(row, recording)
            for row, recording in sorted(zip(rows, recordings, strict=True), key=_transcript_badness)
        ],
        [(row["id"], row["errors"]) for row in rows if isinstance(row["errors"], str)],
        rows,
        tiles=[
            figure
            for language, table in list(words.items())[:MAX_TILES]
            for figure in share_tiles(f"{table['unit']} errors, {language}", table, "rate")
        ],
    )


# ------------------------------------------------------------------------------------------------ private


def _conditions_of(values: Mapping[str, Any]) -> dict[str, str]:
    """The conditions of a record: its other columns, or a sample's metadata."""
    source = values.get("metadata") or {} if "messages" in values else values
    if not isinstance(source, dict):
        return {}
    return {
        key: str(value)
        for key, value in source.items()
        if key not in _RECORDING_KEYS
        and isinstance(value, str | int | float)
        and not is_missing(value, is_name=True)
    }


class _RecordingBuilder:
    """The recording with `language`, if it names none."""

    def __init__(self, language: str | None, **values: Any) -> None:
        self._language, self._values = language, values

    def __call__(self, default: str) -> TranscribedRecording:
        return TranscribedRecording(language=self._language or default, **self._values)


def _recording_of_row(values: Mapping[str, Any], where: str, folder: Path) -> _RecordingBuilder:
    path, text = values.get("audio"), values.get("text")
    if is_missing(path) or (is_missing(text) and text != ""):
        raise ConfigError("no path, or no text", where, "a record has the keys path and text")
    try:
        start_s = float(values.get("start_s") or 0.0)
        end_s = float(values["end_s"]) if values.get("end_s") else None
    except (TypeError, ValueError):
        raise ConfigError("start_s or end_s is no number", where, "give seconds") from None
    language = None if is_missing(values.get("language"), is_name=True) else str(values["language"])
    id = str(path if is_missing(values.get("id"), is_name=True) else values["id"])
    about = _conditions_of(values)
    return _RecordingBuilder(
        language,
        id=id,
        path=folder / str(path),
        text=str(text),
        start_s=start_s,
        end_s=end_s,
        about=about,
        text_recognizers=read_text_recognizers(values),
    )


def _recording_of_sample(values: Mapping[str, Any], where: str, folder: Path) -> _RecordingBuilder:
    import json

    from audiollm.data.records.sample import parse_sample

    try:
        sample: Sample = parse_sample(json.dumps(values).encode(), where)
    except BadSample as error:
        raise ConfigError(error.reason, where, "mend or remove it") from None
    audio_parts, texts = sample.audio("user"), sample.texts("assistant")
    if not audio_parts or not texts:
        raise ConfigError(
            f"sample {sample.id}: no recording of the user's, or no text", where, "give samples of asr"
        )
    audio_part = audio_parts[0]
    path = as_spelled(folder / audio_part.path)
    about = _conditions_of(values) | ({"speaker": audio_part.speaker} if audio_part.speaker else {})
    language = sample.metadata.get("language")
    return _RecordingBuilder(
        str(language) if language else None,
        id=sample.id,
        path=path if path.exists() else Path(audio_part.path),
        text=texts[-1],
        start_s=audio_part.start_s,
        end_s=audio_part.end_s,
        about=about,
        text_recognizers=text_recognizers(sample),
    )


def _transcript_row(recording: TranscribedRecording, reply: Reply, form: TextForm) -> Row:
    about = {
        "id": recording.id,
        "text": recording.text,
        "language": recording.language,
        "about": recording.about,
    }
    if reply.problem:
        return {**about, "heard": None, "errors": reply.problem, "missing": True}
    loop = loop_reason(reply.text, _recording_duration_s(recording))
    if loop is not None:
        return {**about, "heard": reply.text, "errors": f"a loop: {loop}", "missing": True}
    compared = {"text_form": form.apply(recording.text), "heard_form": form.apply(reply.text)}
    return {
        **about,
        "heard": reply.text,
        **compared,
        "errors": transcript_errors(recording.text, reply.text, form),
    }


def _recording_duration_s(recording: TranscribedRecording) -> float:
    """Length of a recording's span; infinite where its file cannot be read: hypotheses may come without the sound."""
    if recording.end_s is not None:
        return recording.end_s - recording.start_s
    try:
        length_s = probe(recording.path).duration_s
    except AudioError:
        length_s = None
    return math.inf if length_s is None else length_s - recording.start_s


def _by_character(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors by characters of the same text forms, without spaces."""
    errors: list[Errors] = []
    for row in rows:
        if isinstance(row["errors"], dict):
            both = [" ".join(row[key].replace(" ", "")) for key in ("text_form", "heard_form")]
            errors.append(count_errors(*both))
    return error_table(errors)


def _group_errors(rows: Sequence[Row], key: str, form: TextForm) -> dict[str, Any]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["about"].get(key, "(unknown)"), []).append(row)
    return {name: error_summary(groups[name], form) for name in sorted(groups)}


def _transcript_badness(pair: tuple[Row, TranscribedRecording]) -> float:
    return -rate_of(pair[0])


def _transcript_example(row: Row, recording: TranscribedRecording) -> Example:
    wrong = row["errors"] if isinstance(row["errors"], str) else f"{rate_of(row):.0%} wrong"
    lines = [("said", recording.text), ("written", row["heard"] or "(nothing)"), ("errors", wrong)]
    lines += [(key, value) for key, value in recording.about.items()][:4]
    return Example(
        recording.id, lines, [Sound("recording", recording.path, recording.start_s, recording.end_s)]
    )
