"""Recognizers behind an address, against a server that is made here."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from audiollm.endpoints import EndpointError
from audiollm.evaluate.subjects.chat import ChatError
from tests.pipelines.annotate.steps.tiny_recognizers import check, made, segment


class Server:
    """Answers with what is prepared, in turn, and keeps what it was sent."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, Any]] = []
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.requests.append((self.path, dict(self.headers), body))
                status, reply = server.replies.pop(0)
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", f"{server.url}/elsewhere")
                self.end_headers()
                self.wfile.write(reply if isinstance(reply, bytes) else json.dumps(reply).encode())

            def log_message(self, *arguments: Any) -> None:
                pass

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def fields(self, number: int = -1) -> dict[str, bytes]:
        """Fields of a multipart request, by default of the last, read by the standard library's parser of messages."""
        from email import message_from_bytes

        _, headers, body = self.requests[number]
        message = message_from_bytes(f"Content-Type: {headers['Content-Type']}\r\n\r\n".encode() + body)
        parts = message.get_payload()
        assert isinstance(parts, list)
        return {
            str(part.get_param("name", header="content-disposition")): part.get_payload(decode=True)  # type: ignore
            for part in parts
        }


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_an_endpoint_is_sent_the_sound_and_its_words_are_read(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    words = [{"word": "hi", "start": 0.1, "end": 0.3}, {"word": "you", "start": 0.4, "end": 9.0}]
    parts = [{"avg_logprob": -0.5, "start": 0, "end": 1}, {"avg_logprob": -1.5, "start": 1, "end": 2}]
    server.replies = [(200, {"text": " Hi  you. ", "language": "english", "words": words, "segments": parts})]
    step = made(
        kind="endpoint", url=server.url, model="whisper-1", key_variable="A_KEY", words=True, prompt="Um,"
    )
    said = segment(tmp_path, 1.0)
    value = step.process(said)
    check(value, 1.0)
    assert (value["text"], value["language"], value["confidence"]) == ("Hi you.", "en", 0.3679)  # exp(-1)
    assert [word["end_s"] for word in value["words"]] == [0.3, 1.0]
    path, headers, _ = server.requests[0]
    assert path == "/v1/audio/transcriptions" and headers["Authorization"] == "Bearer secret"
    fields = server.fields()
    samples_N, rate = soundfile.read(io.BytesIO(fields.pop("file")))
    assert rate == 16_000 and np.abs(samples_N - said.samples(16_000)).max() < 1e-3
    assert fields == {
        "model": b"whisper-1",
        "temperature": b"0",
        "response_format": b"verbose_json",
        "timestamp_granularities[]": b"word",
        "prompt": b"Um,",
    }


def test_an_endpoint_tells_its_signals_of_doubt(server: Server, tmp_path: Path) -> None:
    parts = [
        {"avg_logprob": -0.5, "no_speech_prob": 0.9, "start": 0, "end": 1},
        {"avg_logprob": -1.5, "no_speech_prob": 0.2, "start": 1, "end": 2},
    ]
    reply = {"text": "Ja.", "language": "german", "language_probability": 0.8, "segments": parts}
    server.replies = [(200, reply)]
    value = made(kind="endpoint", url=server.url, model="m").process(segment(tmp_path, 1.0))
    assert (value["language"], value["language_probability"]) == ("de", 0.8)
    assert (value["mean_log_probability"], value["no_speech_probability"]) == (-1.0, 0.2)
    assert server.fields()["response_format"] == b"verbose_json"


def test_a_server_without_verbose_replies_is_asked_for_plain_ones_from_then_on(
    server: Server, tmp_path: Path
) -> None:
    server.replies = [(400, b"no verbose_json"), (200, {"text": "hi"}), (200, {"text": "you"})]
    step = made(kind="endpoint", url=server.url, model="m")
    said = segment(tmp_path, 0.1)
    assert [step.process(said)["text"] for _ in range(2)] == ["hi", "you"]
    forms = [server.fields(number)["response_format"] for number in range(3)]
    assert forms == [b"verbose_json", b"json", b"json"]


def test_an_endpoint_that_is_busy_is_asked_again_and_one_that_refuses_is_not(
    server: Server, tmp_path: Path
) -> None:
    step = made(kind="endpoint", url=server.url, model="m", pause_s=0.0, attempts=3)
    server.replies = [(503, {}), (429, {}), (200, {"text": "hi"})]
    value = step.process(segment(tmp_path, 0.1))
    assert (value["text"], value["language"], value["words"], value["confidence"]) == ("hi", None, [], None)
    server.replies = [(400, b"no such model")]
    with pytest.raises(EndpointError, match="HTTP 400: no such model"):
        step.process(segment(tmp_path, 0.1))
    server.replies = [(500, {})] * 3
    with pytest.raises(EndpointError, match="HTTP 500"):
        step.process(segment(tmp_path, 0.1))
    assert len(server.requests) == 7


@pytest.mark.parametrize(
    "reply",
    [
        b"<html>",
        b"[]",
        b'{"text": 3}',
        b'{"text": "a", "words": [{"x": 1}]}',
        b'{"text": "a", "segments": 4}',
    ],
)
def test_an_answer_that_is_none_is_an_error_of_this_segment(
    server: Server, tmp_path: Path, reply: bytes
) -> None:
    server.replies = [(200, reply)]
    with pytest.raises(EndpointError):
        made(kind="endpoint", url=server.url, model="m").process(segment(tmp_path, 0.1))


def test_a_redirect_is_not_followed(server: Server, tmp_path: Path) -> None:
    server.replies = [(302, {})]
    with pytest.raises(EndpointError, match="302"):
        made(kind="endpoint", url=server.url, model="m", attempts=1).process(segment(tmp_path, 0.1))
    assert len(server.requests) == 1


def test_nobody_at_the_address_is_an_error(tmp_path: Path) -> None:
    step = made(kind="endpoint", url="http://127.0.0.1:9/v1", model="m", attempts=2, pause_s=0.0)
    with pytest.raises(EndpointError, match="no connection"):
        step.process(segment(tmp_path, 0.1))


def test_a_chat_endpoint_is_asked_about_the_sound(server: Server, tmp_path: Path) -> None:
    server.replies = [(200, {"choices": [{"message": {"content": '"Hi you."'}}]}), (400, b"no")]
    step = made(kind="chat_endpoint", url=server.url, model="omni", prompt="Write it down.", language="en")
    value = step.process(segment(tmp_path, 0.1))
    assert (value["text"], value["language"]) == ("Hi you.", "en")
    path, _, body = server.requests[0]
    sound, question = json.loads(body)["messages"][0]["content"]
    assert path == "/v1/chat/completions" and sound["type"] == "input_audio"
    assert question["text"] == "Write it down."
    with pytest.raises(ChatError, match="HTTP 400"):
        step.process(segment(tmp_path, 0.1))
