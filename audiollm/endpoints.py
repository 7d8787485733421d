"""A client for OpenAI-compatible endpoints: requests with retries and time-outs.

The key comes from an environment variable and goes into the header of a request alone. It is taken out of everything
that a server says before that becomes an error. Redirects are not followed: they would carry the key to another host.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from audiollm.errors import TransientError

MAX_REPLY_BYTES = 4_000_000
MAX_ERROR_BYTES = 65_536
MAX_EXCERPT_CHARACTERS = 200
CHUNK_BYTES = 65_536
TRANSIENT_STATUS = (408, 409, 425, 429)
"""Besides 500 and above: the same request may succeed later."""
WHAT_TO_CHECK = {
    401: "check the key in {key_variable}",
    402: "check the credit of the account",
    403: "check that the key in {key_variable} has the right to use the model",
    404: "check the address {base_url} and the name of the model",
}
"""Statuses by which every request is refused until a person has mended something, and what to check."""
REDACTED = "[key]"
_CHECK_EVERY_S = 0.1
"""Seconds between two looks at whether a caller still wants the reply."""


class EndpointError(Exception):
    """There is no usable answer; the message says why, and never holds the key."""


class EndpointUnavailable(EndpointError, TransientError):
    """The endpoint does not answer now: no connection, a time-out, overload, an error of the server; or it
    refuses every request (`WHAT_TO_CHECK`)."""


@dataclass(frozen=True)
class EndpointClient:
    """Sends requests to an OpenAI-compatible endpoint (vLLM, OpenAI, Gemini's compatible endpoint, speaches).

    Args:
        base_url: for example http://localhost:8000/v1.
        key_variable: the environment variable with the key; unset or empty: no key is sent.
        timeout_s: the longest wait for the connection, for the next byte, and for the whole body of a reply.
        attempts: tries of each request. Overload, time-outs and errors of the server are tried again.
        pause_s: wait before the second attempt; it doubles before each further one.

    Raises:
        ValueError: the address is no http(s) address, or holds a password.
    """

    base_url: str
    key_variable: str = "OPENAI_API_KEY"
    timeout_s: float = 120.0
    attempts: int = 4
    pause_s: float = 2.0

    def __post_init__(self) -> None:
        check_address(self.base_url)

    def post_json(
        self, path: str, values: dict[str, Any], check_stop: Callable[[], None] | None = None
    ) -> bytes:
        """The reply to a JSON request; see `post`."""
        return self.post(path, json.dumps(values).encode(), "application/json", check_stop)

    def post(
        self, path: str, body: bytes, content_type: str, check_stop: Callable[[], None] | None = None
    ) -> bytes:
        """The body of the reply, at most 4 MB of it.

        Args:
            path: below the base address, for example `chat/completions`.
            check_stop: called while the reply is waited for; what it raises ends the wait, and the request ends by
                itself. None: wait to the end.

        Raises:
            EndpointUnavailable: the last attempt failed, and a later one may succeed; or every request is refused.
            EndpointError: this request was refused.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                if check_stop is None:
                    return self._send(path, body, content_type)
                return self._sent_beside(path, body, content_type, check_stop)
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {self._read_error_excerpt(error)}"
                transient = error.code in TRANSIENT_STATUS or error.code >= 500
                refuses_all = error.code in WHAT_TO_CHECK
                if refuses_all:
                    reason += f"; {self._what_to_check(error.code)}"
            except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out, cut short
                reason = f"no connection: {self.redact(str(error) or type(error).__name__)}"
                transient, refuses_all = True, False
            if refuses_all or (transient and attempt == self.attempts):
                raise EndpointUnavailable(reason)
            if not transient:
                raise EndpointError(reason)
            self._pause(self.pause_s * 2 ** (attempt - 1), check_stop)
        raise AssertionError("the last attempt returns or raises")

    def excerpt(self, content: bytes) -> str:
        """The start of what a server said, in one line and without the key."""
        text = self.redact(content.decode(errors="replace"))
        return " ".join(text.split())[:MAX_EXCERPT_CHARACTERS]

    def redact(self, text: str) -> str:
        """A text without the key, as it is and as it is written in an address or in JSON."""
        key = self._key()
        for spelling in (key, quote(key, safe=""), json.dumps(key)[1:-1]):
            if spelling:
                text = text.replace(spelling, REDACTED)
        return text

    def _what_to_check(self, status: int) -> str:
        check = WHAT_TO_CHECK[status]
        return self.redact(check.format(key_variable=self.key_variable, base_url=self.base_url))

    def _key(self) -> str:
        return os.environ.get(self.key_variable, "").strip()

    def _send(self, path: str, body: bytes, content_type: str) -> bytes:
        headers = {"Content-Type": content_type}
        if key := self._key():
            if not (key.isascii() and key.isprintable()):  # http.client would show it in its error
                raise EndpointError(
                    f"the key in {self.key_variable} holds characters that no header can hold"
                )
            headers["Authorization"] = f"Bearer {key}"
        url = f"{self.base_url.rstrip('/')}/{path}"
        request = urllib.request.Request(url, body, headers, method="POST")
        opener = urllib.request.build_opener(_NoRedirect())
        with opener.open(request, timeout=self.timeout_s) as reply:
            return self._read(reply)

    def _sent_beside(
        self, path: str, body: bytes, content_type: str, check_stop: Callable[[], None]
    ) -> bytes:
        """Send in a thread of its own: a wait for the first byte of a reply cannot be interrupted."""
        reply: Future[bytes] = Future()

        def send() -> None:
            try:
                reply.set_result(self._send(path, body, content_type))
            except Exception as error:
                reply.set_exception(error)

        threading.Thread(target=send, name="endpoint request", daemon=True).start()
        while not wait([reply], _CHECK_EVERY_S).done:
            check_stop()
        return reply.result()

    @staticmethod
    def _pause(seconds: float, check_stop: Callable[[], None] | None) -> None:
        end = time.monotonic() + seconds
        while check_stop is not None and time.monotonic() + _CHECK_EVERY_S < end:
            check_stop()
            time.sleep(_CHECK_EVERY_S)
        time.sleep(max(0.0, end - time.monotonic()))

    def _read(self, reply: http.client.HTTPResponse) -> bytes:
        """The body of a reply; a server that sends it drop by drop is cut off after `timeout_s`."""
        deadline = time.monotonic() + self.timeout_s
        content = bytearray()
        while len(content) < MAX_REPLY_BYTES and (chunk := reply.read1(CHUNK_BYTES)):
            content += chunk
            if time.monotonic() > deadline:
                raise TimeoutError(f"the reply was not complete after {self.timeout_s:g} s")
        if reply.length and len(content) < MAX_REPLY_BYTES:
            raise http.client.IncompleteRead(bytes(content), reply.length)
        return bytes(content[:MAX_REPLY_BYTES])

    def _read_error_excerpt(self, error: urllib.error.HTTPError) -> str:
        try:
            content = error.read(MAX_ERROR_BYTES)
        except (OSError, http.client.HTTPException):
            content = b""
        if len(content) == MAX_ERROR_BYTES:  # the end may be the beginning of the key
            content = content[: -len(self._key().encode()) or None]
        return self.excerpt(content) or self.redact(str(error.reason))


class Budget(NamedTuple):
    """Limits to what a run may spend; None: no limit.

    Args:
        run: name of the run; what a run has spent is kept with the answers.
        calls: replies, whether they can be used or not. A request that nobody replies to (no connection, a time-out,
            an error of the server) takes nothing from the budget.
        tokens: tokens of requests and replies, as they are told.
    """

    run: str
    calls: int | None = None
    tokens: int | None = None


def check_address(url: str) -> None:
    """Refuse what is no address of an endpoint.

    Raises:
        ValueError: it is no http(s) address, or holds a password.
    """
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ValueError("a password in the address: put the key into an environment variable")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        address = "it" if "@" in url else url  # what stands before an @ may be a password
        raise ValueError(f"{address} is no address: give for example http://localhost:8000/v1")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        return None
