"""The websocket of speech: text in as it is written, sound out by sentences, each as the model says it alone."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from audiollm.audio import load_bytes
from audiollm.audio.sound_encoder import encode_sound, pcm16
from audiollm.serve.limits import ServeLimits
from audiollm.serve.speech_session_route import SESSION_PATH
from tests.audiollm.generation.toy_speech import RATE
from tests.audiollm.serve.running import PATIENCE_S, RunningServer, running_server, streamed_sound, wait_for

KEY = "a key of this test"
LIMITS = ServeLimits(max_length=4096, text_characters=200, streams=2)
CONFIG = {"type": "session.config", "model": "toy", "voice": "anna", "response_format": "pcm"}
SENTENCES = ("One two three.", "Hello hello.")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(LIMITS, key=KEY) as running:
        yield running


def open_session(server: RunningServer, host: str = "127.0.0.1", **headers: str) -> ClientConnection:
    return connect(
        f"ws://{host}:{server.port}{SESSION_PATH}",
        sock=socket.create_connection(("127.0.0.1", server.port)),
        additional_headers={"Authorization": f"Bearer {KEY}", **headers},
        open_timeout=PATIENCE_S,
    )


def send(session: ClientConnection, **message: Any) -> None:
    session.send(json.dumps(message))


def receive(session: ClientConnection, until: str) -> list[Any]:
    """Answers up to one of a type, or an error: objects and bytes."""
    answers: list[Any] = []
    while not answers or not (isinstance(answers[-1], dict) and answers[-1]["type"] in (until, "error")):
        answer = session.recv(PATIENCE_S)
        answers.append(json.loads(answer) if isinstance(answer, str) else answer)
    return answers


@pytest.mark.parametrize("is_streamed", [False, True])
def test_sentences_are_said_as_they_are_complete(server: RunningServer, is_streamed: bool) -> None:
    with open_session(server) as session:
        send(session, **CONFIG, stream_audio=is_streamed)
        for piece in ("One tw", "o three. ", "Hel"):
            send(session, type="input.text", text=piece)
        first = receive(session, "audio.done")
        send(session, type="input.text", text="lo hello.")
        send(session, type="input.done")
        second = receive(session, "audio.done")
        (done,) = receive(session, "session.done")
        assert done == {"type": "session.done", "total_sentences": 2}
        for index, (sentence, answers) in enumerate(zip(SENTENCES, (first, second), strict=True)):
            start, *sound, end = answers
            assert (start["sentence_index"], start["sentence_text"], start["sample_rate"]) == (
                index,
                sentence,
                RATE,
            )
            content = b"".join(sound)
            assert content == pcm16(streamed_sound(server.generator, sentence, speaker="anna"))
            assert end == {"type": "audio.done", "sentence_index": index, "total_bytes": len(content)}
            assert (len(sound) > 1) == is_streamed
        send(session, **CONFIG | {"response_format": "wav", "sample_rate": 16_000})  # another text may follow
        send(session, type="input.text", text="hello")
        send(session, type="input.done")
        start, content, *_ = receive(session, "session.done")
        assert start["sample_rate"] == load_bytes(content, "a.wav").sample_rate == 16_000
    wait_for(server.is_idle)


def test_a_mistake_names_its_field_and_the_session_goes_on(server: RunningServer) -> None:
    mistakes: list[tuple[Any, str | None, str]] = [
        ("no json", "body", "no JSON"),
        ("[]", "body", "no object"),
        (b"bytes", "body", "text frames"),
        ({"type": "session.start"}, "type", "no such message"),
        ({"type": "input.text", "text": "hello"}, "type", "session.config first"),
        (CONFIG | {"model": "bell"}, "model", "no such model"),
        (CONFIG | {"voice": "nobody"}, "voice", "no such voice"),
        (CONFIG | {"loudness": 3}, "loudness", "does not know it"),
        (CONFIG | {"speed": 2.0}, "speed", "leave it out"),
        (CONFIG | {"split_granularity": "clause"}, "split_granularity", "sentence"),
        (CONFIG | {"ref_text": "words"}, "ref_text", "ref_audio"),
        (CONFIG | {"ref_audio": "http://x/a.wav", "voice": None}, "ref_audio", "no address is fetched"),
    ]
    with open_session(server) as session:
        for message, field, words in mistakes:
            session.send(message if isinstance(message, str | bytes) else json.dumps(message))
            (answer,) = receive(session, "error")
            assert (answer["type"], answer["error"]["param"]) == ("error", field), message
            assert words in answer["error"]["message"]
        send(session, **CONFIG)
        for text, words in ((3, "give a string"), ("one " * 60, "more than 200")):
            send(session, type="input.text", text=text)
            (answer,) = receive(session, "error")
            assert answer["error"]["param"] == "text" and words in answer["error"]["message"]
        send(session, type="input.text", text="hello")
        send(session, type="input.done")
        _, content, *_ = receive(session, "session.done")
        assert content == pcm16(streamed_sound(server.generator, "hello", speaker="anna"))
        assert encode_sound(streamed_sound(server.generator, "hello", speaker="anna"), RATE, "pcm") == content


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Origin": "http://elsewhere.example"}, 403),
        ({"host": "elsewhere.example"}, 421),
    ],
)
def test_who_may_not_ask_gets_no_session(server: RunningServer, headers: dict[str, str], status: int) -> None:
    with pytest.raises(InvalidStatus) as refusal:
        open_session(server, **headers)
    assert refusal.value.response.status_code == status
    assert json.loads(refusal.value.response.body)["error"]["message"]


def test_who_leaves_ends_his_text_and_too_much_closes(server: RunningServer) -> None:
    with open_session(server) as session:
        send(session, **CONFIG, stream_audio=True)
        send(session, type="input.text", text="One two three. Hello hello hello. " * 4)
        assert receive(session, "audio.start")
    wait_for(server.is_idle)
    with open_session(server) as session, pytest.raises(ConnectionClosed):
        session.send("x" * (server.state.server.max_body_bytes + 1))
        session.recv(PATIENCE_S)
    wait_for(server.is_idle)


def test_streams_are_counted(server: RunningServer) -> None:
    server.state.open_streams += 2
    with open_session(server) as session:
        send(session, **CONFIG)
        send(session, type="input.text", text="hello")
        send(session, type="input.done")
        answers = receive(session, "session.done")
    server.state.open_streams -= 2
    assert answers[-1]["error"]["code"] == "too_many_streams"
