"""A caller's side of a job: its pieces and its end, awaited by the loop that answers HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from audiollm.generation.service.jobs import Done, Emitted, Failed, MakePlan, Progress
from audiollm.generation.service.service import GenerationService
from audiollm.serve.app_state import AppState
from audiollm.serve.errors import ApiError, as_api_error
from audiollm.serve.gate import log
from audiollm.serve.model import ServerModel

LEFT_STATUS = 499
"""Status of the log for somebody who left before the answer; nobody receives it."""
Chunk = tuple[bytes, float]
"""Bytes of an answer, and the seconds of sound that count as taken once they are on their way."""


class ServerCall:
    """A job of this loop.

    Raises:
        ServiceFull: there are as many jobs as the service takes.
    """

    def __init__(self, service: GenerationService, model: ServerModel, make_plan: MakePlan) -> None:
        self._service, self._lane = service, model.lane
        self._progress: asyncio.Queue[Progress] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(progress: Progress) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._progress.put_nowait, progress)

        self._job = service.submit(model.lane, make_plan, listen)
        self._first: Progress | None = None
        self.result: Any = None
        """The result of the plan, once `pieces` has ended."""

    async def begin(self) -> None:
        """Wait for the first piece or the end: what the request lacks is known then.

        Raises:
            Exception: what the plan raised.
        """
        self._first = await self._progress.get()
        if isinstance(self._first, Failed):
            raise self._first.error

    async def pieces(self) -> AsyncIterator[Emitted]:
        """Yield pieces until the end; `take` tells that one was sent on.

        Raises:
            Exception: what the plan raised.
        """
        while True:
            progress = self._first or await self._progress.get()
            self._first = None
            if isinstance(progress, Failed):
                raise progress.error
            if isinstance(progress, Done):
                self.result = progress.result
                return
            yield progress

    async def finish(self) -> Any:
        """Wait for the result of a plan that emits nothing. Raises: Exception: what the plan raised."""
        async for _ in self.pieces():
            pass
        return self.result

    def take(self, sound_s: float) -> None:
        """Tell that seconds of sound are on their way to the reader."""
        if sound_s:
            self._service.take(self._job, sound_s)

    def cancel(self) -> None:
        """Leave; does nothing after the end."""
        self._service.cancel(self._lane, self._job)


async def await_whole(request: Request, call: ServerCall, limit_s: float) -> Any:
    """Wait for the result of a call that gives no pieces.

    Raises:
        ApiError: it took too long, or the caller has left.
        Exception: what the plan raised.
    """
    try:
        return await _unless_left(request, call.finish(), limit_s)
    finally:
        call.cancel()


async def open_stream(
    state: AppState, model: ServerModel, make_plan: MakePlan, request: Request
) -> ServerCall:
    """Begin a streamed answer, and wait for its first piece; `CallStream` ends it.

    Raises:
        ApiError: too many streams are open, the first piece took too long, or the caller has left.
        ServiceFull: see `ServerCall`.
        Exception: what the plan raised.
    """
    state.begin_stream()
    call = None
    try:
        call = ServerCall(state.service, model, make_plan)
        await _unless_left(request, call.begin(), state.limits.request_s)
    except BaseException:
        state.end_stream()
        if call is not None:
            call.cancel()
        raise
    return call


async def _unless_left(request: Request, awaited: Coroutine[Any, Any, Any], limit_s: float) -> Any:
    """Wait for a part of an answer for as long as the caller waits for it."""
    finishing, leaving = asyncio.create_task(awaited), asyncio.create_task(has_left(request.receive))
    try:
        await asyncio.wait({finishing, leaving}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if finishing.done():
            return await finishing
        if leaving.done():
            raise ApiError(LEFT_STATUS, "the caller has left")
        message = (
            f"the answer took more than {limit_s:g} s: ask for less, or again when the server is less busy"
        )
        raise ApiError(504, message, None, "timeout")
    finally:
        await _end_tasks(finishing, leaving)


async def has_left(receive: Callable[[], Any]) -> None:
    """Return when the caller has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class CallStream(Response):
    """An answer that is sent while it is made. Whoever reads nothing for `stall_s`, or leaves, ends it.

    Args:
        chunks: bytes with the seconds of sound in them.
    """

    def __init__(
        self,
        call: ServerCall,
        chunks: AsyncIterator[Chunk],
        media_type: str,
        *,
        stall_s: float,
        headers: dict[str, str] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(media_type=media_type, headers={**(headers or {}), "Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._call, self._chunks, self._stall_s, self._on_end = call, chunks, stall_s, on_end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sending, leaving = asyncio.create_task(self._send_all(send)), asyncio.create_task(has_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            self._call.cancel()
            self._on_end()
            await _end_tasks(sending, leaving)

    async def _send_all(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._chunks) as chunks:  # type: ignore[type-var]
            async for content, sound_s in chunks:
                if content:
                    message = {"type": "http.response.body", "body": content, "more_body": True}
                    await asyncio.wait_for(send(message), self._stall_s)
                self._call.take(sound_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def sse(event: dict[str, Any] | str) -> bytes:
    """An event of a stream of server-sent events: JSON, or a word."""
    data = event if isinstance(event, str) else json.dumps(event)
    return f"data: {data}\n\n".encode()


async def with_error_event(chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    """End a stream of events with the error, where one comes: its status is sent already."""
    try:
        async for chunk in chunks:
            yield chunk
    except Exception as error:
        log.exception("a stream failed", exc_info=error)
        yield b"data: " + as_api_error(error).body() + b"\n\n", 0.0
