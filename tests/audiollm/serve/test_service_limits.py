"""What a server does when there is too much: queues, slow readers, those who leave, its own end."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from audiollm.audio.sound_encoder import pcm16
from audiollm.generation.service.lane import MAX_AHEAD_S
from audiollm.serve.limits import ServeLimits
from tests.audiollm.serve.running import RunningServer, running_server, streamed_sound, voice_wav, wait_for

TEXT = "One two three. Hello hello hello. Two three one one. Hello one."
SPEECH = {"model": "toy", "input": TEXT, "response_format": "pcm", "seed": 1}
LIMITS = ServeLimits(
    queue=4, streams=3, slots=4, max_length=4096, stall_s=1.0, speech_s=60.0, text_characters=200
)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(LIMITS) as running:
        yield running


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def num_files() -> int:
    """Files and sockets that this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def send_request(server: RunningServer, body: dict[str, Any], receive_bytes: int = 0) -> socket.socket:
    """Send a request over a socket that reads nothing by itself."""
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", server.port))
    content = json.dumps(body).encode()
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
    connection.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def test_a_full_queue_refuses_at_once_and_loses_nothing(server: RunningServer) -> None:
    long = {**SPEECH, "max_new_tokens": 300}
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.append(server.post("/v1/audio/speech", json=long)))
        for _ in range(LIMITS.queue)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.state.service.num_jobs == LIMITS.queue)
    begun = time.monotonic()
    refused = server.post("/v1/audio/speech", json=SPEECH)
    assert time.monotonic() - begun < 2 and refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1 and error_of(refused)["code"] == "queue_full"
    for thread in threads:
        thread.join()
    expected = pcm16(server.generator.speak(TEXT, seed=1, max_duration_s=12.0).samples_1N)
    assert [answer.content for answer in answers] == [expected] * LIMITS.queue
    wait_for(server.is_idle)


def test_a_slow_reader_stops_its_own_stream_and_is_left_in_the_end(server: RunningServer) -> None:
    slow_body = {**SPEECH, "stream_format": "audio", "max_new_tokens": 1500}
    with send_request(server, slow_body, receive_bytes=2048) as slow:
        wait_for(lambda: server.state.open_streams == 1)
        body = {**SPEECH, "seed": 4, "stream_format": "audio", "max_new_tokens": 150}
        quick = server.post("/v1/audio/speech", json=body)
        assert quick.content == pcm16(streamed_sound(server.generator, TEXT, seed=4, max_duration_s=6.0))
        (job,) = server.state.service.lanes[0].jobs or {None}
        if job is not None:
            wait_for(lambda: job.paused or job.is_over)
            assert job.ahead_s <= MAX_AHEAD_S
        wait_for(server.is_idle)  # after `stall_s`
        received = b""
        with pytest.raises((ConnectionError, EOFError)):
            while True:
                piece = slow.recv(65536)
                if not piece:
                    raise EOFError
                received += piece
        assert not received.endswith(b"0\r\n\r\n")  # a stream that was cut does not look complete


@pytest.mark.parametrize("callers", [12, pytest.param(500, marks=pytest.mark.slow)])
def test_those_who_leave_are_gone(server: RunningServer, callers: int) -> None:
    """Slots, threads and handles are then those of the start, and so is the cache."""
    counts = server.state.service.lanes[0].counts
    threads_before, files_before, cancelled_before = (
        threading.active_count(),
        num_files(),
        counts["cancelled"],
    )
    for number in range(callers):
        body = {**SPEECH, "max_new_tokens": 1500, **({"stream_format": "audio"} if number % 2 else {})}
        with send_request(server, body) as connection:
            wait_for(lambda: server.engine().busy)
            if number % 2:
                connection.recv(100)
        wait_for(server.is_idle)
        assert server.engine()._owners == []
    assert threading.active_count() <= threads_before + 1
    assert counts["cancelled"] >= cancelled_before + callers
    wait_for(lambda: num_files() <= files_before + 2)


def test_open_streams_are_counted(server: RunningServer) -> None:
    body = {**SPEECH, "stream_format": "sse", "max_new_tokens": 1500}
    connections = [send_request(server, body) for _ in range(LIMITS.streams)]
    wait_for(lambda: server.state.open_streams == LIMITS.streams)
    refused = server.post("/v1/audio/speech", json=body)
    assert refused.status_code == 429 and error_of(refused)["code"] == "too_many_streams"
    for connection in connections:
        connection.close()
    wait_for(server.is_idle)


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"input": "one " * 60}, "input", "240 characters, at most 200"),
        ({"max_new_tokens": 2000}, "max_new_tokens", "at most 1500 frames"),
        ({"max_new_tokens": 0}, "max_new_tokens", "greater than or equal to 1"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"temperature": 1e308}, "temperature", "less than or equal to 20"),
        ({"sample_rate": 1}, "sample_rate", "8000"),
    ],
)
def test_limits_name_their_field(server: RunningServer, body: dict[str, Any], field: str, words: str) -> None:
    refused = server.post("/v1/audio/speech", json={**SPEECH, **body})
    assert refused.status_code == 400
    assert error_of(refused)["param"] == field and words in error_of(refused)["message"]


def test_an_answer_that_takes_too_long(server: RunningServer) -> None:
    limits = server.state.limits
    server.state.limits = replace(limits, request_s=0.2)
    try:
        late = server.post("/v1/audio/speech", json={**SPEECH, "max_new_tokens": 1500})
        assert late.status_code == 504 and error_of(late)["code"] == "timeout"
        wait_for(server.is_idle)
    finally:
        server.state.limits = limits


def test_recordings_beyond_the_limit(server: RunningServer) -> None:
    limits = server.state.limits
    server.state.limits = replace(limits, recording_s=1.0)
    try:
        with pytest.raises(openai.BadRequestError, match="longer than 1 s"):
            server.client().audio.transcriptions.create(model="toy", file=("a.wav", voice_wav(2.0)))
    finally:
        server.state.limits = limits


def test_the_first_signal_lets_answers_end_and_takes_no_more() -> None:
    with running_server(replace(LIMITS, stall_s=30.0)) as server:
        assert httpx.get(f"{server.address}/health").json() == {"status": "ready"}
        answers: list[httpx.Response] = []
        body = {**SPEECH, "max_new_tokens": 300}
        whole = threading.Thread(target=lambda: answers.append(server.post("/v1/audio/speech", json=body)))
        whole.start()
        with send_request(server, {**body, "stream_format": "audio"}) as stream:
            wait_for(lambda: server.state.service.num_jobs == 2)
            server.uvicorn.handle_exit(signal.SIGTERM, None)
            health = httpx.get(f"{server.address}/health")
            assert health.status_code == 503 and health.json() == {"status": "draining"}
            refused = server.post("/v1/audio/speech", json=body)
            assert refused.status_code == 503 and error_of(refused)["code"] == "draining"
            assert "retry-after" in refused.headers
            received = b""
            while piece := stream.recv(65536):
                received += piece
            assert received.endswith(b"0\r\n\r\n")
        whole.join()
        expected = pcm16(server.generator.speak(TEXT, seed=1, max_duration_s=12.0).samples_1N)
        assert answers[0].content == expected
        wait_for(lambda: server.uvicorn.should_exit)
