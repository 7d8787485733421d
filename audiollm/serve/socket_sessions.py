"""What sessions over sockets share: messages in their order, sentences as a text arrives, speech while it is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from audiollm.generation.service.jobs import Emitted, MakePlan
from audiollm.generation.speaking.long_text import split_sentences
from audiollm.serve.app_state import AppState
from audiollm.serve.calls import ServerCall
from audiollm.serve.errors import ApiError
from audiollm.serve.model import ServerModel

MESSAGES_AHEAD = 256
"""Messages of a client that are read ahead of what is answered."""
T = TypeVar("T")


async def answer_in_order(
    read: Callable[[], Awaitable[T | None]], answer: Callable[[T], Awaitable[None]]
) -> None:
    """Answer messages one after the other until the client leaves, which ends what is under way.

    Args:
        read: reads a message; None: the client has left.

    Raises:
        Exception: what `read` or `answer` raised.
    """
    messages: asyncio.Queue[T] = asyncio.Queue(MESSAGES_AHEAD)

    async def read_all() -> None:
        while (message := await read()) is not None:
            await messages.put(message)

    async def answer_all() -> None:
        while True:
            await answer(await messages.get())

    tasks = [asyncio.create_task(read_all()), asyncio.create_task(answer_all())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class SentenceBuffer:
    """A text that arrives in pieces. A sentence is complete once the next one begins.

    Args:
        max_characters: of the whole text.
    """

    def __init__(self, max_characters: int) -> None:
        self._max_characters, self._characters, self._text = max_characters, 0, ""

    def add(self, text: str) -> list[str]:
        """Take a piece, and return the sentences that it completes.

        Raises:
            ApiError: the text is too long.
        """
        if not text:
            return []
        self._characters += len(text)
        if self._characters > self._max_characters:
            message = f"the text has more than {self._max_characters} characters: cut it"
            raise ApiError(400, message, "text", "text_too_long")
        self._text += text
        *complete, self._text = split_sentences(self._text) or [""]
        if self._text and text[-1].isspace():
            self._text += " "
        return complete

    def rest(self) -> list[str]:
        """Return the sentence that is left at the end of the text, if any."""
        text, self._text, self._characters = self._text.strip(), "", 0
        return [text] if text else []


async def speech_pieces(
    state: AppState, model: ServerModel, make_plan: MakePlan
) -> AsyncGenerator[Emitted, None]:
    """Yield what a plan emits; a piece counts as taken when the next one is asked for.

    Raises:
        ApiError: too many streams are open.
        ServiceFull: see `ServerCall`.
        Exception: what the plan raised.
    """
    state.begin_stream()
    call = None
    try:
        call = ServerCall(state.service, model, make_plan)
        async with aclosing(call.pieces()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                yield piece
                call.take(piece.sound_s)
    finally:
        state.end_stream()
        if call is not None:
            call.cancel()
