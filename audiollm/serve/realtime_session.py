"""A conversation by voice: turns by voice activity or by hand, answers that can be interrupted.

Shapes: N samples.
"""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import torch
from starlette.websockets import WebSocket
from torch import Tensor

from audiollm.audio import Waveform
from audiollm.audio.sound_encoder import StreamResampler, pcm16
from audiollm.generation.engine.request import AnswerKind
from audiollm.generation.service.jobs import Emit, MakePlan
from audiollm.generation.speaking.plans import Plan
from audiollm.models.audio_llms.inputs import Turn, TurnPart
from audiollm.serve.app_state import AppState
from audiollm.serve.calls import ServerCall
from audiollm.serve.errors import ApiError, as_api_error
from audiollm.serve.gate import check_open, log
from audiollm.serve.model import ChatPrompt, ServerModel
from audiollm.serve.plans import (
    ChatAnswer,
    chat_plan,
    join_segments,
    transcription_plan,
    transcription_prompt,
)
from audiollm.serve.realtime_bodies import (
    InputAudioPart,
    MessageItem,
    ResponseSettings,
    SessionSettings,
    update_settings,
)
from audiollm.serve.realtime_items import Item, Response, cut_sound, decode_pcm, new_item_id, validated
from audiollm.serve.socket_sessions import speech_pieces
from audiollm.serve.speech_session_route import read_json_message
from audiollm.serve.turn_detection import TurnDetector
from audiollm.serve.voices import DEFAULT_VOICE

REALTIME_PATH = "/v1/realtime"
SHORTEST_TURN_S = 0.1
ANSWER_S = 30.0
"""Longest spoken answer."""
MOST_ITEMS = 1000
"""Items of a conversation."""


