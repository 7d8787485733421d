"""Voices by name: recordings that somebody agreed to lend, in memory or in a folder."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from audiollm.audio import AudioError, Waveform, encode_bytes, load_bytes
from audiollm.errors import ConfigError
from audiollm.files.atomic import write_json
from audiollm.files.json_files import read_json_file
from audiollm.serve.errors import ApiError

VOICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Names of added voices: none of them leaves a folder."""
DEFAULT_VOICE = "default"
"""Name of the voice that the model chooses."""


@dataclass(frozen=True)
class Reference:
    """A recording to speak like."""

    digest: str
    """Of the recording and its words: equal ones are encoded once."""
    waveform: Waveform
    text: str | None
    language: str | None

    @classmethod
    def of(cls, waveform: Waveform, text: str | None, language: str | None) -> Reference:
        """Digest a recording and its words."""
        digest = hashlib.sha256(waveform.samples_CN.contiguous().numpy().tobytes())
        digest.update(repr((waveform.sample_rate, text, language)).encode())
        return cls(digest.hexdigest(), waveform, text, language)


@dataclass(frozen=True)
class AddedVoice:
    """A voice that was added."""

    name: str
    reference: Reference
    consent: str
    """What the speaker agreed to, in the words of whoever added the voice."""
    created: int
    """Unix time."""

    def row(self) -> dict[str, object]:
        """Describe the voice, without its recording."""
        return {
            "id": self.name, "name": self.name, "object": "audio.voice", "created_at": self.created,
            "text": self.reference.text, "language": self.reference.language, "consent": self.consent,
        }  # fmt: skip


class VoiceStore:
    """The added voices; its methods may be called from any thread.

    Args:
        folder: where they stay when the server ends; None: in memory alone.
        max_voices: most voices.

    Raises:
        ConfigError: a file in the folder is damaged.
    """

    def __init__(self, folder: Path | None = None, max_voices: int = 1000) -> None:
        self._folder, self._max_voices, self._guard = folder, max_voices, threading.Lock()
        self._voices: dict[str, AddedVoice] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path in sorted(folder.glob("*.json")):
                voice = _read_voice_file(path)
                self._voices[voice.name] = voice

    def voices(self) -> list[AddedVoice]:
        """Return the voices, by name."""
        with self._guard:
            return [self._voices[name] for name in sorted(self._voices)]

    def get(self, name: str) -> AddedVoice | None:
        """Return the voice of this name; None: there is none."""
        with self._guard:
            return self._voices.get(name)

    def add(self, name: str, reference: Reference, consent: str) -> AddedVoice:
        """Add a voice.

        Raises:
            ApiError: the name cannot be had, there is no consent, or there are as many voices as are taken.
        """
        if not VOICE_NAME.fullmatch(name) or name == DEFAULT_VOICE:
            message = (
                "a name is 1 to 64 letters, digits, - and _ of ASCII, and not 'default': give such a name"
            )
            raise ApiError(400, message, "name")
        if not consent.strip():
            message = "say in `consent` that and how the speaker has agreed to be imitated"
            raise ApiError(400, message, "consent", "consent_missing")
        voice = AddedVoice(name, reference, consent.strip(), int(time.time()))
        with self._guard:
            if name in self._voices:
                raise ApiError(
                    409, f"{name}: there is such a voice: remove it first, or give another name", "name"
                )
            if len(self._voices) >= self._max_voices:
                raise ApiError(400, f"there are {self._max_voices} voices already: remove one first", "name")
            self._voices[name] = voice
            if self._folder is not None:
                _write_voice_files(self._folder, voice)
        return voice

    def remove(self, name: str) -> None:
        """Remove a voice with its files.

        Raises:
            ApiError: there is none of this name.
        """
        with self._guard:
            if self._voices.pop(name, None) is None:
                raise ApiError(404, "there is no such added voice: GET /v1/audio/voices lists them", "name")
            if self._folder is not None:
                for suffix in (".json", ".wav"):
                    (self._folder / f"{name}{suffix}").unlink(missing_ok=True)


def _write_voice_files(folder: Path, voice: AddedVoice) -> None:
    waveform = voice.reference.waveform
    (folder / f"{voice.name}.wav").write_bytes(encode_bytes(waveform.samples_CN, waveform.sample_rate))
    write_json(folder / f"{voice.name}.json", voice.row())


def _read_voice_file(path: Path) -> AddedVoice:
    row, remedy = read_json_file(path, dict), "mend it, or remove it with its recording"
    try:
        name, consent, created = row["name"], row["consent"], row["created_at"]
        if name != path.stem or not VOICE_NAME.fullmatch(name):
            raise ConfigError(f"name: {name!r} is not that of the file", str(path), remedy)
        waveform = load_bytes(path.with_suffix(".wav").read_bytes(), f"{name}.wav", mono=True)
    except (KeyError, TypeError, OSError, AudioError) as error:
        raise ConfigError(f"a voice that cannot be read: {error}", str(path), remedy) from error
    return AddedVoice(name, Reference.of(waveform, row.get("text"), row.get("language")), consent, created)
