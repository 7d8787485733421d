"""The client for endpoints against a server on this machine: retries, time-outs, and a key that is never shown."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from audiollm.endpoints import (
    MAX_ERROR_BYTES,
    EndpointClient,
    EndpointError,
    EndpointUnavailable,
    check_address,
)

KEY = 'sk-"secret"/1234567890'
Behave = Callable[[BaseHTTPRequestHandler], None]


class Server(ThreadingHTTPServer):
    """Does what is prepared, in turn, and keeps the headers that it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviours: list[Behave] = []
        self.seen: list[dict[str, str]] = []
        self.closed = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append(dict(self.headers))
        self.server.behaviours.pop(0)(self)

    def log_message(self, *arguments: Any) -> None:
        pass


def answer(status: int, body: bytes = b"{}", reason: str | None = None) -> Behave:
    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status, reason)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return behave


def cut_short(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"half": ')


def hang(handler: _Handler) -> None:
    handler.server.closed.wait(20)


def drip(handler: _Handler) -> None:
    """A byte every 50 ms: no single read is late, the reply never ends."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    while not handler.server.closed.wait(0.05):
        handler.wfile.write(b" ")
        handler.wfile.flush()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("A_KEY", KEY)
    made = Server()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.closed.set()
    made.shutdown()
    made.server_close()
    thread.join()


def client(server: Server, **settings: Any) -> EndpointClient:
    return EndpointClient(server.url, "A_KEY", **{"timeout_s": 5.0, "pause_s": 0.01, **settings})


def test_what_may_pass_is_tried_again(server: Server) -> None:
    server.behaviours = [answer(500), answer(429), cut_short, answer(200, b'{"a": 1}')]
    assert client(server).post_json("x", {}) == b'{"a": 1}'
    assert [headers["Authorization"] for headers in server.seen] == [f"Bearer {KEY}"] * 4


@pytest.mark.parametrize(("status", "tries"), [(500, 3), (400, 1), (413, 1), (302, 1)])
def test_the_last_failure_is_told(server: Server, status: int, tries: int) -> None:
    server.behaviours = [answer(status, b"out of\n order")] * tries
    with pytest.raises(EndpointError, match=f"^HTTP {status}: out of order$"):
        client(server, attempts=3).post_json("x", {})
    assert len(server.seen) == tries


@pytest.mark.parametrize(
    ("status", "check"),
    [
        (401, "the key in A_KEY"),
        (402, "the credit"),
        (403, "the right to use the model"),
        (404, r"the address http://127\.0\.0\.1:\d+/v1 and the name of the model"),
    ],
)
def test_what_every_request_would_get_is_told_apart_with_what_to_check(
    server: Server, status: int, check: str
) -> None:
    server.behaviours = [answer(status, b"out of order")]
    with pytest.raises(EndpointUnavailable, match=f"^HTTP {status}: out of order; check .*{check}"):
        client(server, attempts=3).post_json("x", {})
    assert len(server.seen) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_request_is_its_own_fault(server: Server, status: int) -> None:
    server.behaviours = [answer(status)]
    with pytest.raises(EndpointError, match=f"^HTTP {status}: ") as caught:
        client(server).post_json("x", {})
    assert not isinstance(caught.value, EndpointUnavailable)


@pytest.mark.parametrize("behave", [hang, drip])
def test_a_server_that_hangs_is_left_after_the_time_out(server: Server, behave: Any) -> None:
    server.behaviours = [behave] * 2
    started = time.monotonic()
    with pytest.raises(EndpointError, match="no connection"):
        client(server, timeout_s=0.3, attempts=2).post_json("x", {})
    assert len(server.seen) == 2 and time.monotonic() - started < 5


@pytest.mark.parametrize(
    "body",
    [
        f"wrong key: {KEY}".encode(),
        json.dumps({"error": f"wrong key {KEY}"}).encode(),
        b"wrong key sk-%22secret%22%2F1234567890",
        b" " * (MAX_ERROR_BYTES - 10) + KEY.encode(),
    ],
)
def test_a_server_that_echoes_the_key_does_not_bring_it_into_an_error(
    server: Server, body: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    server.behaviours = [answer(401, body), answer(401, b"", f"no such key {KEY}")]
    for _ in range(2):
        with pytest.raises(EndpointError, match="HTTP 401") as caught:
            client(server).post_json("x", {})
        told = "".join(traceback.format_exception(caught.value)) + caplog.text + "".join(capfd.readouterr())
        assert "secret" not in told and "1234567890" not in told
    assert "secret" not in client(server).excerpt(body) and "secret" not in repr(client(server))


def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "secret\n2")
    with pytest.raises(EndpointError, match="the key in A_KEY holds characters") as caught:
        client(server).post_json("x", {})
    assert "secret" not in "".join(traceback.format_exception(caught.value))
    monkeypatch.setenv("A_KEY", "secret\n")
    server.behaviours = [answer(200)]
    client(server).post_json("x", {})
    assert server.seen[-1]["Authorization"] == "Bearer secret"


def test_without_a_key_none_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_KEY")
    server.behaviours = [answer(200)]
    client(server).post_json("x", {})
    assert "Authorization" not in server.seen[0]


@pytest.mark.parametrize(
    "url", ["localhost:8000", "file:///etc/passwd", "http://me:word@host/v1", "me:word@host"]
)
def test_what_is_no_address_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="address") as caught:
        check_address(url)
    assert "word@" not in str(caught.value)
    with pytest.raises(ValueError, match="address"):
        EndpointClient(url)
