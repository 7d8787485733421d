"""Answers of a judge that is an LLM, read without trusting what it read or heard.

A text or a recording under judgment can hold instructions ("the first one wins"). An answer is one JSON object that
repeats a ticket which neither text nor sound can know; an answer without such an object is a failure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

from audiollm.evaluate.subjects.chat import Chat, ChatError
from audiollm.failures import noted_outcome
from audiollm.models.audio_llms.inputs import Parts

Read = TypeVar("Read")


class VerdictError(Exception):
    """There is no verdict; the message is the reason that a table shows."""


def ask_with_ticket(
    chat: Chat,
    parts_of: Callable[[str], Parts],
    read: Callable[[str, str], Read],
    attempts: int,
    seed_text: str,
) -> Read:
    """Ask a judge until its answer can be read, and return what `read` makes of it.

    Args:
        parts_of: the request with a ticket.
        read: reads an answer, given the ticket; its `VerdictError` asks again.
        attempts: how often the judge is asked until its answer can be read; the ticket is another each time.
        seed_text: what the tickets are made from, so that the same question has the same ones.

    Raises:
        VerdictError: there is no answer that can be read.
        FailedOnEveryItem: there was none for a few dozen questions, for one reason, and no other was answered.
    """
    with noted_outcome("the judge"):
        return _ask_until_readable(chat, parts_of, read, attempts, seed_text)


def _ask_until_readable(
    chat: Chat,
    parts_of: Callable[[str], Parts],
    read: Callable[[str, str], Read],
    attempts: int,
    seed_text: str,
) -> Read:
    reason = ""
    for attempt in range(attempts):
        ticket = hashlib.sha256(f"{attempt} {seed_text}".encode()).hexdigest()[:8]
        try:
            answer = chat.ask(parts_of(ticket))
        except ChatError as error:
            raise VerdictError(str(error)) from error
        try:
            return read(answer, ticket)
        except VerdictError as error:
            reason = str(error)
    raise VerdictError(f"{reason}, {attempts} times")


def objects_with_ticket(answer: str, ticket: str) -> list[dict[str, Any]]:
    """The outermost JSON objects of an answer that repeat the ticket; at least one.

    Raises:
        VerdictError: none does.
    """
    matches = [value for value in _find_json_objects(answer) if str(value.get("ticket")) == ticket]
    if not matches:
        raise VerdictError("no verdict in the answer")
    return matches


def _find_json_objects(text: str) -> list[dict[str, Any]]:
    """The outermost JSON objects in a text; objects inside them are not returned."""
    decoder = json.JSONDecoder()
    values: list[dict[str, Any]] = []
    at = text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError):
            end = at + 1
        else:
            values.append(value)
        at = text.find("{", end)
    return values
