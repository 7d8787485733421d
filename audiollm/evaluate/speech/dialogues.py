"""Dialogues: the list of them, and speech by a model.

A line of the list, JSON: `{"id": "d1", "turns": [{"speaker": "A", "text": "Hello."}, ...]}` with, where there is sound
already, an `audio` for each turn, or one for the whole and `start_s` and `end_s` for each turn; and `references`
(`{"A": {"audio": "a.wav", "text": "..."}}`) of the voices to speak with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from audiollm.audio import save
from audiollm.evaluate.judges.judging import digest, failures_of
from audiollm.evaluate.report.lists import need_unique, read_records
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.store import RowStore, key_of
from audiollm.evaluate.speech.clips import Advance
from audiollm.evaluate.subjects.protocols import DialogueSpeaker, Subject, TurnByTurn, VoicePrompt
from audiollm.files.atomic import safe_name


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScriptedTurn(_Record):
    """One speaker's turn, and its sound: a file of its own, or a span of the dialogue's."""

    speaker: str = Field(min_length=1)
    text: str = Field(min_length=1)
    audio: Path | None = None
    start_s: float | None = Field(default=None, ge=0)
    end_s: float | None = Field(default=None, gt=0)


class ReferenceRecording(_Record):
    """A recording of a speaker's voice and what it says."""

    audio: Path
    text: str | None = None


class Dialogue(_Record):
    """A line of the list; paths are relative to it."""

    id: str = Field(min_length=1)
    turns: tuple[ScriptedTurn, ...] = Field(min_length=1)
    audio: Path | None = None
    """Sound of the whole dialogue. Without spans its words are scored as one text, and voices are not scored."""
    references: dict[str, ReferenceRecording] = Field(default_factory=dict)

    @property
    def text(self) -> str:
        return " ".join(turn.text for turn in self.turns)


def read_dialogues(path: Path) -> list[Dialogue]:
    """
    Raises:
        ConfigError: what is wrong with the list, and where.
    """
    dialogues = read_records(path, Dialogue)
    need_unique([dialogue.id for dialogue in dialogues], path)
    return [_resolve_dialogue_paths(dialogue, path.parent) for dialogue in dialogues]


def speak_dialogues(
    subject: Subject, dialogues: Sequence[Dialogue], folder: Path, seed: int, advance: Advance
) -> tuple[list[Dialogue], dict[str, str]]:
    """The dialogues as the model spoke them, one file per turn, and the problems of failed ones by id.

    A model that cannot `converse` says turn by turn (`subjects.TurnByTurn`).
    """
    store = RowStore(folder / "spoken.jsonl")
    dialogue_speaker: DialogueSpeaker = (
        subject.model
        if isinstance(subject.model, DialogueSpeaker)
        else TurnByTurn(subject.model, folder / "first_turns")
    )
    spoken_dialogues: list[Dialogue] = []
    problems: dict[str, str] = {}
    for dialogue in dialogues:
        try:
            spoken_dialogues.append(_speak_dialogue(subject, dialogue_speaker, dialogue, folder, seed, store))
        except MetricError as error:
            spoken_dialogues.append(
                dialogue.model_copy(update={"audio": None, "turns": _remove_audio(dialogue.turns)})
            )
            problems[dialogue.id] = error.reason
        advance(dialogue.id)
    return spoken_dialogues, problems


# ------------------------------------------------------------------------------------------------ private


def _resolve_dialogue_paths(dialogue: Dialogue, folder: Path) -> Dialogue:
    turns = tuple(
        turn.model_copy(update={"audio": folder / turn.audio}) if turn.audio else turn
        for turn in dialogue.turns
    )
    references = {
        name: voice.model_copy(update={"audio": folder / voice.audio})
        for name, voice in dialogue.references.items()
    }
    audio = folder / dialogue.audio if dialogue.audio else None
    return dialogue.model_copy(update={"turns": turns, "references": references, "audio": audio})


def _remove_audio(turns: Sequence[ScriptedTurn]) -> tuple[ScriptedTurn, ...]:
    return tuple(ScriptedTurn(speaker=turn.speaker, text=turn.text) for turn in turns)


def _speak_dialogue(
    subject: Subject, model: DialogueSpeaker, dialogue: Dialogue, folder: Path, seed: int, store: RowStore
) -> Dialogue:
    turns = [(turn.speaker, turn.text) for turn in dialogue.turns]
    reference_keys = {name: [digest(voice.audio), voice.text] for name, voice in dialogue.references.items()}
    depends_on = [subject.fingerprint, turns, reference_keys, seed]
    stem = f"{safe_name(dialogue.id)}-{key_of(*depends_on)[:8]}"
    paths = [folder / f"{stem}-{place:02d}.wav" for place in range(len(turns))]
    if store.get(*depends_on) is None or not all(path.exists() for path in paths):
        voices = {name: VoicePrompt(voice.audio, voice.text) for name, voice in dialogue.references.items()}
        with failures_of("the model"):  # whatever it raises is its result for this dialogue
            waves = model.converse(turns, voices, seed)
            if len(waves) != len(turns):
                raise ValueError(f"{len(waves)} sounds for {len(turns)} turns")
            for path, wave in zip(paths, waves, strict=True):
                save(path, wave.samples_CN, wave.sample_rate)
        store.add({"id": dialogue.id}, *depends_on)
    said_turns = tuple(
        ScriptedTurn(speaker=turn.speaker, text=turn.text, audio=path)
        for turn, path in zip(dialogue.turns, paths, strict=True)
    )
    return dialogue.model_copy(update={"turns": said_turns, "audio": None})
