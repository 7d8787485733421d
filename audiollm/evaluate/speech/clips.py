"""The clips that a suite judges: spoken by a model on request, or found in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from audiollm.audio import save
from audiollm.evaluate.judges.judging import SpeechClip, digest, failures_of
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.store import RowStore, key_of
from audiollm.evaluate.subjects.protocols import Speaker, Subject
from audiollm.failures import note_success
from audiollm.files.atomic import safe_name

SOUND_ENDINGS = (".wav", ".flac", ".ogg", ".mp3", ".opus", ".m4a")
Advance = Callable[[str], None]


@dataclass(frozen=True)
class SpeechRequest:
    """A text for a model to speak, with an optional reference voice."""

    id: str
    text: str
    reference: Path | None = None
    reference_text: str | None = None

    def clip(self, path: Path | None = None, problem: str = "") -> SpeechClip:
        """The clip that answers this request, or why there is none."""
        return SpeechClip(self.id, self.text, path, problem)


def speak_all(
    subject: Subject, requests: Sequence[SpeechRequest], folder: Path, seed: int, advance: Advance
) -> dict[str, SpeechClip]:
    """Have the model speak every request, into `folder`; clips of an earlier run are kept.

    A request that the model fails on becomes a clip with a `problem`. The next run tries it again.
    """
    store = RowStore(folder / "spoken.jsonl")
    clips: dict[str, SpeechClip] = {}
    for request in requests:
        clips[request.id] = _speak_request(subject, request, folder, seed, store)
        advance(request.id)
    return clips


def clips_in_folder(folder: Path, requests: Iterable[SpeechRequest]) -> dict[str, SpeechClip]:
    """The files of a folder that are named by the requests' ids, with any of the usual endings."""
    return {request.id: _find_recorded_clip(folder, request) for request in requests}


def _speak_request(
    subject: Subject, request: SpeechRequest, folder: Path, seed: int, store: RowStore
) -> SpeechClip:
    speaker: Speaker = subject.model
    try:
        reference = digest(request.reference) if request.reference else None
    except MetricError as error:
        return request.clip(problem=f"the reference {error.reason}")
    depends_on = [subject.fingerprint, request.text, reference, request.reference_text, seed]
    earlier_row = store.get(*depends_on)
    if earlier_row is not None and (folder / earlier_row["path"]).exists():
        note_success("the model")
        return request.clip(folder / earlier_row["path"])
    path = folder / f"{safe_name(request.id)}-{key_of(*depends_on)[:8]}.wav"
    try:
        with failures_of("the model"):  # whatever it raises is its result for this text
            wave = speaker.speak(request.text, request.reference, request.reference_text, seed)
            save(path, wave.samples_CN, wave.sample_rate)
    except MetricError as error:
        return request.clip(problem=error.reason)
    store.add({"id": request.id, "path": path.name, "text": request.text}, *depends_on)
    return request.clip(path)


def _find_recorded_clip(folder: Path, request: SpeechRequest) -> SpeechClip:
    for ending in ("", *SOUND_ENDINGS):
        path = folder / f"{request.id}{ending}"
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            return request.clip(path)
    return request.clip(problem="no clip")
