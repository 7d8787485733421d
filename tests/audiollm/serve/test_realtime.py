"""`/v1/realtime` with the published client: turns by hand and by voice activity, interruption, transcripts."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from audiollm.audio.sound_encoder import pcm16
from audiollm.serve.limits import ServeLimits
from audiollm.serve.realtime_bodies import TurnDetection, update_settings
from audiollm.serve.realtime_session import REALTIME_PATH
from audiollm.serve.turn_detection import TurnDetector
from tests.audiollm.generation.toy_speech import RATE, tone
from tests.audiollm.serve.running import PATIENCE_S, RunningServer, running_server, wait_for
from tests.audiollm.serve.test_clients import echo_model

LIMITS = ServeLimits(max_length=4096, answer_tokens=40, recording_s=20)
BY_HAND = {"input": {"turn_detection": None, "format": {"rate": RATE}}, "output": {"format": {"rate": RATE}}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(LIMITS, more_models=[echo_model]) as running:
        yield running


def sound(seconds: float, level: float = 0.3) -> torch.Tensor:
    return level * tone(round(seconds * RATE))[None]


def encoded(samples_1N: torch.Tensor) -> str:
    return base64.b64encode(pcm16(samples_1N)).decode()


class Talk:
    """A connection of the published client."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def send(self, kind: str, **fields: Any) -> None:
        self.connection.send({"type": kind, **fields})

    def until(self, *kinds: str) -> list[Any]:
        """Events up to one of these types, or an error."""
        events: list[Any] = []
        while not events or events[-1].type not in (*kinds, "error"):
            events.append(self.connection.recv())
        return events

    def refusal(self, kind: str, **fields: Any) -> Any:
        self.send(kind, **fields)
        return self.until("error")[-1].error

    def configure(self, **session: Any) -> Any:
        self.send("session.update", session={"type": "realtime", **session})
        return self.until("session.updated")[-1]

    def say(self, words: str) -> None:
        content = [{"type": "input_text", "text": words}]
        self.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        self.until("conversation.item.done")


@contextmanager
def talking(server: RunningServer, model: str) -> Iterator[Talk]:
    client = server.client(websocket_base_url=f"ws://127.0.0.1:{server.port}/v1")
    with client.realtime.connect(
        model=model, websocket_connection_options={"open_timeout": PATIENCE_S}
    ) as connection:
        talk = Talk(connection)
        assert talk.until("session.created")[-1].type == "session.created"
        yield talk


@contextmanager
def slow_steps(server: RunningServer) -> Iterator[None]:
    """An answer takes seconds, so that what is sent after its first sound comes before its end."""
    engine = server.engine()
    step = engine.step

    def slow_step() -> Any:
        time.sleep(0.1)
        return step()

    with patch.object(engine, "step", slow_step):
        yield


def kinds(events: list[Any]) -> list[str]:
    return [event.type for event in events]


def test_a_turn_by_hand_is_heard_and_answered_in_words(server: RunningServer) -> None:
    with talking(server, "echo") as talk:
        updated = talk.configure(instructions="be short", audio=BY_HAND)
        assert updated.session.output_modalities == ["text"] and updated.session.instructions == "be short"
        talk.send("input_audio_buffer.append", audio=encoded(sound(0.25)))
        talk.send("input_audio_buffer.append", audio=encoded(sound(0.25)))
        talk.send("input_audio_buffer.commit")
        assert kinds(talk.until("conversation.item.done")) == [
            "input_audio_buffer.committed", "conversation.item.added", "conversation.item.done",
        ]  # fmt: skip
        talk.send("response.create")
        events = talk.until("response.done")
        assert kinds(events) == [
            "response.created", "response.output_item.added", "response.content_part.added",
            "response.output_text.delta", "response.output_text.done", "response.content_part.done",
            "response.output_item.done", "conversation.item.added", "conversation.item.done", "response.done",
        ]  # fmt: skip
        response = events[-1].response
        assert response.status == "completed"
        assert response.output[0].content[0].text == "be short 0.5 s"
        talk.say("and now?")  # the conversation goes on
        talk.send("response.create", response={"instructions": "shorter"})
        answer = talk.until("response.done")[-1].response.output[0].content[0].text
        assert answer == "shorter 0.5 s be short 0.5 s and now?"
    wait_for(server.is_idle)


