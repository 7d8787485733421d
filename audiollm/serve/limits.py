"""Limits of what a server takes and makes."""

from __future__ import annotations

from dataclasses import dataclass

MB = 1_000_000


@dataclass(frozen=True)
class ServeLimits:
    """The largest requests and answers, and how long the server waits."""

    queue: int = 64
    """Requests that run or wait; further ones are refused at once (429)."""
    streams: int = 32
    """Streamed answers that are open at a time."""
    slots: int = 16
    """Rows of a model's cache: answers side by side, where each branch of guidance takes one."""
    max_length: int = 8192
    """Positions of the longest prompt and answer together."""
    prefill_positions: int = 512
    """Positions of prompts that are read between two steps of those who speak."""
    text_characters: int = 20_000
    """Characters of a text to say, or of a conversation."""
    speech_s: float = 600.0
    """Seconds of the longest speech."""
    recording_s: float = 600.0
    """Seconds of the longest recording."""
    upload_mb: float = 32.0
    """Megabytes of the largest body of a request."""
    answer_tokens: int = 2048
    """Text tokens of the longest answer."""
    request_s: float = 600.0
    """Seconds after which an answer that is not complete is given up (504)."""
    stall_s: float = 30.0
    """Seconds after which a stream whose reader takes nothing ends."""
    drain_s: float = 30.0
    """Seconds that answers under way have when the server is to end."""
    voices: int = 1000
    """Added voices."""
