"""The protocol Wyoming, by which Home Assistant and its satellites ask: texts to speech, and recordings to words.

The protocol has no keys, so the socket is one of this machine alone. A connection has one request at a time; who closes
it ends the request.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.error import Error
from wyoming.event import Event, Eventable, async_write_event
from wyoming.info import (
    AsrModel,
    AsrProgram,
    Attribution,
    Describe,
    Info,
    TtsProgram,
    TtsVoice,
    TtsVoiceSpeaker,
)
from wyoming.ping import Ping, Pong
from wyoming.tts import (
    Synthesize,
    SynthesizeChunk,
    SynthesizeStart,
    SynthesizeStop,
    SynthesizeStopped,
    SynthesizeVoice,
)

from audiollm import __version__
from audiollm.audio import Waveform
from audiollm.audio.sound_encoder import pcm16
from audiollm.generation.service.jobs import Emit
from audiollm.generation.speaking.plans import Plan
from audiollm.serve.app_state import AppState
from audiollm.serve.bodies import SpeechSettings
from audiollm.serve.calls import ServerCall
from audiollm.serve.errors import ApiError, as_api_error
from audiollm.serve.gate import check_open, log
from audiollm.serve.limits import MB
from audiollm.serve.model import ServerModel
from audiollm.serve.plans import join_segments, transcription_plan, transcription_prompt
from audiollm.serve.socket_sessions import SentenceBuffer, answer_in_order, speech_pieces
from audiollm.serve.speech_settings import streamed_speech_plan
from audiollm.serve.wyoming_events import LONGEST_LINE, BadEvent, read_event

SAMPLE_BYTES = (1, 2, 4)
LOGGED = ("synthesize", "synthesize-stop", "audio-stop")
"""Events that end a request: each is a line of the log."""


@dataclass
class Incoming:
    """A recording that arrives."""

    rate: int
    width: int
    channels: int
    content: bytearray = field(default_factory=bytearray)

    @property
    def duration_s(self) -> float:
        return len(self.content) / (self.rate * self.width * self.channels)

    def waveform(self) -> Waveform:
        """Mono samples in [-1, 1]."""
        whole = len(self.content) // (self.width * self.channels) * self.width * self.channels
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[self.width]
        levels_N = torch.frombuffer(self.content[:whole], dtype=kind).float() if whole else torch.zeros(0)
        if self.width == 1:
            levels_N = levels_N - 2**7
        samples_NC = (levels_N / 2 ** (8 * self.width - 1)).reshape(-1, self.channels)
        return Waveform(samples_NC.mean(dim=1)[None], self.rate)


class WyomingServer:
    """Answers clients of a socket from the models of a server.

    Args:
        languages: of the models, by their codes: clients choose by them.
    """

    def __init__(self, state: AppState, languages: Sequence[str] = ("en",)) -> None:
        self._state, self._languages = state, list(languages)
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Begin to answer."""
        self._server = await asyncio.start_server(self._converse, sock=listener, limit=LONGEST_LINE)

    def close(self) -> None:
        """Take no more clients."""
        if self._server is not None:
            self._server.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await Conversation(self._state, self._languages, writer).run(reader)
        except (ConnectionError, TimeoutError):
            pass  # the client has left, or reads nothing
        except Exception as error:
            log.error("a Wyoming client's request failed", exc_info=error)
        finally:
            writer.close()
            with suppress(Exception):
                await writer.wait_closed()


