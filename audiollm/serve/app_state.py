"""What the routes of a server share: its models, voices, limits, and the pool that reads recordings."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from audiollm.audio import AudioError, Waveform, load_bytes
from audiollm.errors import suggestion
from audiollm.generation.service.service import GenerationService
from audiollm.serve.errors import ApiError
from audiollm.serve.gate import ServerState
from audiollm.serve.interpreters import ServedInterpreter
from audiollm.serve.limits import ServeLimits
from audiollm.serve.model import ServerModel
from audiollm.serve.voices import DEFAULT_VOICE, Reference, VoiceStore
from audiollm.serve.word_placer import WordPlacer

_DATA_URI = re.compile(r"data:(?:audio|video|application)/[\w.+-]+(?:;[\w.+=-]+)*;base64,", re.ASCII)
_NO_URL = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


@dataclass
class AppState:
    """The parts of a server."""

    service: GenerationService
    models: Mapping[str, ServerModel]
    voices: VoiceStore
    limits: ServeLimits
    server: ServerState
    word_placer: WordPlacer = field(default_factory=WordPlacer)
    interpreters: Mapping[str, ServedInterpreter] = field(default_factory=dict)
    """Models of streams, by their names, which none of `models` has."""
    open_streams: int = 0
    _readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "recordings"))

    def model(self, name: str) -> ServerModel:
        """Return a model by its name.

        Raises:
            ApiError: there is none of this name.
        """
        model = self.models.get(name)
        if name in self.interpreters:
            message = f"{name} translates while it hears: connect to /v1/realtime/translations?model={name}"
            raise ApiError(400, message, "model", "model_interprets")
        if model is None:
            message = f"there is no such model: {suggestion(name, self.models)}"
            raise ApiError(404, message, "model", "model_not_found")
        return model

    def interpreter(self, name: str) -> ServedInterpreter:
        """Return a model of streams by its name.

        Raises:
            ApiError: there is none of this name.
        """
        interpreter = self.interpreters.get(name)
        if interpreter is None:
            message = f"no model of streams has this name: {suggestion(name, self.interpreters)}"
            if name in self.models:
                message = f"{name} was not trained on streams: name a model of recipes/interpret"
            elif not self.interpreters:
                message = "this server has no model of streams: serve one of recipes/interpret"
            raise ApiError(404, message, "model", "model_not_found")
        return interpreter

    def begin_stream(self) -> None:
        """Count a streamed answer; `end_stream` ends it.

        Raises:
            ApiError: there are as many as the server takes.
        """
        if self.open_streams >= self.limits.streams:
            message = f"{self.limits.streams} streams are open already: ask again later"
            raise ApiError(429, message, None, "too_many_streams", 1)
        self.open_streams += 1

    def end_stream(self) -> None:
        """Count the end of a streamed answer."""
        self.open_streams -= 1

    def check_text(self, text: str, name: str) -> None:
        """Raises: ApiError: a text that is empty or too long. `name` is the field."""
        if not text.strip():
            raise ApiError(400, f"{name} is empty: give the words", name)
        if len(text) > self.limits.text_characters:
            message = (
                f"{name} has {len(text)} characters, at most {self.limits.text_characters} are taken: cut it"
            )
            raise ApiError(400, message, name, "text_too_long")

    async def read_recording(self, content: bytes, name: str) -> Waveform:
        """Decode a recording to mono, at its own rate.

        Raises:
            ApiError: it is no sound, or too long. `name` is the field.
        """
        limit_s = self.limits.recording_s

        def read() -> Waveform:
            return load_bytes(content, "the recording", end_s=limit_s + 1, mono=True)

        try:
            waveform = await asyncio.get_running_loop().run_in_executor(self._readers, read)
        except AudioError as error:
            message = f"the recording cannot be read ({error.reason}): give a sound file"
            raise ApiError(400, message, name, "unreadable_recording") from error
        if waveform.duration_s > limit_s:
            raise ApiError(
                400, f"the recording is longer than {limit_s:g} s: cut it", name, "recording_too_long"
            )
        return waveform

    async def read_base64(self, text: str, name: str) -> Waveform:
        """Decode a recording from a data URI or base64. Raises: ApiError: as `read_recording`, or it is neither."""
        match = _DATA_URI.match(text)
        encoded = text[match.end() :] if match else text
        if match is None and _NO_URL.match(text):
            message = "no address is fetched: send the recording itself, as base64 or as a data URI in base64"
            raise ApiError(400, message, name, "no_url")
        try:
            content = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ApiError(400, "is not base64: encode the recording's file", name) from error
        return await self.read_recording(content, name)

    def voice(
        self, model: ServerModel, name: str | None, field_name: str = "voice"
    ) -> str | Reference | None:
        """Return the speaker or the reference of a name; None: the model chooses.

        Raises:
            ApiError: the model knows no such speaker, and no such voice was added.
        """
        if name is None or name == DEFAULT_VOICE:
            return None
        if name in model.speakers:
            return name
        added = self.voices.get(name)
        if added is not None:
            return added.reference
        names = [DEFAULT_VOICE, *model.speakers, *(voice.name for voice in self.voices.voices())]
        raise ApiError(
            400, f"there is no such voice: {suggestion(name, names)}", field_name, "voice_not_found"
        )