class RealtimeSession:
    """A client's conversation with one model."""

    def __init__(self, state: AppState, socket: WebSocket) -> None:
        self._state, self._socket = state, socket
        self._settings = SessionSettings(model="(none)", output_modalities=["text"])
        self._model: ServerModel | None = None
        self._items: list[Item] = []
        self._response: Response | None = None
        self._answering: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._input: list[Tensor] = []
        self._input_begin_s = self._heard_s = 0.0
        """Seconds of the session at which the samples begin that are kept, and that have arrived."""
        self._detector: TurnDetector | None = None
        self._turn_id: str | None = None
        """Item of the turn that the user is speaking."""

    # ------------------------------------------------------------------------------------ a session's life

    async def begin(self, model: str) -> None:
        """Begin with the model that the address names. Raises: ApiError: there is none of this name."""
        if not model and len(self._state.models) == 1:
            model = next(iter(self._state.models))
        if not model:
            raise ApiError(400, "the address names no model: ask for /v1/realtime?model=NAME", "model")
        served_model = self._state.model(model)
        spoken = ["audio"] if served_model.speaks else ["text"]
        self._configure(SessionSettings.model_validate({"model": model, "output_modalities": spoken}))
        await self._send({"type": "session.created", "session": self._session_row()})

    async def read(self) -> dict[str, Any] | None:
        """Read a message; None: the client has left."""
        message = await self._socket.receive()
        return None if message["type"] == "websocket.disconnect" else dict(message)

    async def answer(self, message: dict[str, Any]) -> None:
        """Follow a client's event; a mistake is answered with `error`, and the next event is taken."""
        event: dict[str, Any] = {}
        try:
            event = read_json_message(message)
            await self._follow(event)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            await self.refuse(error, event.get("event_id"))

    async def refuse(self, error: Exception, event_id: object = None) -> None:
        """Send an error."""
        api_error = as_api_error(error, {"question": "conversation", "codec": "model"})
        if api_error.status == 500:
            log.error("a realtime session failed", exc_info=error)
        self._state.server.requests[REALTIME_PATH, api_error.status] += 1
        row = json.loads(api_error.body())["error"]
        await self._send({"type": "error", "error": {**row, "event_id": event_id}})

    async def end(self) -> None:
        """End what is under way."""
        tasks = [*self._tasks, *([self._answering] if self._answering is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, event: dict[str, Any]) -> None:
        followers = {
            "session.update": self._update,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit_by_hand,
            "input_audio_buffer.clear": self._clear,
            "conversation.item.create": self._create_item,
            "conversation.item.delete": self._delete_item,
            "conversation.item.truncate": self._truncate_item,
            "response.create": self._create_response,
            "response.cancel": self._cancel_response,
        }
        kind = event.get("type")
        if kind not in followers:
            message = f"no such event: {kind!r}: this server follows {', '.join(followers)}"
            raise ApiError(400, message, "type", "unknown_event")
        await followers[str(kind)](event)

    # ------------------------------------------------------------------------------------------- settings

    async def _update(self, event: dict[str, Any]) -> None:
        changes = event.get("session")
        if not isinstance(changes, dict):
            raise ApiError(400, "there is no session: give the fields that change", "session")
        if changes.get("model", self._settings.model) != self._settings.model:
            raise ApiError(400, "the model of a session stays: connect anew for another", "session.model")
        merged = update_settings(self._settings.model_dump(), changes)
        self._configure(validated(SessionSettings, merged, "session"))
        await self._send({"type": "session.updated", "session": self._session_row()})

    def _configure(self, settings: SessionSettings) -> None:
        model = self._state.model(settings.model)
        if "audio" in settings.output_modalities:
            model.speaking()
        voice = settings.audio.output.voice
        if voice not in (None, DEFAULT_VOICE):
            message = "conversations are answered in the voice that the model chooses: leave it out"
            raise ApiError(400, message, "session.audio.output.voice", "not_supported")
        if settings.audio.input.transcription is not None:
            self._state.model(settings.audio.input.transcription.model).check_hears()
        if settings.audio.input.format != self._settings.audio.input.format and self._input:
            raise ApiError(
                400, "sound in another form has arrived: clear it first", "session.audio.input.format"
            )
        self._check_answer(settings)
        before, self._settings, self._model = self._settings, settings, model
        detection = settings.audio.input.turn_detection
        if detection is None:
            self._detector = self._turn_id = None
        elif self._detector is None or before.audio.input != settings.audio.input:
            self._detector, self._turn_id = TurnDetector(detection, settings.audio.input.format.rate), None

    def _check_answer(self, settings: SessionSettings) -> None:
        longest = self._state.limits.answer_tokens
        if settings.max_output_tokens != "inf" and settings.max_output_tokens > longest:
            raise ApiError(
                400, f"an answer has at most {longest} tokens here: give less", "max_output_tokens"
            )

    def _session_row(self) -> dict[str, Any]:
        return {"object": "realtime.session", **self._settings.model_dump()}

    # ---------------------------------------------------------------------------------------------- sound

    async def _append(self, event: dict[str, Any]) -> None:
        self._listening().check_hears()
        samples_1N = decode_pcm(event.get("audio"), "audio")
        limit_s = self._state.limits.recording_s
        if self._kept_s + samples_1N.shape[1] / self._rate > limit_s:
            message = f"the turn is longer than {limit_s:g} s: commit or clear it"
            raise ApiError(400, message, "audio", "recording_too_long")
        self._input.append(samples_1N)
        self._heard_s += samples_1N.shape[1] / self._rate
        if self._detector is None:
            return
        for edge in self._detector.push(samples_1N):
            if edge.kind == "started":
                await self._begin_turn(edge.at_s)
            else:
                await self._end_turn(edge.at_s)
        if self._turn_id is None:
            self._forget_before(self._heard_s - 1.0 - self._padding_s)

    async def _begin_turn(self, at_s: float) -> None:
        detection = self._settings.audio.input.turn_detection
        self._forget_before(at_s)
        self._turn_id = new_item_id()
        started = {"audio_start_ms": round(self._input_begin_s * 1000), "item_id": self._turn_id}
        await self._send({"type": "input_audio_buffer.speech_started", **started})
        if detection is not None and detection.interrupt_response:
            await self._interrupt("turn_detected")

    async def _end_turn(self, at_s: float) -> None:
        detection = self._settings.audio.input.turn_detection
        stopped = {"audio_end_ms": round(at_s * 1000), "item_id": self._turn_id}
        await self._send({"type": "input_audio_buffer.speech_stopped", **stopped})
        await self._commit(at_s)
        if detection is not None and detection.create_response:
            await self._respond(self._settings)

    async def _commit_by_hand(self, event: dict[str, Any]) -> None:
        if self._kept_s < SHORTEST_TURN_S:
            message = f"less than {SHORTEST_TURN_S:g} s of sound have arrived: append more first"
            raise ApiError(400, message, None, "input_audio_buffer_commit_empty")
        await self._commit(self._heard_s)

    async def _commit(self, end_s: float) -> None:
        samples_1N = torch.cat(self._input, dim=1)
        count = round((end_s - self._input_begin_s) * self._rate)
        item_id, self._turn_id = self._turn_id or new_item_id(), None
        waveform = Waveform(samples_1N[:, :count], self._rate)
        self._input = [samples_1N[:, count:]]
        self._input_begin_s = end_s
        before = self._items[-1].id if self._items else None
        item = Item(item_id, "user", [waveform], [{"type": "input_audio", "transcript": None}])
        await self._send(
            {"type": "input_audio_buffer.committed", "item_id": item_id, "previous_item_id": before}
        )
        await self._add_item(item)
        if self._settings.audio.input.transcription is not None:
            self._begin_task(self._write_down(item, waveform))

    async def _clear(self, event: dict[str, Any]) -> None:
        self._input, self._input_begin_s, self._turn_id = [], self._heard_s, None
        await self._send({"type": "input_audio_buffer.cleared"})

    async def _write_down(self, item: Item, waveform: Waveform) -> None:
        """Tell the client the words of a turn; the model itself hears the sound."""
        transcription = self._settings.audio.input.transcription
        assert transcription is not None
        model = self._state.model(transcription.model)
        prompt = transcription_prompt(transcription.language, self._state.limits.answer_tokens)

        def make(emit: Emit) -> Plan[Any]:
            return transcription_plan(model, waveform, prompt, emit, in_order=False)

        place = {"item_id": item.id, "content_index": 0}
        kind = "conversation.item.input_audio_transcription"
        call = None
        try:
            call = ServerCall(self._state.service, model, make)
            text = join_segments(await call.finish())
        except Exception as error:
            row = json.loads(as_api_error(error).body())["error"]
            await self._send({"type": f"{kind}.failed", **place, "error": row})
            return
        finally:
            if call is not None:
                call.cancel()
        item.content[0]["transcript"] = text
        usage = {"type": "duration", "seconds": round(waveform.duration_s, 3)}
        await self._send({"type": f"{kind}.completed", **place, "transcript": text, "usage": usage})

    # ---------------------------------------------------------------------------------------------- items

    async def _create_item(self, event: dict[str, Any]) -> None:
        message = validated(MessageItem, event.get("item"), "item")
        after = event.get("previous_item_id")
        parts: list[TurnPart] = []
        content: list[dict[str, Any]] = []
        for part in message.content:
            if isinstance(part, InputAudioPart):
                self._listening().check_hears()
                parts.append(Waveform(decode_pcm(part.audio, "item.content.audio"), self._rate))
                content.append({"type": "input_audio", "transcript": part.transcript})
            else:
                parts.append(part.text)
                kind = "output_text" if message.role == "assistant" else "input_text"
                content.append({"type": kind, "text": part.text})
        item = Item(message.id or new_item_id(), message.role, parts, content)
        if any(other.id == item.id for other in self._items):
            raise ApiError(400, "there is such an item: give another id, or none", "item.id")
        await self._add_item(item, after)

    async def _add_item(self, item: Item, after: object = None) -> None:
        if len(self._items) >= MOST_ITEMS:
            raise ApiError(400, f"a conversation has at most {MOST_ITEMS} items: connect anew", "item")
        place = len(self._items)
        if after == "root":
            place = 0
        elif after is not None:
            place = self._items.index(self._item(after, "previous_item_id")) + 1
        before = self._items[place - 1].id if place else None
        self._items.insert(place, item)
        for kind in ("added", "done"):
            await self._send(
                {"type": f"conversation.item.{kind}", "previous_item_id": before, "item": item.row()}
            )

    async def _delete_item(self, event: dict[str, Any]) -> None:
        item = self._item(event.get("item_id"), "item_id")
        self._items.remove(item)
        await self._send({"type": "conversation.item.deleted", "item_id": item.id})

    async def _truncate_item(self, event: dict[str, Any]) -> None:
        """Keep of an answer what the user has heard; of its words as large a share."""
        item, end_ms = self._item(event.get("item_id"), "item_id"), event.get("audio_end_ms")
        if item.role != "assistant" or type(end_ms) is not int or end_ms < 0:
            raise ApiError(400, "give an answer of the assistant, and audio_end_ms of it", "audio_end_ms")
        sounds = [part for part in item.parts if isinstance(part, Waveform)]
        length_ms = round(1000 * sum(sound.duration_s for sound in sounds)) or item.content[0].get(
            "audio_ms", 0
        )
        share = min(1.0, end_ms / length_ms) if length_ms else 1.0
        words = str(item.content[0].get("transcript") or "").split()
        text = " ".join(words[: round(share * len(words))])
        item.parts = [text] if text else [cut_sound(sound, end_ms) for sound in sounds]
        item.content[0]["transcript"] = text
        row = {"item_id": item.id, "content_index": 0, "audio_end_ms": end_ms}
        await self._send({"type": "conversation.item.truncated", **row})

    def _item(self, id: object, name: str) -> Item:
        for item in self._items:
            if item.id == id:
                return item
        raise ApiError(400, "there is no such item in the conversation", name)

    # -------------------------------------------------------------------------------------------- answers

    async def _create_response(self, event: dict[str, Any]) -> None:
        changes = validated(ResponseSettings, event.get("response") or {}, "response")
        changed = {key: value for key, value in changes.model_dump().items() if value is not None}
        settings = self._settings.model_copy(update=changed)
        if "audio" in settings.output_modalities:
            self._listening().speaking()
        self._check_answer(settings)
        await self._respond(settings)

    async def _respond(self, settings: SessionSettings) -> None:
        check_open(self._state.server)
        if self._response is not None:
            message = "an answer is being given: cancel it, or wait for response.done"
            raise ApiError(400, message, None, "conversation_already_has_active_response")
        if not any(item.role == "user" for item in self._items):
            raise ApiError(400, "the user has said nothing yet: add an item first", "conversation")
        self._response = Response(settings)
        self._answering = asyncio.create_task(self._give_answer(self._response))

    async def _cancel_response(self, event: dict[str, Any]) -> None:
        if not await self._interrupt("client_cancelled"):
            raise ApiError(400, "no answer is being given", None, "response_cancel_not_active")

    async def _interrupt(self, reason: str) -> bool:
        """End the answer that is being given; returns whether there was one."""
        response, task = self._response, self._answering
        if response is None or task is None:
            return False
        response.cancel_reason = reason
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True

    async def _give_answer(self, response: Response) -> None:
        status, details = "completed", dict[str, Any]()
        try:
            await self._send(
                {"type": "response.created", "response": self._response_row(response, "in_progress")}
            )
            answer = await self._send_answer(response)
            if not answer.stopped:
                status, details = "incomplete", {"reason": "max_output_tokens"}
        except asyncio.CancelledError:
            if not response.cancel_reason:
                raise
            status, details = "cancelled", {"reason": response.cancel_reason}
        except (ConnectionError, TimeoutError):
            return
        except Exception as error:
            api_error = as_api_error(error)
            if api_error.status == 500:
                log.error("an answer of a realtime session failed", exc_info=error)
            row = json.loads(api_error.body())["error"]
            status, details = "failed", {"error": {key: row[key] for key in ("message", "type", "code")}}
        await self._finish_answer(response, status, details)

    async def _send_answer(self, response: Response) -> ChatAnswer:
        model = self._listening()
        await self._send({"type": "response.output_item.added", "response_id": response.id, "output_index": 0,
                          "item": response.item.row()})  # fmt: skip
        empty = {"type": "audio", "transcript": ""} if response.is_spoken else {"type": "text", "text": ""}
        await self._send({"type": "response.content_part.added", **response.place, "part": empty})
        resampler = self._output_resampler(model) if response.is_spoken else None
        results: list[ChatAnswer] = []
        pieces = speech_pieces(self._state, model, self._answer_plan(model, response, results))
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece.item, str):
                    await self._send_words(response, piece.item)
                else:
                    response.samples.append(piece.item)
                    await self._send_sound(response, resampler.push(piece.item) if resampler else piece.item)
        if resampler is not None and response.samples:
            await self._send_sound(response, resampler.finish())
        return results[0]

    def _output_resampler(self, model: ServerModel) -> StreamResampler | None:
        codec_rate, rate = model.speaking().codec.sample_rate, self._settings.audio.output.format.rate
        return None if codec_rate == rate else StreamResampler(codec_rate, rate)

    def _answer_plan(self, model: ServerModel, response: Response, results: list[ChatAnswer]) -> MakePlan:
        settings, limits = response.settings, self._state.limits
        turns: list[Turn] = [("system", [settings.instructions])] if settings.instructions else []
        turns += [(item.role, list(item.parts)) for item in self._items if item.parts]
        modalities = set(settings.output_modalities)
        kind: AnswerKind = "text" if modalities == {"text"} else "audio" if modalities == {"audio"} else "any"
        longest = limits.answer_tokens if settings.max_output_tokens == "inf" else settings.max_output_tokens
        frames = 1
        if kind != "text":
            frames = max(1, round(min(ANSWER_S, limits.speech_s) * model.speaking().codec.frame_rate))
        prompt = ChatPrompt(turns, kind, settings.seed, settings.temperature, None, longest, frames)

        def make(emit: Emit) -> Plan[ChatAnswer]:
            answer = yield from chat_plan(model, prompt, emit, streamed=True)
            results.append(answer)
            return answer

        return make

    async def _send_words(self, response: Response, words: str) -> None:
        response.text += words
        kind = "output_audio_transcript" if response.is_spoken else "output_text"
        await self._send({"type": f"response.{kind}.delta", **response.place, "delta": words})

    async def _send_sound(self, response: Response, samples_1N: Tensor) -> None:
        if samples_1N.shape[1]:
            content = base64.b64encode(pcm16(samples_1N)).decode()
            await self._send({"type": "response.output_audio.delta", **response.place, "delta": content})

    async def _finish_answer(self, response: Response, status: str, details: dict[str, Any]) -> None:
        """Keep what was said, and tell the end; the answer of a failure is kept as far as it came, too."""
        response.text = response.text.strip()
        item, place = response.item, response.place
        item.status = "completed" if status == "completed" else "incomplete"
        item.content = [response.part()]
        item.parts = [response.text] if response.text else []
        if response.samples:
            sound = Waveform(
                torch.cat(response.samples, dim=1).cpu(), self._listening().speaking().codec.sample_rate
            )
            item.parts = item.parts or [sound]
            item.content[0]["audio_ms"] = round(1000 * sound.duration_s)
        if response.is_spoken:
            await self._send({"type": "response.output_audio.done", **place})
            await self._send(
                {"type": "response.output_audio_transcript.done", **place, "transcript": response.text}
            )
            part = {"type": "audio", "transcript": response.text}
        else:
            await self._send({"type": "response.output_text.done", **place, "text": response.text})
            part = {"type": "text", "text": response.text}
        await self._send({"type": "response.content_part.done", **place, "part": part})
        done = {"response_id": response.id, "output_index": 0, "item": item.row()}
        await self._send({"type": "response.output_item.done", **done})
        if item.parts:
            await self._add_item(item)
        self._state.server.requests[REALTIME_PATH, 500 if status == "failed" else 200] += 1
        self._response = None
        row = self._response_row(response, status) | {"output": [item.row()]}
        row["status_details"] = {"type": status, **details}
        await self._send({"type": "response.done", "response": row})

    def _response_row(self, response: Response, status: str) -> dict[str, Any]:
        return {
            "id": response.id, "object": "realtime.response", "status": status, "status_details": None, "output": [],
            "output_modalities": response.settings.output_modalities, "usage": None,
        }  # fmt: skip

    # ---------------------------------------------------------------------------------------------- parts

    @property
    def _rate(self) -> int:
        return self._settings.audio.input.format.rate

    @property
    def _kept_s(self) -> float:
        return sum(piece.shape[1] for piece in self._input) / self._rate

    @property
    def _padding_s(self) -> float:
        detection = self._settings.audio.input.turn_detection
        return 0.0 if detection is None else detection.prefix_padding_ms / 1000

    def _forget_before(self, at_s: float) -> None:
        """Drop sound before a moment: it belongs to no turn."""
        count = round((at_s - self._input_begin_s) * self._rate)
        if count > 0 and self._input:
            self._input = [torch.cat(self._input, dim=1)[:, count:]]
            self._input_begin_s = at_s

    def _listening(self) -> ServerModel:
        assert self._model is not None
        return self._model

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, event: dict[str, Any]) -> None:
        sending = self._socket.send_json({"event_id": f"event_{uuid.uuid4().hex}", **event})
        await asyncio.wait_for(sending, self._state.limits.stall_s)