class Conversation:
    """The events of one client, in their order."""

    def __init__(self, state: AppState, languages: Sequence[str], writer: asyncio.StreamWriter) -> None:
        self._state, self._languages, self._writer = state, list(languages), writer
        self._transcribe = Transcribe()
        self._incoming: Incoming | None = None
        self._streamed: StreamedText | None = None

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Answer until the client leaves; what is under way then ends."""
        max_payload = self._state.server.max_body_bytes
        try:
            await answer_in_order(lambda: read_event(reader, max_payload), self._answer_or_refuse)
        except BadEvent as error:
            await self._send(Error(str(error), "bad_event"))

    async def _answer_or_refuse(self, event: Event) -> None:
        begun, status = time.perf_counter(), 200
        try:
            check_open(self._state.server)
            await self._answer(event)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            self._streamed = self._incoming = None
            api_error = _as_wyoming_error(error)
            status = api_error.status
            if status == 500:
                log.error("a Wyoming client's request failed", exc_info=error)
            await self._send(Error(api_error.message, api_error.code or "bad_request"))
        if event.type in LOGGED or status != 200:
            path = f"wyoming:{event.type}" if event.type in LOGGED else "wyoming:(other)"
            self._state.server.requests[path, status] += 1
            facts = {"path": path, "status": status, "seconds": round(time.perf_counter() - begun, 4)}
            log.info(json.dumps(facts))

    async def _answer(self, event: Event) -> None:
        """Answer an event; what servers do not know is dropped, as the protocol asks."""
        kind = event.type
        if Describe.is_type(kind):
            await self._send(describe_server(self._state, self._languages))
        elif Ping.is_type(kind):
            await self._send(Pong(Ping.from_event(event).text))
        elif Transcribe.is_type(kind):
            self._transcribe = Transcribe.from_event(event)
        elif AudioStart.is_type(kind):
            self._incoming = _begin_recording(AudioStart.from_event(event))
        elif AudioChunk.is_type(kind):
            self._hear(AudioChunk.from_event(event))
        elif AudioStop.is_type(kind):
            await self._write_down()
        elif (
            Synthesize.is_type(kind) and self._streamed is None
        ):  # beside a streamed text it repeats the whole
            request = Synthesize.from_event(event)
            spoken = StreamedText(self._state, request.voice, self._send)
            await spoken.say(request.text)
            await spoken.finish()
        elif SynthesizeStart.is_type(kind):
            self._streamed = StreamedText(self._state, SynthesizeStart.from_event(event).voice, self._send)
        elif SynthesizeChunk.is_type(kind) and self._streamed is not None:
            await self._streamed.add(SynthesizeChunk.from_event(event).text)
        elif SynthesizeStop.is_type(kind) and self._streamed is not None:
            streamed, self._streamed = self._streamed, None
            await streamed.say_rest()
            await streamed.finish()
            await self._send(SynthesizeStopped())

    def _hear(self, chunk: AudioChunk) -> None:
        if self._incoming is None:
            self._incoming = _begin_recording(AudioStart(chunk.rate, chunk.width, chunk.channels))
        self._incoming.content += chunk.audio
        limit_s, max_bytes = self._state.limits.recording_s, self._state.server.max_body_bytes
        if len(self._incoming.content) > max_bytes:
            message = f"a recording has at most {max_bytes / MB:g} MB: send less"
            raise ApiError(413, message, None, "too_large")
        if self._incoming.duration_s > limit_s:
            raise ApiError(
                400, f"the recording is longer than {limit_s:g} s: cut it", None, "recording_too_long"
            )

    async def _write_down(self) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is None or not incoming.content:
            raise ApiError(400, "there is no recording: send audio-start and audio-chunk before audio-stop")
        model = _choose_model(self._state, self._transcribe.name, "hears")
        language = self._transcribe.language
        prompt = transcription_prompt(language, self._state.limits.answer_tokens)
        recording = incoming.waveform()

        def make(emit: Emit) -> Plan[Any]:
            return transcription_plan(model, recording, prompt, emit, in_order=False)

        call = ServerCall(self._state.service, model, make)
        try:
            segments = await asyncio.wait_for(call.finish(), self._state.limits.request_s)
        finally:
            call.cancel()
        await self._send(Transcript(join_segments(segments), language=language))

    async def _send(self, event: Eventable) -> None:
        await asyncio.wait_for(async_write_event(event.event(), self._writer), self._state.limits.stall_s)


class StreamedText:
    """A text that is said in one voice, sentence by sentence as it arrives.

    Args:
        send: sends an event to the client, and waits while he does not read.

    Raises:
        ApiError: there is no such model or voice.
    """

    def __init__(
        self, state: AppState, voice: SynthesizeVoice | None, send: Callable[[Eventable], Any]
    ) -> None:
        self._state, self._send = state, send
        self._model = _choose_model(state, voice.name if voice else None, "speaks")
        self._settings = SpeechSettings(
            model=self._model.name,
            voice=voice.speaker if voice else None,
            language=voice.language if voice else None,
        )
        self._rate = self._model.speaking().codec.sample_rate
        self._voice = state.voice(self._model, self._settings.voice_name)
        self._buffer, self._is_begun = SentenceBuffer(state.limits.text_characters), False

    async def add(self, text: str) -> None:
        """Take a piece of the text; sentences that are complete are said."""
        for sentence in self._buffer.add(text):
            await self.say(sentence)

    async def say_rest(self) -> None:
        """Say what is left when the text has ended."""
        for sentence in self._buffer.rest() or ([] if self._is_begun else [""]):
            await self.say(sentence)

    async def say(self, text: str) -> None:
        """Say sentences, and send their sound while it is made."""
        self._state.check_text(text, "the text")
        make_plan = streamed_speech_plan(self._model, self._settings, self._voice, text)
        async with aclosing(speech_pieces(self._state, self._model, make_plan)) as pieces:
            async for piece in pieces:
                await self._send_sound(piece.item)

    async def finish(self) -> None:
        """Tell that the sound has ended."""
        await self._send(AudioStop())

    async def _send_sound(self, samples_1N: torch.Tensor) -> None:
        if not self._is_begun:
            self._is_begun = True
            await self._send(AudioStart(self._rate, 2, 1))
        if samples_1N.shape[1]:
            await self._send(AudioChunk(self._rate, 2, 1, pcm16(samples_1N)))


def describe_server(state: AppState, languages: Sequence[str]) -> Info:
    """The models as programs of speech and of recognition; the voices of a model are its speakers."""
    about: dict[str, Any] = {
        "attribution": Attribution("audiollm", ""),
        "installed": True,
        "version": __version__,
    }
    speaking = [model for model in state.models.values() if model.speaks]
    hearing = [model for model in state.models.values() if model.hears]
    voices = [
        TtsVoice(
            name=model.name, description=model.name, languages=list(languages),
            speakers=[TtsVoiceSpeaker(name) for name in _speaker_names(state, model)], **about,
        )
        for model in speaking
    ]  # fmt: skip
    models = [
        AsrModel(name=model.name, description=model.name, languages=list(languages), **about)
        for model in hearing
    ]
    program = {"name": "audiollm", "description": "models that audiollm trained", **about}
    return Info(
        tts=[TtsProgram(voices=voices, supports_synthesize_streaming=True, **program)] if voices else [],
        asr=[AsrProgram(models=models, **program)] if models else [],
    )


def _speaker_names(state: AppState, model: ServerModel) -> list[str]:
    return [*model.speakers, *(voice.name for voice in state.voices.voices())]


def _choose_model(state: AppState, name: str | None, ability: str) -> ServerModel:
    """The model of a name, or the first that has the ability."""
    if name is not None:
        return state.model(name)
    able = [model for model in state.models.values() if getattr(model, ability)]
    if not able:
        raise ApiError(400, f"no model of this server {ability}", None, f"no_model_{ability}")
    return able[0]


def _begin_recording(start: AudioStart) -> Incoming:
    is_whole = all(type(value) is int for value in (start.rate, start.width, start.channels))
    if (
        not is_whole
        or start.width not in SAMPLE_BYTES
        or not 1 <= start.channels <= 8
        or not 1000 <= start.rate <= 384_000
    ):
        message = (
            f"{start.rate} Hz, {start.width} bytes, {start.channels} channels: send PCM of 1, 2 or 4 bytes"
        )
        raise ApiError(400, message, None, "unreadable_recording")
    return Incoming(start.rate, start.width, start.channels)


def _as_wyoming_error(error: Exception) -> ApiError:
    """A client's event that lacks a field is the client's error."""
    if isinstance(error, KeyError | TypeError | AttributeError):
        return ApiError(
            400, f"the event lacks a field, or has another type there: {error}", None, "bad_event"
        )
    return as_api_error(error)
