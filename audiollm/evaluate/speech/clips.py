"""Clips that a suite judges: made by a model, or found in a folder; and the words that are heard in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audiollm.audio import Waveform, save
from audiollm.evaluate.judges.hearing import Recognizer, VoiceJudge, digest, recognize
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.store import Row, RowStore, key_of
from audiollm.evaluate.report.text_errors import Errors, TextForm, count_errors, error_table
from audiollm.evaluate.subjects.protocols import Speaker, Subject
from audiollm.files.atomic import safe_name

SOUND_ENDINGS = (".wav", ".flac", ".ogg", ".mp3", ".opus", ".m4a")
Advance = Callable[[str], None]


@dataclass(frozen=True)
class SpeechClip:
    """Speech to be judged, or why there is none."""

    path: Path | None = None
    problem: str = ""


@dataclass(frozen=True)
class SpeechRequest:
    """What a model is asked to say."""

    id: str
    text: str
    reference: Path | None = None
    reference_text: str | None = None


@dataclass(frozen=True)
class Bench:
    """What a suite judges with."""

    form: TextForm
    recognizer: Recognizer | None = None
    voices: VoiceJudge | None = None
    """A judge of voices, or of emotions in the suite of that name."""
    fingerprint: str = ""
    """Of the judges: what rows depend on besides clips and texts."""
    store: RowStore = field(default_factory=lambda: RowStore(None))
    advance: Advance = lambda what: None


def speak_all(
    subject: Subject, requests: Sequence[SpeechRequest], folder: Path, seed: int, advance: Advance
) -> dict[str, SpeechClip]:
    """Every request said by the model, in `folder`; what an earlier run said is kept.

    A request that the model fails on is a clip with the problem. It is tried again in the next run.
    """
    store = RowStore(folder / "spoken.jsonl")
    clips: dict[str, SpeechClip] = {}
    for request in requests:
        clips[request.id] = _speak(subject, request, folder, seed, store)
        advance(request.id)
    return clips


def clips_by_id(folder: Path, ids: Iterable[str]) -> dict[str, SpeechClip]:
    """The files of these names in a folder, with any of the usual endings."""
    return {id: _find(folder, id) for id in ids}


def words_heard(clip: Path | Waveform, text: str, bench: Bench) -> dict[str, Any]:
    """`heard`, and the `errors` against a text as counts or as the reason why there are none."""
    from audiollm.evaluate.judges.hearing import load_clip

    try:
        wave = clip if isinstance(clip, Waveform) else load_clip(clip)
        heard = recognize(bench.recognizer, wave)
    except MetricError as error:
        return {"heard": None, "errors": error.reason}
    return {"heard": heard, "errors": transcript_errors(text, heard, bench.form)}


def transcript_errors(text: str, heard: str, form: TextForm) -> dict[str, int] | str:
    """The errors of what was heard as counts, or the reason why there are none."""
    try:
        return count_errors(form.apply(text), form.apply(heard)).plain()
    except MetricError as error:
        return error.reason


def error_summary(rows: Sequence[Row], form: TextForm) -> dict[str, Any]:
    """`error_table` of the rows that have errors, with the reasons of the others.

    `rate_with_missing` counts every text of a row without a clip as deleted: a model that fails on hard texts does
    not gain by it. It is None where no clip is missing.
    """
    known = [Errors(**row["errors"]) for row in rows if isinstance(row["errors"], dict)]
    reasons: dict[str, int] = {}
    for row in rows:
        if isinstance(row["errors"], str):
            reasons[row["errors"]] = reasons.get(row["errors"], 0) + 1
    lost = [len(form.apply(row["text"]).split()) for row in rows if row.get("missing")]
    table = error_table(known)
    units = table["units"] + sum(lost)
    wrong = sum(errors.total for errors in known) + sum(lost)
    return {
        **table,
        "unit": form.unit,
        "form": form.name,
        "rate_with_missing": wrong / units if lost and units else None,
        "missing": len(lost),
        "not_available": len(rows) - len(known),
        "reasons": reasons,
    }


def rate_of(row: Mapping[str, Any]) -> float:
    """Errors over units of a row, for an order; what has none comes first."""
    return Errors(**row["errors"]).rate if isinstance(row["errors"], dict) else float("inf")


def _speak(subject: Subject, request: SpeechRequest, folder: Path, seed: int, store: RowStore) -> SpeechClip:
    speaker: Speaker = subject.model
    try:
        reference = digest(request.reference) if request.reference else None
    except MetricError as error:
        return SpeechClip(problem=f"the reference {error.reason}")
    depends_on = [subject.fingerprint, request.text, reference, request.reference_text, seed]
    known = store.get(*depends_on)
    if known is not None and (folder / known["path"]).exists():
        return SpeechClip(folder / known["path"])
    path = folder / f"{safe_name(request.id)}-{key_of(*depends_on)[:8]}.wav"
    try:
        wave = speaker.speak(request.text, request.reference, request.reference_text, seed)
        save(path, wave.samples_CN, wave.sample_rate)
    except Exception as error:  # whatever a model raises is its result for this text
        said = " ".join(str(error).split())[:300]
        return SpeechClip(problem=f"the model failed: {type(error).__name__}: {said}")
    store.add({"id": request.id, "path": path.name, "text": request.text}, *depends_on)
    return SpeechClip(path)


def _find(folder: Path, id: str) -> SpeechClip:
    for ending in ("", *SOUND_ENDINGS):
        path = folder / f"{id}{ending}"
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            return SpeechClip(path)
    return SpeechClip(problem="no clip")
