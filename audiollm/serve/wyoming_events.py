"""Events of the protocol Wyoming, read with bounds: the published reader takes as many bytes as a client says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from wyoming.event import Event

LONGEST_LINE = 65_536
"""Bytes of the line that begins an event."""
LONGEST_DATA = 1_000_000
"""Bytes of the JSON data of an event."""


class BadEvent(Exception):
    """What arrived is no event, or too large; nothing that follows can be read."""


async def read_event(reader: asyncio.StreamReader, max_payload: int) -> Event | None:
    """Read an event; None: the client has left.

    Args:
        max_payload: bytes of the largest payload.

    Raises:
        BadEvent: it is none, or larger than what is taken.
    """
    try:
        line = await reader.readline()
    except ValueError:
        raise BadEvent(f"the line of an event has at most {LONGEST_LINE} bytes") from None
    except ConnectionError:
        return None
    if not line:
        return None
    header = _read_object(line, "the line of an event")
    kind, data = header.get("type"), header.get("data") or {}
    lengths = [header.get(key) or 0 for key in ("data_length", "payload_length")]
    if not isinstance(kind, str) or not isinstance(data, dict) or not all(type(n) is int for n in lengths):
        raise BadEvent("an event has a type, and lengths in bytes")
    for length, most in zip(lengths, (LONGEST_DATA, max_payload), strict=True):
        if not 0 <= length <= most:
            raise BadEvent(f"an event part of {length} bytes: at most {most} are taken")
    try:
        more_data, payload = [await reader.readexactly(length) for length in lengths]
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    if more_data:
        data = {**data, **_read_object(more_data, "the data of an event")}
    return Event(kind, data, payload or None)


def _read_object(content: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise BadEvent(f"{name} is no JSON") from None
    if not isinstance(value, dict):
        raise BadEvent(f"{name} is no object")
    return value
