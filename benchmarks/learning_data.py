"""Real audio for `learn_tokenizer.py`: what is trained on, what is held out, and labels for the probes.

Held out: six LibriSpeech speakers, sound events of ESC-10's fold 1, takes 0 to 4 of the spoken digits, three
recordings of music and nature, two of LJ Speech. No label is ever shown to a tokenizer or to its teacher.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from audiollm.audio import AudioError, probe
from tokenizer.clips import Clip

Kind = Literal["speech", "sound", "music"]
SPEECH_FOLDERS = ("read_speech_en", "speech_zh", "speech_other_lang", "dialogue", "long_audio")
HELD_OUT_FILES = ("LJ001-0023", "LJ001-0024", "sorohanro", "Karissa_Hobbs", "vocadito_10", "humpback")
HEARD_SPEAKER = "2033"
"""A LibriSpeech test speaker of whom an utterance is among the training files: not used."""
PIECE_S = 60.0
"""Longest training clip: longer files are cut to pieces."""


@dataclass(frozen=True)
class Recording:
    """A clip, its kind, and a label for the probe where it has one."""

    clip: Clip
    kind: Kind
    held_out: bool
    task: str = ""
    """`digit`, `sound` or `speaker`."""
    label: str = ""


def read_recordings(data: Path) -> list[Recording]:
    """Everything under the data folder that can be decoded, in a fixed order."""
    recordings = [
        *_read_digit_recordings(data),
        *_read_sound_recordings(data),
        *_speakers(data),
        *_read_other_recordings(data),
    ]
    return [piece for recording in recordings for piece in _pieces(recording)]


def _read_digit_recordings(data: Path) -> Iterator[Recording]:
    for path in sorted((data / "fsdd").rglob("*_*_*.wav")):
        digit, _, take = path.stem.split("_")
        yield Recording(Clip(path, 0.0, None), "speech", int(take) < 5, "digit", digit)


def _read_sound_recordings(data: Path) -> Iterator[Recording]:
    for path in sorted((data / "esc10").rglob("*.ogg")):
        yield Recording(Clip(path, 0.0, None), "sound", path.name.startswith("1-"), "sound", path.parent.name)


def _speakers(data: Path) -> Iterator[Recording]:
    for path in sorted((data / "librispeech_speakers").rglob("*.flac")):
        held_out = "test-other" in str(path)
        if held_out and path.parent.name == HEARD_SPEAKER:
            continue
        label = path.parent.name if held_out else ""
        yield Recording(Clip(path, 0.0, None), "speech", held_out, "speaker" if held_out else "", label)


def _read_other_recordings(data: Path) -> Iterator[Recording]:
    files = [(path, "speech") for path in sorted((data / "ljspeech_32").rglob("*.flac"))]
    for folder in SPEECH_FOLDERS:
        paths = (p for p in (data / folder).rglob("*") if p.suffix in (".flac", ".wav", ".mp3", ".ogg"))
        files += [(path, "speech") for path in sorted(paths)]
    files += [
        (path, "music")
        for path in sorted((data / "music_nature").rglob("*"))
        if path.suffix in (".ogg", ".wav")
    ]
    for path, kind in files:
        held_out = any(name in path.name for name in HELD_OUT_FILES)
        yield Recording(Clip(path, 0.0, None), kind, held_out)  # type: ignore[arg-type]


def _pieces(recording: Recording) -> Iterator[Recording]:
    path = recording.clip.path
    try:
        duration_s = probe(path).duration_s
    except AudioError:
        return
    if duration_s is None:
        return
    start_s = 0.0
    while duration_s - start_s > 0.1:
        end_s = min(duration_s, start_s + PIECE_S)
        yield Recording(
            Clip(path, start_s, end_s), recording.kind, recording.held_out, recording.task, recording.label
        )
        start_s = end_s
