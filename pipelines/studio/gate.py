"""The gate before every request: who asks, from where, and for what. All that is not named here is refused.

Gradio gives files of its cache to everyone who knows their address, proxies other addresses and takes uploads of any
size; the studio uses none of that, and the gate lets none of it through.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, MutableMapping
from typing import Any

from pipelines.studio.store import owner_of

COOKIE = "audiollm_studio"
OWNER = "studio_owner"
"""The key of a request's scope that says whose browser asks."""
HEADER = b"x-studio"
"""A header that pages of other origins cannot send: without it nothing is changed."""
_YEAR_S = 365 * 24 * 3600
_MOST_BODY = 1_000_000
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
_ADDRESS = "127.0.0.1"
_OTHER_NAME = re.compile(r"(?:localhost|\[::1\])(:\d{1,5})?")
"""Names of this machine under which a browser would keep another cookie: it is sent on to the address."""
_LOCAL = re.compile(r"127\.0\.0\.1(?::\d{1,5})?")
UPLOAD_PATH = "/studio/api/projects"
REPORT_PREFIX = "/studio/reports/"
_PAGES = frozenset(
    {"/", "/config", "/config/", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt"}
)
_PREFIXES = ("/assets/", "/static/", "/svelte/", "/studio/", "/gradio_api/heartbeat/")
_FOR_ALL = ("/assets/", "/static/", "/svelte/", "/studio/static/", REPORT_PREFIX)
"""Addresses that tell nothing of a person; a report's address itself is a secret, as its frame has no cookies."""
_GRADIO = frozenset(
    {
        "/gradio_api/queue/join",
        "/gradio_api/queue/data",
        "/gradio_api/info",
        "/gradio_api/startup-events",
        "/gradio_api/theme.css",
        "/gradio_api/reset",
        "/gradio_api/cancel",
    }
)
_FROM_ELSEWHERE = (b"cross-site", b"same-site")
"""Where a link to the studio stands that a browser follows without its cookie (SameSite=Strict)."""
_PAGE_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' blob:; connect-src 'self'; font-src 'self' data:; "
    "worker-src 'self' blob:; frame-src 'self'; frame-ancestors 'none'; base-uri 'self'; form-action 'self'; "
    "object-src 'none'"
)
_SILENT: Mapping[bytes, bytes] = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
}


class StudioGate:
    """ASGI middleware. Sets `scope[OWNER]` from the browser's cookie; the page itself gives a new browser one."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        path, method = scope["path"], scope["method"]
        host = headers.get(b"host", b"").decode("latin-1")
        is_page = path == "/" and method in ("GET", "HEAD")
        if is_page and (match := _OTHER_NAME.fullmatch(host)):
            await _send_on(send, f"http://{_ADDRESS}{match[1] or ''}/", scope.get("query_string", b""))
            return
        if not _LOCAL.fullmatch(host):
            await _send_refusal(
                send, 421, "The studio answers on the local address alone: open http://127.0.0.1."
            )
            return
        if not is_allowed(path):
            await _send_refusal(send, 403, "The studio does not serve this address.")
            return
        token, is_new = _read_cookie_token(headers), False
        if token is None and is_page and headers.get(b"sec-fetch-site") in _FROM_ELSEWHERE:
            await _load_again(send)
            return
        if token is None and is_page:
            token, is_new = secrets.token_urlsafe(32), True
        is_report = path.startswith(REPORT_PREFIX)
        if token is None and not path.startswith(_FOR_ALL) and path not in ("/favicon.ico", "/robots.txt"):
            await _send_refusal(send, 401, "Open the studio's page first.")
            return
        if method not in ("GET", "HEAD") and (problem := _unsafe_problem(headers, path, scope)):
            await _send_refusal(send, *problem)
            return
        if token is not None:
            scope[OWNER] = owner_of(token)

        async def send_safely(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers_to_send = list(message.get("headers", ()))
                names = {name.lower() for name, _ in headers_to_send}
                headers_to_send += [(name, value) for name, value in _SILENT.items() if name not in names]
                if not is_report:
                    headers_to_send.append((b"content-security-policy", _PAGE_POLICY.encode()))
                    headers_to_send.append((b"cross-origin-resource-policy", b"same-origin"))
                if is_new:
                    cookie = f"{COOKIE}={token}; Max-Age={_YEAR_S}; Path=/; HttpOnly; SameSite=Strict"
                    headers_to_send.append((b"set-cookie", cookie.encode()))
                message = {**message, "headers": headers_to_send}
            await send(message)

        await self._app(scope, receive, send_safely)


def is_allowed(path: str) -> bool:
    """Return whether an address is one of the studio's."""
    if "\\" in path or "//" in path or "\0" in path or ".." in path.split("/"):
        return False
    return path in _PAGES or path in _GRADIO or path.startswith(_PREFIXES)


# Private


def _read_cookie_token(headers: Mapping[bytes, bytes]) -> str | None:
    # not http.cookies: it drops all cookies where another server on this machine has set one that breaks its grammar
    for cookie in headers.get(b"cookie", b"").decode("latin-1").split(";"):
        name, _, value = cookie.strip().partition("=")
        if name == COOKIE and _TOKEN.fullmatch(value):
            return value
    return None


def _unsafe_problem(
    headers: Mapping[bytes, bytes], path: str, scope: Mapping[str, Any]
) -> tuple[int, str] | None:
    """The refusal of a request that would change something; None: it may."""
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").partition("://")[2] != headers[b"host"].decode(
        "latin-1"
    ):
        return 403, "Another page must not change projects."
    if path.startswith("/studio/") and headers.get(HEADER) != b"1":
        return 403, "Another page must not change projects."
    if path == UPLOAD_PATH:
        return None  # counted where it is read
    length = headers.get(b"content-length", b"")
    if headers.get(b"transfer-encoding") or (length and not length.isdigit()):
        return 411, "The request does not tell its length."
    if int(length or 0) > _MOST_BODY:
        return 413, "The request is too large."
    return None


async def _send_on(send: Any, address: str, query: bytes) -> None:
    """Redirect a browser to the one address, where its cookie is."""
    place = address.encode() + (b"?" + query if query else b"")
    headers = [(b"location", place), (b"content-length", b"0"), *_SILENT.items()]
    await send({"type": "http.response.start", "status": 307, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _load_again(send: Any) -> None:
    """Let the page load itself: then its browser sends the cookie that it has, and is given no other."""
    body = b'<!doctype html><meta http-equiv="refresh" content="0"><title>audiollm studio</title>'
    headers = [(b"content-type", b"text/html; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": [*headers, *_SILENT.items()]})
    await send({"type": "http.response.body", "body": body})


async def _send_refusal(send: Any, status: int, sentence: str) -> None:
    body = json.dumps({"sentence": sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *_SILENT.items()]})
    await send({"type": "http.response.body", "body": body})
