"""The gate before every request: its key, its host, the page that it comes from, its size, and the line in the log."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import time
from collections import Counter
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from audiollm.serve.errors import ApiError
from audiollm.serve.limits import MB

PATHS_WITHOUT_KEY = frozenset({"/health", "/", "/page.css", "/page.js"})
"""What tells nothing of models and voices; it is answered while the server ends, too."""
DRAIN_RETRY_S = 5
SWITCHED = 101
"""Status of the log for a websocket that was opened."""
REFUSED_SOCKET_START = "websocket.http.response.start"
POLICY_VIOLATION = 1008
"""Code of a websocket that is refused."""
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
log = logging.getLogger("audiollm.serve")
"""One JSON line for each request, without its content."""


@dataclass
class ServerState:
    """What the gate and the routes share."""

    host: str = "127.0.0.1"
    """The address that the server listens on."""
    key: str | None = None
    """What callers prove themselves with; None: everybody on this machine may ask."""
    hostnames: Sequence[str] = ()
    """Further names under which the server is called."""
    max_body_bytes: int = 32 * MB
    is_draining: bool = False
    """Whether the server answers only what is under way."""
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Answered requests by path and status."""


class ServeGate:
    """ASGI middleware: refuses what no route should see, in OpenAI's form of an error."""

    def __init__(self, app: Any, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 0
        state, body_bytes = self._state, 0

        async def counted_receive() -> Any:
            nonlocal body_bytes
            message = await receive()
            body_bytes += len(message.get("body", b""))
            if body_bytes > state.max_body_bytes:
                raise _too_large(state)
            return message

        async def noted_send(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if body_bytes > state.max_body_bytes and not status:
                return  # what the app makes of a body that was not read: the gate answers
            if message["type"] == "websocket.accept":
                status = SWITCHED
            elif message["type"] in ("http.response.start", REFUSED_SOCKET_START):
                status = message["status"]
                silent = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
                message = {**message, "headers": [*message.get("headers", ()), *silent]}
            await send(message)

        try:
            check_request(scope, state)
            await self._app(scope, counted_receive, noted_send)
            if body_bytes > state.max_body_bytes and not status:
                raise _too_large(state)
        except ApiError as error:
            if not status:
                body_bytes = 0
                await send_error(noted_send, error, scope)
        finally:
            path = getattr(scope.get("route"), "path", "(other)")
            state.requests[path, status] += 1
            facts = {"path": path, "method": scope.get("method"), "status": status}
            log.info(json.dumps({**facts, "seconds": round(time.perf_counter() - begun, 4)}))


def check_request(scope: MutableMapping[str, Any], state: ServerState) -> None:
    """Check who asks, under which name of the server, and how much.

    Raises:
        ApiError: the request is refused.
    """
    headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
    host = headers.get(b"host", "")
    if not is_name_of_server(host, state):
        message = "the server is not called by this name: use its address, or start it with --hostname"
        raise ApiError(421, message, "Host")
    origin = headers.get(b"origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise ApiError(403, "pages of other origins may not ask this server", "Origin")
    if scope["path"] in PATHS_WITHOUT_KEY:
        return
    if state.key is not None and not is_key(headers.get(b"authorization", ""), state.key):
        raise ApiError(
            401, "the key is missing or wrong: send Authorization: Bearer KEY", None, "invalid_api_key"
        )
    check_open(state)
    length = headers.get(b"content-length", "0")
    if not length.isdigit() or int(length) > state.max_body_bytes:
        raise _too_large(state)


def check_open(state: ServerState) -> None:
    """Raises: ApiError: the server answers only what is under way."""
    if state.is_draining:
        raise ApiError(503, "the server ends: ask another, or later", None, "draining", DRAIN_RETRY_S)


def is_name_of_server(host: str, state: ServerState) -> bool:
    """Return whether a `Host` header names this server: pages that bind their own name to its address are refused."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.strip("[]").lower()
    if name in {hostname.lower() for hostname in state.hostnames}:
        return True
    if state.host in _LOCAL_NAMES:
        return name in _LOCAL_NAMES
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_key(authorization: str, key: str) -> bool:
    """Compare what a caller sent with the key, in a time that does not depend on how much of it is right."""
    kind, _, secret = authorization.partition(" ")
    sent, expected = (hashlib.sha256(text.strip().encode()).digest() for text in (secret, key))
    return hmac.compare_digest(sent, expected) and kind.lower() == "bearer"


async def send_error(send: Any, error: ApiError, scope: MutableMapping[str, Any]) -> None:
    """Send an error as the whole answer; a websocket is refused with it, where the server can."""
    is_socket = scope["type"] == "websocket"
    if is_socket and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": error.message[:100]})
        return
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    if error.status == 413:
        headers.append((b"connection", b"close"))
    prefix = "websocket." if is_socket else ""
    await send({"type": f"{prefix}http.response.start", "status": error.status, "headers": headers})
    await send({"type": f"{prefix}http.response.body", "body": body})


def _too_large(state: ServerState) -> ApiError:
    message = f"a request has at most {state.max_body_bytes / MB:g} MB: send less"
    return ApiError(413, message, "body", "too_large")