def test_speech_is_that_of_a_chat(server: RunningServer) -> None:
    chunks = server.client().chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "hello"}], modalities=["audio"],
        audio={"format": "pcm"}, max_tokens=40, stream=True,
    )  # fmt: skip
    deltas = [getattr(chunk.choices[0].delta, "audio", None) for chunk in chunks]
    expected = b"".join(base64.b64decode(delta.data) for delta in deltas if delta)
    with talking(server, "toy") as talk:
        talk.configure(audio=BY_HAND)
        talk.say("hello")
        talk.send("response.create")
        events = talk.until("response.done")
        pieces = [
            base64.b64decode(event.delta) for event in events if event.type == "response.output_audio.delta"
        ]
        assert len(pieces) > 1 and b"".join(pieces) == expected
        spoken = events[-1].response.output[0]
        talk.send("conversation.item.truncate", item_id=spoken.id, content_index=0, audio_end_ms=100)
        assert talk.until("conversation.item.truncated")[-1].audio_end_ms == 100
        talk.send("conversation.item.delete", item_id=spoken.id)
        assert talk.until("conversation.item.deleted")[-1].item_id == spoken.id
        assert talk.refusal("conversation.item.delete", item_id=spoken.id).param == "item_id"


def test_turns_by_voice_activity_are_answered_and_written_down(server: RunningServer) -> None:
    detection = {"type": "server_vad", "silence_duration_ms": 400, "prefix_padding_ms": 100}
    audio_in = {"turn_detection": detection, "format": {"rate": RATE}, "transcription": {"model": "echo"}}
    with talking(server, "echo") as talk:
        talk.configure(audio={"input": audio_in})
        turn_1N = torch.cat([sound(0.5, 0.001), sound(1.0), sound(1.0, 0.001)], dim=1)
        for start in range(0, turn_1N.shape[1], RATE // 10):
            talk.send("input_audio_buffer.append", audio=encoded(turn_1N[:, start : start + RATE // 10]))
        events = talk.until("response.done")
        while not any("transcription.completed" in kind for kind in kinds(events)):
            events += talk.until("conversation.item.input_audio_transcription.completed")
    by_kind = {event.type: event for event in events}
    assert by_kind["input_audio_buffer.speech_started"].audio_start_ms == pytest.approx(400, abs=40)
    assert by_kind["input_audio_buffer.speech_stopped"].audio_end_ms == pytest.approx(1900, abs=40)
    assert by_kind["response.done"].response.output[0].content[0].text == "1.5 s"
    transcript = by_kind["conversation.item.input_audio_transcription.completed"]
    assert transcript.transcript == "1.5 s Transcribe the speech."
    assert transcript.item_id == by_kind["input_audio_buffer.committed"].item_id


def test_speech_interrupts_an_answer_and_so_does_the_client(server: RunningServer) -> None:
    with slow_steps(server), talking(server, "toy") as talk:
        talk.configure(audio={"input": {"format": {"rate": RATE}}, "output": BY_HAND["output"]})
        talk.say("hello")
        talk.send("response.create")
        talk.until("response.output_audio.delta")
        talk.send("input_audio_buffer.append", audio=encoded(torch.cat([sound(0.1, 0.0), sound(0.3)], dim=1)))
        events = talk.until("response.done")
        assert "input_audio_buffer.speech_started" in kinds(events)
        response = events[-1].response
        assert (response.status, response.status_details.reason) == ("cancelled", "turn_detected")
        assert response.output[0].status == "incomplete"
        talk.configure(audio={"input": {"turn_detection": None}})
        talk.send("input_audio_buffer.clear")
        talk.until("input_audio_buffer.cleared")
        talk.send("response.create")
        talk.until("response.output_audio.delta")
        talk.send("response.cancel")
        details = talk.until("response.done")[-1].response.status_details
        assert details.reason == "client_cancelled"
        assert talk.refusal("response.cancel").code == "response_cancel_not_active"
    wait_for(server.is_idle)


def test_a_mistake_names_its_field_and_the_session_goes_on(server: RunningServer) -> None:
    def message(**content: Any) -> dict[str, Any]:
        return {"type": "message", "role": "user", "content": [content]}

    mistakes: list[tuple[str, dict[str, Any], str | None, str]] = [
        ("session.begin", {}, "type", "no such event"),
        ("session.update", {}, "session", "give the fields"),
        ("session.update", {"session": {"model": "toy"}}, "session.model", "connect anew"),
        ("session.update", {"session": {"loudness": 1}}, "session.loudness", "does not know it"),
        ("session.update", {"session": {"output_modalities": ["audio"]}}, "model", "does not speak"),
        ("session.update", {"session": {"audio": {"output": {"voice": "alloy"}}}},
         "session.audio.output.voice", "leave it out"),
        ("session.update", {"session": {"max_output_tokens": 1000}}, "max_output_tokens", "at most 40"),
        ("input_audio_buffer.append", {"audio": "no base64!"}, "audio", "not base64"),
        ("input_audio_buffer.append", {"audio": "QUFB"}, "audio", "16 bits"),
        ("input_audio_buffer.append", {"audio": encoded(sound(21.0))}, "audio", "longer than 20 s"),
        ("input_audio_buffer.commit", {}, None, "append more"),
        ("conversation.item.create", {"item": message(type="input_image")}, "item.content.0", "input_text"),
        ("conversation.item.create", {"item": message(type="input_text", text="a"), "previous_item_id": "x"},
         "previous_item_id", "no such item"),
        ("conversation.item.truncate", {"item_id": "x", "audio_end_ms": 3}, "item_id", "no such item"),
        ("response.create", {}, "conversation", "said nothing"),
        ("response.create", {"response": {"tools": []}}, "response.tools", "does not know it"),
    ]  # fmt: skip
    with talking(server, "echo") as talk:
        talk.configure(audio=BY_HAND)
        for number, (kind, fields, field, words) in enumerate(mistakes):
            error = talk.refusal(kind, event_id=f"e{number}", **fields)
            assert (error.param, error.event_id) == (field, f"e{number}"), kind
            assert words in error.message, error.message
        talk.say("still there?")
        talk.send("response.create")
        assert talk.until("response.done")[-1].response.output[0].content[0].text == "still there?"
        talk.say("fail")
        talk.send("response.create")
        failed = talk.until("response.done")[-1].response
        assert failed.status == "failed" and "the answer failed" in failed.status_details.error.message
    with pytest.raises(AssertionError), talking(server, "bell"):
        pass
    counts = server.state.server.requests
    assert counts[REALTIME_PATH, 400] >= len(mistakes) and counts[REALTIME_PATH, 404] == 1


def test_who_leaves_ends_his_answer(server: RunningServer) -> None:
    with talking(server, "toy") as talk:
        talk.configure(audio=BY_HAND)
        talk.say("hello")
        talk.send("response.create")
        talk.until("response.output_audio.delta")
    wait_for(server.is_idle)


def test_edges_of_turns_do_not_depend_on_how_the_sound_is_cut() -> None:
    torch.manual_seed(0)
    room = 0.003 * torch.randn(1, 6 * RATE)
    for start_s, end_s in ((1.0, 2.0), (2.3, 2.9), (4.0, 5.0)):  # a pause of 0.3 s ends no turn
        room[:, round(start_s * RATE) : round(end_s * RATE)] += sound(end_s - start_s)
    room[:, 3 * RATE + 3000 : 3 * RATE + 3100] += 0.5  # a click is no speech
    settings = TurnDetection(prefix_padding_ms=0)
    whole = TurnDetector(settings, RATE).push(room)
    detector = TurnDetector(settings, RATE)
    assert [edge for piece in room.split(777, dim=1) for edge in detector.push(piece)] == whole
    assert [edge.kind for edge in whole] == ["started", "stopped"] * 2
    assert [edge.at_s for edge in whole] == pytest.approx([1.0, 3.4, 4.0, 5.5], abs=0.05)


def test_settings_are_merged_where_they_are_objects() -> None:
    before = {"a": {"b": 1, "c": [1, 2]}, "d": None}
    merged = update_settings(before, {"a": {"c": [3]}, "d": {"e": 1}})
    assert merged == {"a": {"b": 1, "c": [3]}, "d": {"e": 1}} and json.dumps(before).count("2") == 1
